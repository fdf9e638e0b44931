//! The linear layer against its reference: with and without a residual, and both gradients.

use crate::reference::{
    Random, added, assert_close, backward, cases, download, flat, garbage, gradient, operators,
    tensor, tolerance, upload, var, view, view_mut,
};
use half::bf16;
use moh_kernels::{Backend, Element};

fn agrees<B: Backend, T: Element, G: Element>(
    device: &B,
    [tokens, inputs, outputs]: [usize; 3],
    with_residual: bool,
    seed: u64,
) {
    let mut random = Random(seed);
    let x: Vec<T> = random.numbers(tokens * inputs);
    let weight: Vec<T> = random.numbers(outputs * inputs);
    let residual: Vec<T> = random.numbers(tokens * outputs);
    let d_y: Vec<T> = random.numbers(tokens * outputs);
    let d_weight: Vec<G> = random.numbers(weight.len());

    let (x_buffer, weight_buffer) = (upload(device, &x), upload(device, &weight));
    let (residual_buffer, d_y_buffer) = (upload(device, &residual), upload(device, &d_y));
    let (x_view, weight_view) = (view::<B, T>(&x_buffer), view::<B, T>(&weight_buffer));
    let d_y_view = view::<B, T>(&d_y_buffer);
    let mut y = garbage::<B, T>(device, tokens * outputs);
    let residual_view = with_residual.then(|| view::<B, T>(&residual_buffer));
    let y_view = view_mut::<B, T>(&mut y);
    device.linear_forward(inputs, x_view, weight_view, residual_view, y_view).unwrap();
    let mut d_x = garbage::<B, T>(device, x.len());
    let d_x_view = view_mut::<B, T>(&mut d_x);
    device.linear_backward_input(inputs, d_y_view, weight_view, d_x_view).unwrap();
    let mut d_weight_out = upload(device, &d_weight);
    let d_weight_view = view_mut::<B, G>(&mut d_weight_out);
    device.linear_backward_weight(inputs, x_view, d_y_view, d_weight_view).unwrap();

    let (x, weight) = (var(&x, (tokens, inputs)), var(&weight, (outputs, inputs)));
    let product = operators::linear(&x, &weight).unwrap();
    let gradients = backward(&product, &tensor(&d_y, (tokens, outputs)));
    let expected = if with_residual { added(&residual, &flat(&product)) } else { flat(&product) };
    assert_close("y", &download::<B, T>(device, &y), &expected, tolerance::<T>());
    let expected = gradient(&gradients, &x);
    assert_close("d_x", &download::<B, T>(device, &d_x), &expected, tolerance::<T>());
    let expected = added(&d_weight, &gradient(&gradients, &weight));
    assert_close("d_weight", &download::<B, G>(device, &d_weight_out), &expected, tolerance::<G>());
}

#[test]
fn forward_and_gradients_agree_over_more_than_one_task() {
    for with_residual in [false, true] {
        let shape = [300, 65, 131];
        on_each_device!(device => agrees::<_, f32, f32>(device, shape, with_residual, 1));
        on_each_device!(device => agrees::<_, bf16, f32>(device, shape, with_residual, 1));
        on_each_device!(device => agrees::<_, bf16, bf16>(device, shape, with_residual, 1));
    }
}

#[test]
fn no_token_adds_nothing_to_the_gradient() {
    let mut d_weight = [3f32; 6];
    moh_kernels::Cpu.linear_backward_weight::<f32, f32>(2, &[], &[], &mut d_weight).unwrap();
    assert_eq!(d_weight, [3.0; 6]);
}

/// Of products as large as these a GPU times several algorithms, unless it must be deterministic: when
/// their shape is first seen, on the buffers of the product itself.
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
