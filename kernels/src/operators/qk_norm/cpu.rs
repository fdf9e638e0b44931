//! The CPU bodies of query and key norms.

use rayon::prelude::*;

use super::{QkNorm, QkNormBackward, QkNormForward, check};
use crate::compiled::compiled;
use crate::math::sum_of_squares;
use crate::rms_norm::cpu::{add_partial_sums, inner, normalize_row};
use crate::scratch::{self, with_scratch};
use crate::simd::vectorized;
use crate::{Cpu, Element, QkvShape, Result, check_len};

/// Tokens of one task.
const ROWS: usize = 32;

impl QkNorm for Cpu {
    fn qk_norm_forward<T: Element>(&self, args: QkNormForward<'_, Self, T>) -> Result<()> {
        compiled!(forward::<T>(args: QkNormForward<'_, Cpu, T>))
    }

    fn qk_norm_backward<T: Element, G: Element>(
        &self,
        args: QkNormBackward<'_, Self, T, G>,
    ) -> Result<()> {
        compiled!(backward::<T, G>(args: QkNormBackward<'_, Cpu, T, G>))
    }
}

fn forward<T: Element>(args: QkNormForward<'_, Cpu, T>) -> Result<()> {
    const OPERATOR: &str = "qk_norm_forward";
    let QkNormForward { shape, eps, qkv, weight, normed } = args;
    check(OPERATOR, shape, [qkv.len(), weight.len()], ("normed", normed.len()))?;
    let (row, dim) = (shape.row(), shape.head_dim);
    let parts = qkv.par_chunks(ROWS * row).zip(normed.par_chunks_mut(ROWS * row));
    parts.for_each(|(qkv, normed)| {
        vectorized!({
            for (row, normed) in qkv.chunks_exact(row).zip(normed.chunks_exact_mut(row)) {
                let heads = row.chunks_exact(dim).zip(normed.chunks_exact_mut(dim));
                for (head, (x, y)) in heads.enumerate() {
                    match weight_of(shape, head) {
                        Some(of) => {
                            normalize_row(eps, x, &weight[of * dim..][..dim], y);
                        }
                        None => y.copy_from_slice(x),
                    }
                }
            }
        });
    });
    Ok(())
}

fn backward<T: Element, G: Element>(args: QkNormBackward<'_, Cpu, T, G>) -> Result<()> {
    const OPERATOR: &str = "qk_norm_backward";
    let QkNormBackward { shape, eps, qkv, weight, d_qkv, d_weight } = args;
    check(OPERATOR, shape, [qkv.len(), weight.len()], ("d_qkv", d_qkv.len()))?;
    check_len(OPERATOR, "d_weight", d_weight.len(), weight.len())?;
    let (row, dim) = (shape.row(), shape.head_dim);
    let normed = (shape.heads + shape.kv_heads) * dim;
    let parts = shape.tokens().div_ceil(ROWS);
    with_scratch([parts * 2 * dim], |[partial]| {
        let parts = (
            qkv.par_chunks(ROWS * row),
            d_qkv.par_chunks_mut(ROWS * row),
            partial.par_chunks_mut(2 * dim),
        );
        parts.into_par_iter().for_each(|(qkv, d_qkv, d_weight)| {
            d_weight.fill(0.0);
            vectorized!({
                for (row, d_row) in qkv.chunks_exact(row).zip(d_qkv.chunks_exact_mut(row)) {
                    let heads = row[..normed].chunks_exact(dim);
                    let d_heads = d_row[..normed].chunks_exact_mut(dim);
                    for (head, (x, d)) in heads.zip(d_heads).enumerate() {
                        let of = usize::from(head >= shape.heads) * dim;
                        let weight = &weight[of..of + dim];
                        head_backward(eps, x, weight, d, &mut d_weight[of..of + dim]);
                    }
                }
            });
        });
        add_partial_sums(partial, d_weight);
    });
    Ok(())
}

/// Returns the maximum scratch of a thread in the backward pass over `tokens` tokens with heads of `head_dim`.
pub(crate) fn scratch_bytes(tokens: usize, head_dim: usize) -> usize {
    scratch::bytes(&[tokens.div_ceil(ROWS) * 2 * head_dim])
}

/// Returns the index of a head's weight: 0 for queries, 1 for keys; `None` for values.
#[inline(always)]
fn weight_of(shape: &QkvShape, head: usize) -> Option<usize> {
    match head {
        head if head < shape.heads => Some(0),
        head if head < shape.heads + shape.kv_heads => Some(1),
        _ => None,
    }
}

/// Replaces the gradient `d` of a normed head by the gradient of the head `x`, and adds the
/// gradient of the weight.
#[inline(always)]
fn head_backward<T: Element>(eps: f64, x: &[T], weight: &[T], d: &mut [T], d_weight: &mut [f32]) {
    let count = x.len();
    let mean = sum_of_squares::<16, _>(x) / count as f64;
    let inv_rms = (mean + eps).sqrt().recip() as f32;
    let correction = inner(x, weight, d) / count as f32 * inv_rms * inv_rms * inv_rms;
    for (((d, d_weight), &x), &weight) in d.iter_mut().zip(d_weight).zip(x).zip(weight) {
        let (x, d_y) = (x.to_f32(), d.to_f32());
        *d_weight += d_y * x * inv_rms;
        *d = T::from_f32(inv_rms * weight.to_f32() * d_y - correction * x);
    }
}
