//! SwiGLU against its reference, forward and gradient.

use crate::reference::{
    F32_TOLERANCE, Random, assert_close, backward, cases, download, flat, garbage, gradient,
    operators, tensor, tolerance, upload, var,
};
use moh_kernels::swiglu::Swiglu;
use moh_kernels::{Backend, Cpu, Element};

fn agrees<B: Backend, T: Element>(device: &B, tokens: usize, width: usize, seed: u64) {
    let mut random = Random(seed);
    let gate_up: Vec<T> = random.elements(tokens * 2 * width);
    let d_out: Vec<T> = random.elements(tokens * width);

    let (mut d_gate_up, mut again) = (upload(device, &gate_up), upload(device, &d_out));
    let mut out = garbage::<B, T>(device, d_out.len());
    device.swiglu_forward(width, B::whole(&d_gate_up), B::whole_mut(&mut out)).unwrap();
    let d_gate_up_view = B::whole_mut::<T>(&mut d_gate_up);
    device.swiglu_backward(width, d_gate_up_view, B::whole_mut(&mut again)).unwrap();
    let (out, again) = (download::<B, T>(device, &out), download::<B, T>(device, &again));
    assert!(out == again, "backward's output has other bits");

    let gate_up = var(&gate_up, (tokens, 2 * width));
    let expected = operators::swiglu(&gate_up).unwrap();
    let gradients = backward(&expected, &tensor(&d_out, (tokens, width)));
    assert_close("out", &out, &flat(&expected), tolerance::<T>());
    let expected = gradient(&gradients, &gate_up);
    assert_close("d_gate_up", &download::<B, T>(device, &d_gate_up), &expected, tolerance::<T>());
}

#[test]
fn forward_and_gradient_agree_over_more_than_one_task() {
    on_each_device!(device, T => agrees::<_, T>(device, 100, 37, 1));
}

#[test]
fn gates_far_from_zero_stay_finite() {
    // silu(x) is x for large x and 0 for large negative x.
    let mut out = [0f32; 2];
    let mut gate_up = [1e4, -1e4, 2.0, 2.0];
    Cpu.swiglu_forward(2, &gate_up, &mut out).unwrap();
    assert_close("out", &out, &[2e4, 0.0], F32_TOLERANCE);
    Cpu.swiglu_backward(2, &mut gate_up, &mut [1.0, 1.0]).unwrap();
    assert_close("d_gate_up", &gate_up, &[2.0, 0.0, 1e4, 0.0], F32_TOLERANCE);
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn any_shape_agrees(tokens in 1usize..40, width in 1usize..70, seed: u64) {
        on_each_device!(device => agrees::<_, f32>(device, tokens, width, seed));
    }
}
