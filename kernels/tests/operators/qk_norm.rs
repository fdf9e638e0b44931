//! Query and key norms against their reference, forward and both gradients.

use crate::reference::operators::Packed;
use crate::reference::{
    Random, added, assert_close, backward, cases, download, flat, garbage, gradient, qkv_shapes,
    tensor, tolerance, upload, var,
};
use half::bf16;
use moh_kernels::qk_norm::{QkNormBackward, QkNormForward};
use moh_kernels::{Backend, Element, QkvShape};

const EPS: f64 = 1e-6;

fn agrees<B: Backend, T: Element, G: Element>(device: &B, shape: QkvShape, seed: u64) {
    agrees_from::<B, T, G>(device, shape, seed, 0);
}

/// Compares with `first` elements before qkv in its buffer; returns the gradients.
fn agrees_from<B: Backend, T: Element, G: Element>(
    device: &B,
    shape: QkvShape,
    seed: u64,
    first: usize,
) -> (Vec<T>, Vec<G>) {
    let (mut random, dim) = (Random(seed), shape.head_dim);
    let qkv: Vec<T> = random.elements(shape.tokens() * shape.row());
    let d_qkv: Vec<T> = random.elements(qkv.len());
    let (weight, d_weight): (Vec<T>, Vec<G>) = (random.elements(2 * dim), random.elements(2 * dim));

    let shifted: Vec<T> = qkv[..first].iter().chain(&qkv).copied().collect();
    let (qkv_buffer, weight_buffer) = (upload(device, &shifted), upload(device, &weight));
    let mut normed = garbage::<B, T>(device, qkv.len());
    let (mut d_qkv_out, mut d_weight_out) = (upload(device, &d_qkv), upload(device, &d_weight));
    {
        let (shape, eps, weight) = (&shape, EPS, B::whole(&weight_buffer));
        let (qkv, normed) = (B::view(&qkv_buffer, first..shifted.len()), B::whole_mut(&mut normed));
        let args = QkNormForward { shape, eps, qkv, weight, normed };
        device.qk_norm_forward::<T>(args).unwrap();
        let (d_qkv, d_weight) = (B::whole_mut(&mut d_qkv_out), B::whole_mut(&mut d_weight_out));
        let args = QkNormBackward { shape, eps, qkv, weight, d_qkv, d_weight };
        device.qk_norm_backward::<T, G>(args).unwrap();
    }

    let packed = Packed::new(&shape);
    let (qkv, weight) = (var(&qkv, packed.dims()), var(&weight, (2, dim)));
    let expected = packed.norm(&qkv, &weight, EPS).unwrap();
    let gradients = backward(&expected, &tensor(&d_qkv, packed.dims()));
    let normed = download::<B, T>(device, &normed);
    assert_close("normed", &normed, &flat(&expected), tolerance::<T>());
    let d_qkv = download::<B, T>(device, &d_qkv_out);
    assert_close("d_qkv", &d_qkv, &gradient(&gradients, &qkv), tolerance::<T>());
    let expected = added(&d_weight, &gradient(&gradients, &weight));
    let d_weight = download::<B, G>(device, &d_weight_out);
    assert_close("d_weight", &d_weight, &expected, tolerance::<G>());
    (d_qkv, d_weight)
}

#[test]
fn queries_and_keys_have_weights_of_their_own_and_values_stay() {
    let shape = QkvShape { batch: 2, length: 37, heads: 6, kv_heads: 2, head_dim: 16 };
    on_each_device!(device, T => agrees::<_, T, f32>(device, shape, 1));
    on_each_device!(device => agrees::<_, bf16, bf16>(device, shape, 1));
}

#[test]
fn tokens_in_more_parts_than_the_gradient_of_the_weights_is_summed_in_agree() {
    let shape = QkvShape { batch: 1, length: 1030, heads: 1, kv_heads: 1, head_dim: 4 };
    on_each_device!(device => agrees::<_, f32, f32>(device, shape, 2));
}

/// A GPU reads heads of up to 32 aligned parts of 16 bytes once, and other heads in another way.
#[test]
fn heads_of_every_kind_agree() {
    let shape = QkvShape { batch: 1, length: 3, heads: 10, kv_heads: 5, head_dim: 128 };
    for head_dim in [8, 24, 80, 128, 256, 264, 512] {
        let shape = QkvShape { head_dim, ..shape };
        on_each_device!(device, T => agrees::<_, T, f32>(device, shape, 3));
    }
    on_each_device!(device => agrees_from::<_, bf16, f32>(device, shape, 3, 1));
    on_each_device!(device => agrees_from::<_, f32, f32>(device, shape, 3, 3));
    let shape = QkvShape { batch: 1, length: 1030, heads: 1, kv_heads: 1, head_dim: 8 };
    on_each_device!(device => agrees::<_, bf16, f32>(device, shape, 3));
}

#[test]
fn gradients_have_the_same_bits_in_every_run() {
    let shape = QkvShape { batch: 2, length: 600, heads: 3, kv_heads: 1, head_dim: 32 };
    on_each_device!(device => {
        let run = || agrees_from::<_, bf16, f32>(device, shape, 4, 0);
        let first = run();
        for _ in 0..3 {
            assert!(run() == first);
        }
    });
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn any_even_head_dim_agrees(
        shape in qkv_shapes(1usize..3, 1usize..40, 1usize..4, 1usize..129),
        seed: u64,
    ) {
        on_each_device!(device, T => agrees::<_, T, T>(device, shape, seed));
    }
}
