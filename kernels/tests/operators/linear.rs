//! The linear layer against its reference: with and without a residual, and both gradients.

use crate::reference::{
    Random, added, assert_close, backward, cases, download, flat, garbage, gradient, operators,
    tensor, tolerance, upload, var, wide,
};
use half::bf16;
use moh_kernels::linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use moh_kernels::{Accumulation, Backend, Element, View};

fn agrees<B: Backend, T: Element, G: Element>(
    device: &B,
    [tokens, inputs, outputs]: [usize; 3],
    with_residual: bool,
    seed: u64,
) {
    let mut random = Random(seed);
    let x: Vec<T> = random.elements(tokens * inputs);
    let weight: Vec<T> = random.elements(outputs * inputs);
    let residual: Vec<T> = random.elements(tokens * outputs);
    let d_y: Vec<T> = random.elements(tokens * outputs);
    let d_weight: Vec<G> = random.elements(weight.len());
    let d_x: Vec<T> = random.elements(x.len());

    let (x_buffer, weight_buffer) = (upload(device, &x), upload(device, &weight));
    let (residual_buffer, d_y_buffer) = (upload(device, &residual), upload(device, &d_y));
    let mut y = garbage::<B, T>(device, tokens * outputs);
    let args = LinearForward {
        inputs,
        x: B::whole(&x_buffer),
        weight: B::whole(&weight_buffer),
        residual: with_residual.then(|| B::whole(&residual_buffer)),
        y: B::whole_mut(&mut y),
        independent: seed.is_multiple_of(2),
        packed: None,
    };
    device.linear_forward(args).unwrap();
    let (mut d_x_out, mut d_x_alone) = (upload(device, &d_x), garbage::<B, T>(device, x.len()));
    let mut d_weight_out = upload(device, &d_weight);
    let mut alone = garbage::<B, G>(device, weight.len());
    for (d_x, d_weight, accumulation) in [
        (&mut d_x_out, &mut d_weight_out, Accumulation::Add),
        (&mut d_x_alone, &mut alone, Accumulation::Overwrite),
    ] {
        let (d_y, weight, d_x) =
            (B::whole(&d_y_buffer), B::whole(&weight_buffer), B::whole_mut(d_x));
        let args = LinearBackwardInput { inputs, d_y, weight, d_x, accumulation };
        device.linear_backward_input::<T>(args).unwrap();
        let (x, d_weight) = (B::whole(&x_buffer), B::whole_mut(d_weight));
        let args = LinearBackwardWeight { inputs, x, d_y, d_weight, accumulation };
        device.linear_backward_weight::<T, G>(args).unwrap();
    }

    let (x, weight) = (var(&x, (tokens, inputs)), var(&weight, (outputs, inputs)));
    let output = operators::linear(&x, &weight).unwrap();
    let gradients = backward(&output, &tensor(&d_y, (tokens, outputs)));
    let expected = if with_residual { added(&residual, &flat(&output)) } else { flat(&output) };
    assert_close("y", &download::<B, T>(device, &y), &expected, tolerance::<T>());
    let expected = gradient(&gradients, &x);
    assert_close("d_x alone", &download::<B, T>(device, &d_x_alone), &expected, tolerance::<T>());
    let expected = added(&d_x, &expected);
    assert_close("d_x", &download::<B, T>(device, &d_x_out), &expected, tolerance::<T>());
    let expected = gradient(&gradients, &weight);
    assert_close("d_weight alone", &download::<B, G>(device, &alone), &expected, tolerance::<G>());
    let expected = added(&d_weight, &expected);
    assert_close("d_weight", &download::<B, G>(device, &d_weight_out), &expected, tolerance::<G>());
}

#[test]
fn forward_and_gradients_agree_over_more_than_one_task() {
    for with_residual in [false, true] {
        let shape = [300, 65, 131];
        on_each_device!(device, T => agrees::<_, T, f32>(device, shape, with_residual, 1));
        on_each_device!(device => agrees::<_, bf16, bf16>(device, shape, with_residual, 1));
    }
}

#[test]
fn the_gradient_of_no_token_is_zeros() {
    fn check<B: Backend, T: Element>(device: &B) {
        let (none, mut d_weight) = (upload::<B, T>(device, &[]), upload(device, &[3f32; 6]));
        for (accumulation, expected) in [(Accumulation::Add, 3.0), (Accumulation::Overwrite, 0.0)] {
            let (x, d_y): (View<'_, B, T>, _) = (B::whole(&none), B::whole(&none));
            let into = B::whole_mut(&mut d_weight);
            let args = LinearBackwardWeight { inputs: 2, x, d_y, d_weight: into, accumulation };
            device.linear_backward_weight(args).unwrap();
            assert_eq!(download::<B, f32>(device, &d_weight), [expected; 6]);
        }
    }
    on_each_device!(device, T => check::<_, T>(device));
}

/// A step's first gradients overwrite the previous gradients. The weights' bits depend on them.
#[test]
fn overwriting_is_adding_to_zeros() {
    fn check<B: Backend, T: Element, G: Element>(device: &B) {
        // More terms than a block of a matmul.
        let [tokens, inputs, outputs] = [4100, 33, 40];
        let mut random = Random(5);
        let x = upload(device, &random.elements::<T>(tokens * inputs));
        let d_y = upload(device, &random.elements::<T>(tokens * outputs));
        let found = [Accumulation::Add, Accumulation::Overwrite].map(|accumulation| {
            let zeros = accumulation == Accumulation::Add;
            let before = if zeros { 0.0 } else { 777.0 };
            let mut d_weight = upload(device, &vec![G::from_f32(before); inputs * outputs]);
            let (x, d_y): (View<'_, B, T>, _) = (B::whole(&x), B::whole(&d_y));
            let into = B::whole_mut(&mut d_weight);
            let args = LinearBackwardWeight { inputs, x, d_y, d_weight: into, accumulation };
            device.linear_backward_weight(args).unwrap();
            wide(&download::<B, G>(device, &d_weight))
        });
        assert!(found[0] == found[1]);
    }
    on_each_device!(device, T => check::<_, T, f32>(device));
    on_each_device!(device => check::<_, bf16, bf16>(device));
}

/// Unless a GPU must be deterministic, it times several algorithms for matmuls of this size when
/// their shape first occurs, on the buffers of the matmul itself.
#[cfg(feature = "cuda")]
#[test]
fn the_fastest_algorithms_of_a_gpu_agree() {
    let Some(gpu) = crate::reference::gpu() else { return println!("skipped: no GPU") };
    let gpu = gpu.with_deterministic(false);
    for _first_and_later in 0..2 {
        agrees::<_, bf16, bf16>(&gpu, [2048, 2048, 2560], true, 3);
        agrees::<_, bf16, f32>(&gpu, [2048, 2048, 2560], false, 4);
    }
}

/// A row of a batch-invariant GPU's matmul does not depend on the number of other rows.
#[cfg(feature = "cuda")]
#[test]
fn a_row_has_the_same_bits_among_any_number_of_rows() {
    fn check<B: Backend, T: Element>(gpu: &B, [inputs, outputs]: [usize; 2]) {
        const ROWS: usize = 700;
        let mut random = Random(7);
        let (x, weight) =
            (random.elements::<T>(ROWS * inputs), random.elements::<T>(outputs * inputs));
        let weight = upload(gpu, &weight);
        let product = |rows: std::ops::Range<usize>| {
            let x = upload(gpu, &x[rows.start * inputs..rows.end * inputs]);
            let mut y = garbage::<B, T>(gpu, rows.len() * outputs);
            let (x, weight) = (B::whole(&x), B::whole(&weight));
            let args = LinearForward::new(inputs, x, weight, B::whole_mut(&mut y));
            gpu.linear_forward::<T>(args).unwrap();
            wide(&download::<B, T>(gpu, &y))
        };
        let all = product(0..ROWS);
        for rows in [0..1, 3..11, 64..192, 500..700, 699..700] {
            let found = product(rows.clone());
            assert!(found == all[rows.start * outputs..rows.end * outputs], "{rows:?} of {inputs}");
        }
    }
    let Some(gpu) = crate::reference::gpu() else { return println!("skipped: no GPU") };
    let gpu = gpu.with_batch_invariance();
    for shape in [[128, 384], [4096, 6144], [14_336, 4096], [2048, 1024]] {
        check::<_, bf16>(&gpu, shape);
        check::<_, f32>(&gpu, shape);
    }
}

proptest::proptest! {
    #![proptest_config(cases(48))]
    #[test]
    fn any_shape_agrees(
        tokens in 1usize..140,
        inputs in 1usize..70,
        outputs in 1usize..140,
        with_residual: bool,
        seed: u64,
    ) {
        let shape = [tokens, inputs, outputs];
        on_each_device!(device => agrees::<_, f32, f32>(device, shape, with_residual, seed));
    }
}
