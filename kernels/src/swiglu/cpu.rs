//! The CPU bodies of SwiGLU.

use rayon::prelude::*;

use crate::error::{Result, check_len, ensure};
use crate::math::sigmoid;
use crate::scalar::Element;
use crate::simd::vectorized;

/// Tokens of one task.
const ROWS: usize = 16;

pub(crate) fn forward<T: Element>(width: usize, gate_up: &[T], out: &mut [T]) -> Result<()> {
    check("swiglu_forward", width, gate_up.len(), out.len())?;
    (gate_up.par_chunks(ROWS * 2 * width), out.par_chunks_mut(ROWS * width))
        .into_par_iter()
        .for_each(|(gate_up, out)| vectorized!(forward_rows(width, gate_up, out)));
    Ok(())
}

#[inline(always)]
fn forward_rows<T: Element>(width: usize, gate_up: &[T], out: &mut [T]) {
    for (gate_up, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
        let (gate, up) = gate_up.split_at(width);
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            let gate = gate.to_f32();
            *out = T::from_f32(gate * sigmoid(gate) * up.to_f32());
        }
    }
}

pub(crate) fn backward<T: Element>(
    width: usize,
    gate_up: &[T],
    d_out: &[T],
    d_gate_up: &mut [T],
) -> Result<()> {
    check("swiglu_backward", width, gate_up.len(), d_out.len())?;
    check_len("swiglu_backward", "d_gate_up", d_gate_up.len(), gate_up.len())?;
    (
        gate_up.par_chunks(ROWS * 2 * width),
        d_out.par_chunks(ROWS * width),
        d_gate_up.par_chunks_mut(ROWS * 2 * width),
    )
        .into_par_iter()
        .for_each(|(gate_up, d_out, d_gate_up)| {
            vectorized!(backward_rows(width, gate_up, d_out, d_gate_up));
        });
    Ok(())
}

#[inline(always)]
fn backward_rows<T: Element>(width: usize, gate_up: &[T], d_out: &[T], d_gate_up: &mut [T]) {
    let rows = gate_up
        .chunks_exact(2 * width)
        .zip(d_out.chunks_exact(width))
        .zip(d_gate_up.chunks_exact_mut(2 * width));
    for ((gate_up, d_out), d_gate_up) in rows {
        let (gate, up) = gate_up.split_at(width);
        let (d_gate, d_up) = d_gate_up.split_at_mut(width);
        // Indices below lengths that are plainly equal: five zipped iterators are not vectorised.
        let (up, d_out) = (&up[..width], &d_out[..width]);
        let (d_gate, d_up) = (&mut d_gate[..width], &mut d_up[..width]);
        for i in 0..width {
            let (gate, up, d_out) = (gate[i].to_f32(), up[i].to_f32(), d_out[i].to_f32());
            let s = sigmoid(gate);
            d_up[i] = T::from_f32(d_out * gate * s);
            d_gate[i] = T::from_f32(d_out * up * s * (1.0 + gate * (1.0 - s)));
        }
    }
}

fn check(operator: &'static str, width: usize, gate_up: usize, out: usize) -> Result<()> {
    ensure(operator, width > 0 && out.is_multiple_of(width), || {
        format!("{out} numbers do not divide into tokens of {width}")
    })?;
    check_len(operator, "gate_up", gate_up, 2 * out)
}
