//! The CPU bodies of RMSNorm.

use rayon::prelude::*;

use super::{RmsNorm, RmsNormBackward, RmsNormForward, check};
use crate::compiled::compiled;
use crate::math::{sum_of_squares, total};
use crate::scratch::{self, with_scratch};
use crate::simd::vectorized;
use crate::{Cpu, Element, Result, check_len};

/// Tokens per task.
const ROWS: usize = 64;
/// Elements processed at a time.
const BLOCK: usize = 16;

/// Returns the bytes of scratch of a backward pass.
pub(crate) fn scratch_bytes(tokens: usize, width: usize) -> usize {
    scratch::bytes(&[partial_len(tokens, width)])
}

/// Returns the number of partial sums of the weight's gradient: one row for each part of the tokens.
fn partial_len(tokens: usize, width: usize) -> usize {
    tokens.div_ceil(ROWS) * width
}

impl RmsNorm for Cpu {
    fn rms_norm_forward<T: Element>(&self, args: RmsNormForward<'_, Self, T>) -> Result<()> {
        compiled!(forward::<T>(args: RmsNormForward<'_, Cpu, T>))
    }

    fn rms_norm_backward<T: Element, G: Element>(
        &self,
        args: RmsNormBackward<'_, Self, T, G>,
    ) -> Result<()> {
        compiled!(backward::<T, G>(args: RmsNormBackward<'_, Cpu, T, G>))
    }
}

fn forward<T: Element>(args: RmsNormForward<'_, Cpu, T>) -> Result<()> {
    let RmsNormForward { eps, x, weight, y, inv_rms } = args;
    let width = check("rms_norm_forward", x.len(), weight.len(), inv_rms.len())?;
    check_len("rms_norm_forward", "y", y.len(), x.len())?;
    (x.par_chunks(ROWS * width), y.par_chunks_mut(ROWS * width), inv_rms.par_chunks_mut(ROWS))
        .into_par_iter()
        .for_each(|(x, y, inv_rms)| vectorized!(forward_rows(eps, x, weight, y, inv_rms)));
    Ok(())
}

fn backward<T: Element, G: Element>(args: RmsNormBackward<'_, Cpu, T, G>) -> Result<()> {
    let RmsNormBackward { x, weight, inv_rms, d_y, d_x, d_weight } = args;
    let width = check("rms_norm_backward", x.len(), weight.len(), inv_rms.len())?;
    check_len("rms_norm_backward", "d_y", d_y.len(), x.len())?;
    check_len("rms_norm_backward", "d_x", d_x.len(), x.len())?;
    check_len("rms_norm_backward", "d_weight", d_weight.len(), width)?;
    with_scratch([partial_len(inv_rms.len(), width)], |[partial]| {
        (
            x.par_chunks(ROWS * width),
            d_y.par_chunks(ROWS * width),
            d_x.par_chunks_mut(ROWS * width),
            inv_rms.par_chunks(ROWS),
            partial.par_chunks_mut(width),
        )
            .into_par_iter()
            .for_each(|(x, d_y, d_x, inv_rms, d_weight)| {
                d_weight.fill(0.0);
                let rows = x
                    .chunks_exact(width)
                    .zip(d_y.chunks_exact(width))
                    .zip(d_x.chunks_exact_mut(width))
                    .zip(inv_rms);
                vectorized!({
                    for (((x, d_y), d_x), &inv_rms) in rows {
                        row_backward(x, weight, inv_rms, d_y, d_x, d_weight);
                    }
                });
            });
        add_partial_sums(partial, d_weight);
    });
    Ok(())
}

#[inline(always)]
fn forward_rows<T: Element>(eps: f64, x: &[T], weight: &[T], y: &mut [T], inv_rms: &mut [f32]) {
    let width = weight.len();
    let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(inv_rms);
    for ((x, y), inv_rms) in rows {
        *inv_rms = normalize_row(eps, x, weight, y);
    }
}

/// Writes a normed row; returns 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
pub(crate) fn normalize_row<T: Element>(eps: f64, x: &[T], weight: &[T], y: &mut [T]) -> f32 {
    let mean = sum_of_squares::<16, _>(x) / x.len() as f64;
    let inv_rms = (mean + eps).sqrt().recip() as f32;
    for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
        *y = T::from_f32(x.to_f32() * inv_rms * weight.to_f32());
    }
    inv_rms
}

/// Adds rows of partial sums, `[parts, C]`, to a weight's gradient, `[C]`, in their order.
pub(crate) fn add_partial_sums<G: Element>(partial: &[f32], d_weight: &mut [G]) {
    let width = d_weight.len();
    for (column, slot) in d_weight.iter_mut().enumerate() {
        let sum: f32 = partial.iter().skip(column).step_by(width).sum();
        *slot = G::from_f32(slot.to_f32() + sum);
    }
}

#[inline(always)]
fn row_backward<T: Element>(
    x: &[T],
    weight: &[T],
    inv_rms: f32,
    d_y: &[T],
    d_x: &mut [T],
    d_weight: &mut [f32],
) {
    let correction = inner(x, weight, d_y) / x.len() as f32 * inv_rms * inv_rms * inv_rms;
    let ((x, x_rest), (weight, weight_rest)) =
        (x.as_chunks::<BLOCK>(), weight.as_chunks::<BLOCK>());
    let ((d_y, d_y_rest), (d_x, d_x_rest)) =
        (d_y.as_chunks::<BLOCK>(), d_x.as_chunks_mut::<BLOCK>());
    let (d_weight, d_weight_rest) = d_weight.as_chunks_mut::<BLOCK>();
    let one = |x: T, weight: T, d_y: T, d_x: T, d_weight: f32| {
        let (x, d_y) = (x.to_f32(), d_y.to_f32());
        let gradient = inv_rms * weight.to_f32() * d_y - correction * x;
        (T::from_f32(d_x.to_f32() + gradient), d_weight + d_y * x * inv_rms)
    };
    for ((((x, weight), d_y), d_x), d_weight) in
        x.iter().zip(weight).zip(d_y).zip(d_x).zip(d_weight)
    {
        // All elements are read before the first element is written: the compiler cannot prove that the
        // slices are disjoint.
        let (mut stream, mut sums) = (*d_x, *d_weight);
        for i in 0..BLOCK {
            (stream[i], sums[i]) = one(x[i], weight[i], d_y[i], stream[i], sums[i]);
        }
        (*d_x, *d_weight) = (stream, sums);
    }
    for (i, (d_x, d_weight)) in d_x_rest.iter_mut().zip(d_weight_rest).enumerate() {
        (*d_x, *d_weight) = one(x_rest[i], weight_rest[i], d_y_rest[i], *d_x, *d_weight);
    }
}

/// Returns the sum of x w dy over a row.
#[inline(always)]
pub(crate) fn inner<T: Element>(x: &[T], weight: &[T], d_y: &[T]) -> f32 {
    let ((x, x_rest), (weight, weight_rest)) =
        (x.as_chunks::<BLOCK>(), weight.as_chunks::<BLOCK>());
    let (d_y, d_y_rest) = d_y.as_chunks::<BLOCK>();
    let mut partial = [0f32; BLOCK];
    for ((x, weight), d_y) in x.iter().zip(weight).zip(d_y) {
        for i in 0..BLOCK {
            partial[i] += x[i].to_f32() * weight[i].to_f32() * d_y[i].to_f32();
        }
    }
    for (i, x) in x_rest.iter().enumerate() {
        partial[i] += x.to_f32() * weight_rest[i].to_f32() * d_y_rest[i].to_f32();
    }
    total(partial)
}
