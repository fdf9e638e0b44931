//! The CPU bodies of RMSNorm.

use rayon::prelude::*;

use super::check;
use crate::error::{Result, check_len};
use crate::math::{sum_of, sum_of_squares};
use crate::scalar::Element;
use crate::scratch::with_scratch;
use crate::simd::vectorized;

/// Tokens of one task.
const ROWS: usize = 64;

pub(crate) fn forward<T: Element>(
    eps: f64,
    x: &[T],
    weight: &[T],
    y: &mut [T],
    inv_rms: &mut [f32],
) -> Result<()> {
    let width = check("rms_norm_forward", x.len(), weight.len(), inv_rms.len())?;
    check_len("rms_norm_forward", "y", y.len(), x.len())?;
    (x.par_chunks(ROWS * width), y.par_chunks_mut(ROWS * width), inv_rms.par_chunks_mut(ROWS))
        .into_par_iter()
        .for_each(|(x, y, inv_rms)| vectorized!(forward_rows(eps, x, weight, y, inv_rms)));
    Ok(())
}

#[inline(always)]
fn forward_rows<T: Element>(eps: f64, x: &[T], weight: &[T], y: &mut [T], inv_rms: &mut [f32]) {
    let width = weight.len();
    let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(inv_rms);
    for ((x, y), inv_rms) in rows {
        let mean = sum_of_squares::<16, _>(x) / width as f64;
        *inv_rms = (mean + eps).sqrt().recip() as f32;
        for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
            *y = T::from_f32(x.to_f32() * *inv_rms * weight.to_f32());
        }
    }
}

pub(crate) fn backward<T: Element, G: Element>(
    x: &[T],
    weight: &[T],
    inv_rms: &[f32],
    d_y: &[T],
    d_x: &mut [T],
    d_weight: &mut [G],
) -> Result<()> {
    let width = check("rms_norm_backward", x.len(), weight.len(), inv_rms.len())?;
    check_len("rms_norm_backward", "d_y", d_y.len(), x.len())?;
    check_len("rms_norm_backward", "d_x", d_x.len(), x.len())?;
    check_len("rms_norm_backward", "d_weight", d_weight.len(), width)?;
    let parts = inv_rms.len().div_ceil(ROWS);
    with_scratch([parts * width], |[partial]| {
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
        for (column, slot) in d_weight.iter_mut().enumerate() {
            let sum: f32 = partial.iter().skip(column).step_by(width).sum();
            *slot = G::from_f32(slot.to_f32() + sum);
        }
    });
    Ok(())
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
    let width = x.len();
    let (weight, d_y) = (&weight[..width], &d_y[..width]);
    let (d_x, d_weight) = (&mut d_x[..width], &mut d_weight[..width]);
    let inner = sum_of(width, |i| x[i].to_f32() * weight[i].to_f32() * d_y[i].to_f32());
    let correction = inner / width as f32 * inv_rms * inv_rms * inv_rms;
    for i in 0..width {
        let (x, d_y) = (x[i].to_f32(), d_y[i].to_f32());
        let gradient = inv_rms * weight[i].to_f32() * d_y - correction * x;
        d_x[i] = T::from_f32(d_x[i].to_f32() + gradient);
        d_weight[i] += d_y * x * inv_rms;
    }
}
