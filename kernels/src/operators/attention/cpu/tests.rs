//! Attention has the same results with every set of vector instructions that the machine has, and with
//! every kind of factors.

use pulp::Arch;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::{TilePair, backward::backward_by, forward::forward_by};
use super::{backward, forward};
use half::bf16;

use crate::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues,
};
use crate::cpu::Cpu;
use crate::error::Result;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::matmul::tiles_run;
use crate::scalar::Element;
use crate::simd::tests::kinds;

/// Implementations differ in fused operations, and in the order of a tile's sums.
const TOLERANCE: f64 = 2e-6;
/// With bf16, implementations also differ in whether probabilities and the gradients of scores are
/// rounded before matmuls.
const BF16_TOLERANCE: f64 = 2e-3;

/// Elements between -1 and 1.
fn elements<T: Element>(len: usize) -> Vec<T> {
    (0..len as u32)
        .map(|i| T::from_f32((i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0))
        .collect()
}

fn args(shape: AttentionShape, causal: bool, documents: &[u32]) -> AttentionArgs<'_, Cpu> {
    AttentionArgs { causal, document_start: Some(documents), ..AttentionArgs::causal(shape) }
}

/// One sequence.
fn shape(length: usize, heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        batch: 1,
        query_length: length,
        key_length: length,
        heads,
        kv_heads,
        head_dim,
        query_stride: (heads + 2 * kv_heads) * head_dim,
    }
}

/// An implementation of both passes.
struct Passes<T: Element> {
    forward: fn(Arch, AttentionForward<'_, Cpu, T>) -> Result<()>,
    backward: fn(Arch, AttentionBackward<'_, Cpu, T>) -> Result<()>,
}

/// Output, log-sum-exp, gradients and delta, one after the other.
fn attention<T: Element>(
    passes: &Passes<T>,
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
    (passes.forward)(arch, pass).unwrap();
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
    (passes.backward)(arch, pass).unwrap();
    let of_type = out.iter().chain(&d_qkv).map(|element| element.to_f32());
    of_type.chain(log_sum_exp).chain(delta).collect()
}

#[test]
fn every_kind_of_instructions_gives_the_same_attention() {
    agree::<f32>(&Passes { forward, backward }, &kinds(), TOLERANCE);
}

#[test]
fn pairs_of_bf16_give_the_same_attention() {
    agree::<bf16>(&Passes { forward, backward }, &kinds(), BF16_TOLERANCE);
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
const TILES: Passes<bf16> =
    Passes { forward: forward_by::<bf16, TilePair>, backward: backward_by::<bf16, TilePair> };

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn tiles_of_bf16_give_the_same_attention() {
    if tiles_run() {
        agree(&TILES, &[Arch::new()], BF16_TOLERANCE);
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn tiles_have_the_same_bits_with_any_number_of_threads() {
    if !tiles_run() {
        return;
    }
    let shape = shape(200, 4, 2, 40);
    let documents: Vec<u32> = (0..200).map(|token| token - token % 90).collect();
    let [one, two, five] = [1, 2, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let found = pool.install(|| attention(&TILES, Arch::new(), shape, true, &documents));
        found.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    });
    assert!(one == two, "one and two threads differ");
    assert!(one == five, "one and five threads differ");
}

/// Both passes with these instructions have the results of plain ones, in whole and partial tiles.
fn agree<T: Element>(passes: &Passes<T>, kinds: &[Arch], tolerance: f64) {
    let plain = Passes { forward, backward };
    for (length, heads, kv_heads, head_dim) in
        [(1, 1, 1, 2), (150, 3, 1, 8), (67, 4, 2, 10), (200, 2, 2, 40)]
    {
        let shape = shape(length, heads, kv_heads, head_dim);
        let documents: Vec<u32> = (0..length as u32).map(|token| token - token % 90).collect();
        for causal in [true, false] {
            let expected = attention::<T>(&plain, Arch::Scalar, shape, causal, &documents);
            let size: f64 = expected.iter().map(|&x| f64::from(x).powi(2)).sum();
            for &arch in kinds {
                let found = attention::<T>(passes, arch, shape, causal, &documents);
                let pairs = found.iter().zip(&expected);
                let error: f64 = pairs.map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
                let error = (error / size).sqrt();
                assert!(error < tolerance, "{arch:?}, {shape:?}: {error:e}");
            }
        }
    }
}
