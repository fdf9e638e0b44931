//! The relative error of rows against its reference, with its gradient.

use crate::reference::{
    Random, assert_close, backward, cases, download, flat, garbage, gradient, operators, tensor,
    tolerance, upload, var,
};
use half::bf16;
use moh_kernels::relative_error::{RelativeError, RelativeErrorArgs};
use moh_kernels::{Backend, Cpu, Element};

const SCALE: f32 = 0.75;
/// What the sum has before.
const BEFORE: f64 = 2.0;

fn agrees<B: Backend, T: Element>(
    device: &B,
    rows: usize,
    width: usize,
    seed: u64,
) -> (Vec<T>, f64) {
    let mut random = Random(seed);
    let (y, target): (Vec<T>, Vec<T>) =
        (random.elements(rows * width), random.elements(rows * width));
    let (y_buffer, target_buffer) = (upload(device, &y), upload(device, &target));
    let (mut d_y, mut sum) = (garbage::<B, T>(device, y.len()), upload(device, &[BEFORE]));
    device
        .relative_error(RelativeErrorArgs {
            width,
            scale: SCALE,
            y: B::whole(&y_buffer),
            target: B::whole(&target_buffer),
            d_y: B::whole_mut(&mut d_y),
            sum: B::whole_mut(&mut sum),
        })
        .unwrap();
    let (y, target) = (var(&y, (rows, width)), tensor(&target, (rows, width)));
    let expected = operators::relative_error(&y, &target).unwrap();
    let gradients = backward(&expected, &tensor(&[SCALE], ()));
    let mut found = [0f64];
    device.download(B::whole(&sum), &mut found).unwrap();
    let error = found[0] - BEFORE;
    let reference = flat(&expected)[0];
    assert!((error - reference).abs() <= 1e-5 * reference, "{error} instead of {reference}");
    let d_y = download::<B, T>(device, &d_y);
    assert_close("d_y", &d_y, &gradient(&gradients, &y), tolerance::<T>());
    (d_y, error)
}

#[test]
fn errors_and_gradients_agree() {
    on_each_device!(device, T => agrees::<_, T>(device, 150, 96, 1));
    // A block of a GPU reads 2048 bf16 elements per iteration.
    on_each_device!(device => agrees::<_, bf16>(device, 3, 2304, 1));
    on_each_device!(device => agrees::<_, f32>(device, 1, 4099, 1));
}

#[test]
fn the_bits_are_the_same_in_every_run() {
    on_each_device!(device => {
        let first = agrees::<_, bf16>(device, 700, 40, 4);
        assert!(agrees::<_, bf16>(device, 700, 40, 4) == first);
    });
}

#[test]
fn a_row_whose_target_is_zero_has_no_error() {
    let (y, target) = ([1f32, 2.0, 3.0, 5.0], [0f32, 0.0, 3.0, 4.0]);
    let (mut d_y, mut sum) = ([7f32; 4], [0f64]);
    let args = RelativeErrorArgs::<Cpu, f32> {
        width: 2,
        scale: 25.0,
        y: &y,
        target: &target,
        d_y: &mut d_y,
        sum: &mut sum,
    };
    Cpu.relative_error(args).unwrap();
    assert_eq!((d_y, sum), ([0.0, 0.0, 0.0, 2.0], [0.04]));
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn any_shape_agrees(rows in 1usize..80, width in 1usize..70, seed: u64) {
        on_each_device!(device, T => agrees::<_, T>(device, rows, width, seed));
    }
}
