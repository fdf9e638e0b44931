//! The CPU bodies of RMSNorm.

use rayon::prelude::*;

use crate::error::{Result, check_len, ensure};
use crate::scalar::Element;

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
        .for_each(|(x, y, inv_rms)| {
            let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(inv_rms);
            for ((x, y), inv_rms) in rows {
                let squares: f64 = x.iter().map(|&value| (value.to_f32() as f64).powi(2)).sum();
                *inv_rms = (squares / width as f64 + eps).sqrt().recip() as f32;
                for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
                    *y = T::from_f32(x.to_f32() * *inv_rms * weight.to_f32());
                }
            }
        });
    Ok(())
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
    let partial: Vec<Vec<f32>> = (
        x.par_chunks(ROWS * width),
        d_y.par_chunks(ROWS * width),
        d_x.par_chunks_mut(ROWS * width),
        inv_rms.par_chunks(ROWS),
    )
        .into_par_iter()
        .map(|(x, d_y, d_x, inv_rms)| {
            let mut d_weight = vec![0f32; width];
            let rows = x
                .chunks_exact(width)
                .zip(d_y.chunks_exact(width))
                .zip(d_x.chunks_exact_mut(width))
                .zip(inv_rms);
            for (((x, d_y), d_x), &inv_rms) in rows {
                row_backward(x, weight, inv_rms, d_y, d_x, &mut d_weight);
            }
            d_weight
        })
        .collect();
    for (column, slot) in d_weight.iter_mut().enumerate() {
        let sum: f32 = partial.iter().map(|part| part[column]).sum();
        *slot = G::from_f32(slot.to_f32() + sum);
    }
    Ok(())
}

fn row_backward<T: Element>(
    x: &[T],
    weight: &[T],
    inv_rms: f32,
    d_y: &[T],
    d_x: &mut [T],
    d_weight: &mut [f32],
) {
    let mut inner = 0f64;
    for ((&x, &weight), &d_y) in x.iter().zip(weight).zip(d_y) {
        inner += (x.to_f32() * weight.to_f32() * d_y.to_f32()) as f64;
    }
    let correction = (inner / x.len() as f64) as f32 * inv_rms * inv_rms * inv_rms;
    for ((((&x, &weight), &d_y), d_x), d_weight) in
        x.iter().zip(weight).zip(d_y).zip(d_x).zip(d_weight)
    {
        let (x, d_y) = (x.to_f32(), d_y.to_f32());
        let gradient = inv_rms * weight.to_f32() * d_y - correction * x;
        *d_x = T::from_f32(d_x.to_f32() + gradient);
        *d_weight += d_y * x * inv_rms;
    }
}

/// Checks the lengths that both passes share; returns the width.
fn check(operator: &'static str, x: usize, width: usize, inv_rms: usize) -> Result<usize> {
    ensure(operator, width > 0, || "weight is empty".into())?;
    check_len(operator, "x", x, inv_rms * width)?;
    Ok(width)
}
