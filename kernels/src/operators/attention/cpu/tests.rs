//! Attention has the same results with every set of vector instructions that the machine has.

use pulp::Arch;

use super::{backward, forward};
use half::bf16;

use crate::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues,
};
use crate::simd::tests::kinds;
use crate::{Cpu, Element, QkvShape};

/// Implementations differ in fused operations, and in the order of a tile's sums.
const TOLERANCE: f64 = 2e-6;
/// With bf16, implementations also differ in whether probabilities and the gradients of scores are
/// rounded before matmuls.
const BF16_TOLERANCE: f64 = 2e-3;

/// Returns elements between -1 and 1.
fn elements<T: Element>(len: usize) -> Vec<T> {
    (0..len as u32)
        .map(|i| T::from_f32((i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0))
        .collect()
}

fn args(shape: AttentionShape, causal: bool, documents: &[u32]) -> AttentionArgs<'_, Cpu> {
    AttentionArgs { causal, document_start: Some(documents), ..AttentionArgs::causal(shape) }
}

/// Returns the shape of one sequence.
fn shape(length: usize, heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape::of_qkv(&QkvShape { batch: 1, length, heads, kv_heads, head_dim }, length)
}

/// Returns the output, log-sum-exp, gradients and delta, one after the other.
fn attention<T: Element>(
    arch: Arch,
    shape: AttentionShape,
    causal: bool,
    documents: &[u32],
) -> Vec<f32> {
    let AttentionShape { heads, kv_heads, head_dim, query_stride, .. } = shape;
    let qkv: Vec<T> = elements(shape.tokens() * query_stride);
    let (keys, values) = (&qkv[heads * head_dim..], &qkv[(heads + kv_heads) * head_dim..]);
    let key_values = KeyValues::Contiguous { keys, values, row_stride: query_stride };
    let mut out = vec![T::from_f32(7.0); shape.tokens() * heads * head_dim];
    let mut log_sum_exp = vec![7.0; shape.tokens() * heads];
    let pass = AttentionForward::<Cpu, T> {
        args: args(shape, causal, documents),
        queries: &qkv,
        key_values,
        out: &mut out,
        log_sum_exp: &mut log_sum_exp,
    };
    forward(arch, pass).unwrap();
    let d_out: Vec<T> = elements(out.len());
    let mut d_qkv = vec![T::from_f32(7.0); qkv.len()];
    let mut delta = vec![7.0; log_sum_exp.len()];
    let pass = AttentionBackward::<Cpu, T> {
        args: args(shape, causal, documents),
        qkv: &qkv,
        out: &out,
        log_sum_exp: &log_sum_exp,
        d_out: &d_out,
        d_qkv: &mut d_qkv,
        delta: Some(&mut delta),
    };
    backward(arch, pass).unwrap();
    let of_type = out.iter().chain(&d_qkv).map(|element| element.to_f32());
    of_type.chain(log_sum_exp).chain(delta).collect()
}

#[test]
fn every_kind_of_instructions_gives_the_same_attention() {
    every_kind_agrees::<f32>(TOLERANCE);
}

#[test]
fn pairs_of_bf16_give_the_same_attention() {
    every_kind_agrees::<bf16>(BF16_TOLERANCE);
}

/// Compares both passes with plain instructions, in whole and partial tiles.
fn every_kind_agrees<T: Element>(tolerance: f64) {
    for (length, heads, kv_heads, head_dim) in
        [(1, 1, 1, 2), (150, 3, 1, 8), (67, 4, 2, 10), (200, 2, 2, 40)]
    {
        let shape = shape(length, heads, kv_heads, head_dim);
        let documents: Vec<u32> = (0..length as u32).map(|token| token - token % 90).collect();
        for causal in [true, false] {
            let expected = attention::<T>(Arch::Scalar, shape, causal, &documents);
            let size: f64 = expected.iter().map(|&x| f64::from(x).powi(2)).sum();
            for arch in kinds() {
                let found = attention::<T>(arch, shape, causal, &documents);
                let pairs = found.iter().zip(&expected);
                let error: f64 = pairs.map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
                let error = (error / size).sqrt();
                assert!(error < tolerance, "{arch:?}, {shape:?}: {error:e}");
            }
        }
    }
}
