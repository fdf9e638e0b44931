//! RMSNorm against its reference, forward and both gradients.

use crate::reference::{
    Random, added, assert_close, assert_sums_close, backward, cases, download, flat, garbage,
    gradient, operators, tensor, tolerance, upload, var,
};
use half::bf16;
use moh_kernels::rms_norm::{RmsNorm, RmsNormBackward, RmsNormForward};
use moh_kernels::{Backend, Cpu, Element};

const EPS: f64 = 1e-5;

fn agrees<B: Backend, T: Element, G: Element>(device: &B, tokens: usize, width: usize, seed: u64) {
    agrees_from::<B, T, G>(device, tokens, width, seed, 0);
}

/// Compares with `first` elements before x in its buffer; returns the gradients.
fn agrees_from<B: Backend, T: Element, G: Element>(
    device: &B,
    tokens: usize,
    width: usize,
    seed: u64,
    first: usize,
) -> (Vec<T>, Vec<G>) {
    let mut random = Random(seed);
    let (x, weight): (Vec<T>, Vec<T>) = (random.elements(tokens * width), random.elements(width));
    let (d_y, d_x): (Vec<T>, Vec<T>) = (random.elements(x.len()), random.elements(x.len()));
    let d_weight: Vec<G> = random.elements(width);

    let shifted: Vec<T> = x[..first].iter().chain(&x).copied().collect();
    let (x_buffer, weight_buffer) = (upload(device, &shifted), upload(device, &weight));
    let mut y = garbage::<B, T>(device, x.len());
    let mut inv_rms = garbage::<B, f32>(device, tokens);
    let d_y_buffer = upload(device, &d_y);
    let (mut d_x_out, mut d_weight_out) = (upload(device, &d_x), upload(device, &d_weight));
    {
        let (x, weight) = (B::view(&x_buffer, first..shifted.len()), B::whole(&weight_buffer));
        let (y, inv_rms_out) = (B::whole_mut(&mut y), B::whole_mut(&mut inv_rms));
        let args = RmsNormForward { eps: EPS, x, weight, y, inv_rms: inv_rms_out };
        device.rms_norm_forward::<T>(args).unwrap();
        let (x, weight) = (B::view(&x_buffer, first..shifted.len()), B::whole(&weight_buffer));
        let (inv_rms, d_y) = (B::whole(&inv_rms), B::whole(&d_y_buffer));
        let (d_x, d_weight) = (B::whole_mut(&mut d_x_out), B::whole_mut(&mut d_weight_out));
        let args = RmsNormBackward { x, weight, inv_rms, d_y, d_x, d_weight };
        device.rms_norm_backward::<T, G>(args).unwrap();
    }

    let (x, weight) = (var(&x, (tokens, width)), var(&weight, width));
    let expected = operators::rms_norm(&x, &weight, EPS).unwrap();
    let gradients = backward(&expected, &tensor(&d_y, (tokens, width)));
    assert_close("y", &download::<B, T>(device, &y), &flat(&expected), tolerance::<T>());
    let expected = added(&d_x, &gradient(&gradients, &x));
    let d_x = download::<B, T>(device, &d_x_out);
    // The previous contents and the gradient are of order 1, and so are the terms of d_weight.
    assert_sums_close("d_x", &d_x, &expected, 1.0, tolerance::<T>());
    let expected = added(&d_weight, &gradient(&gradients, &weight));
    let d_weight = download::<B, G>(device, &d_weight_out);
    let terms = (tokens as f64 + 1.0).sqrt();
    assert_sums_close("d_weight", &d_weight, &expected, terms, tolerance::<G>());
    (d_x, d_weight)
}

#[test]
fn forward_and_gradients_agree_over_more_than_one_task() {
    on_each_device!(device, T => agrees::<_, T, f32>(device, 150, 96, 1));
    on_each_device!(device => agrees::<_, bf16, bf16>(device, 150, 96, 1));
    // A block of a GPU reads 2048 bf16 elements per iteration.
    on_each_device!(device => agrees::<_, bf16, f32>(device, 3, 2304, 1));
}

/// A GPU's backward pass reads rows of 16-byte parts once, up to as many parts as a block has threads. All other rows
/// are read in another way.
#[test]
fn rows_of_every_kind_agree() {
    for (tokens, width) in [(1, 8), (2, 264), (5, 4096), (3, 4104), (2, 8192), (2, 8200), (7, 4099)]
    {
        on_each_device!(device, T => agrees::<_, T, f32>(device, tokens, width, 2));
    }
    on_each_device!(device => agrees_from::<_, bf16, f32>(device, 9, 264, 2, 1));
    on_each_device!(device => agrees_from::<_, f32, f32>(device, 9, 264, 2, 3));
}

#[test]
fn tokens_in_more_groups_than_a_gpu_sums_agree() {
    // 515 tokens make two tokens per group of 512, and groups without tokens.
    on_each_device!(device => agrees::<_, f32, f32>(device, 515, 12, 3));
    on_each_device!(device => agrees::<_, bf16, bf16>(device, 1030, 16, 3));
    on_each_device!(device => agrees::<_, bf16, f32>(device, 1030, 15, 3));
}

#[test]
fn gradients_have_the_same_bits_in_every_run() {
    on_each_device!(device => {
        let run = || agrees_from::<_, bf16, f32>(device, 1100, 520, 4, 0);
        let first = run();
        for _ in 0..3 {
            assert!(run() == first);
        }
    });
}

#[test]
fn a_token_of_zeros_stays_zero() {
    let (mut y, mut inv_rms) = ([1f32; 4], [0f32; 1]);
    let (x, weight) = (&[0.0; 4], &[1.0; 4]);
    let forward =
        RmsNormForward::<Cpu, f32> { eps: EPS, x, weight, y: &mut y, inv_rms: &mut inv_rms };
    Cpu.rms_norm_forward(forward).unwrap();
    assert_eq!(y, [0.0; 4]);
    assert!((f64::from(inv_rms[0]) - EPS.sqrt().recip()).abs() < 1e-4);
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn any_shape_agrees(tokens in 1usize..130, width in 1usize..70, seed: u64) {
        on_each_device!(device, T => agrees::<_, T, T>(device, tokens, width, seed));
    }
}
