//! The CPU bodies of SwiGLU.

use rayon::prelude::*;

use super::{Swiglu, check};
use crate::compiled::compiled;
use crate::math::sigmoid;
use crate::simd::vectorized;
use crate::{Cpu, Element, Result};

/// Tokens per task.
const ROWS: usize = 16;
/// Elements processed at a time.
const BLOCK: usize = 16;

impl Swiglu for Cpu {
    fn swiglu_forward<T: Element>(&self, width: usize, gate_up: &[T], out: &mut [T]) -> Result<()> {
        compiled!(forward::<T>(width: usize, gate_up: &[T], out: &mut [T]))
    }

    fn swiglu_backward<T: Element>(
        &self,
        width: usize,
        gate_up: &mut [T],
        out: &mut [T],
    ) -> Result<()> {
        compiled!(backward::<T>(width: usize, gate_up: &mut [T], out: &mut [T]))
    }
}

fn forward<T: Element>(width: usize, gate_up: &[T], out: &mut [T]) -> Result<()> {
    check("swiglu_forward", width, gate_up.len(), out.len())?;
    (gate_up.par_chunks(ROWS * 2 * width), out.par_chunks_mut(ROWS * width))
        .into_par_iter()
        .for_each(|(gate_up, out)| vectorized!(forward_rows(width, gate_up, out)));
    Ok(())
}

fn backward<T: Element>(width: usize, gate_up: &mut [T], out: &mut [T]) -> Result<()> {
    check("swiglu_backward", width, gate_up.len(), out.len())?;
    (gate_up.par_chunks_mut(ROWS * 2 * width), out.par_chunks_mut(ROWS * width))
        .into_par_iter()
        .for_each(|(gate_up, out)| vectorized!(backward_rows(width, gate_up, out)));
    Ok(())
}

#[inline(always)]
fn forward_rows<T: Element>(width: usize, gate_up: &[T], out: &mut [T]) {
    for (gate_up, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
        let (gate, up) = gate_up.split_at(width);
        let ((gate, gate_rest), (up, up_rest)) = (gate.as_chunks(), up.as_chunks());
        let (out, out_rest) = out.as_chunks_mut();
        for ((gate, up), out) in gate.iter().zip(up).zip(out) {
            *out = forward_block(gate, up);
        }
        let values = forward_block(&padded(gate_rest), &padded(up_rest));
        out_rest.copy_from_slice(&values[..out_rest.len()]);
    }
}

#[inline(always)]
fn forward_block<T: Element>(gate: &[T; BLOCK], up: &[T; BLOCK]) -> [T; BLOCK] {
    let mut out = [T::zeroed(); BLOCK];
    for i in 0..BLOCK {
        let gate = gate[i].to_f32();
        out[i] = T::from_f32(gate * sigmoid(gate) * up[i].to_f32());
    }
    out
}

/// Returns the elements after a row's last whole block, padded with zeros: a loop over single elements
/// would be slower than a block.
#[inline(always)]
fn padded<T: Element>(rest: &[T]) -> [T; BLOCK] {
    let mut block = [T::zeroed(); BLOCK];
    block[..rest.len()].copy_from_slice(rest);
    block
}

#[inline(always)]
fn backward_rows<T: Element>(width: usize, gate_up: &mut [T], out: &mut [T]) {
    for (gate_up, out) in gate_up.chunks_exact_mut(2 * width).zip(out.chunks_exact_mut(width)) {
        let (gate, up) = gate_up.split_at_mut(width);
        let (gate, gate_rest) = gate.as_chunks_mut();
        let (up, up_rest) = up.as_chunks_mut();
        let (out, out_rest) = out.as_chunks_mut();
        for ((gate, up), out) in gate.iter_mut().zip(up).zip(out) {
            backward_block(gate, up, out);
        }
        let rest = (&mut padded(gate_rest), &mut padded(up_rest), &mut padded(out_rest));
        backward_block(rest.0, rest.1, rest.2);
        gate_rest.copy_from_slice(&rest.0[..gate_rest.len()]);
        up_rest.copy_from_slice(&rest.1[..up_rest.len()]);
        out_rest.copy_from_slice(&rest.2[..out_rest.len()]);
    }
}

/// Computes the gradients of a block. All elements are read before the first element is written: the compiler cannot
/// prove that the three slices are disjoint.
#[inline(always)]
fn backward_block<T: Element>(gate: &mut [T; BLOCK], up: &mut [T; BLOCK], out: &mut [T; BLOCK]) {
    let (mut gates, mut ups, mut outs) = (*gate, *up, *out);
    for i in 0..BLOCK {
        (gates[i], ups[i], outs[i]) = backward_one(gates[i], ups[i], outs[i]);
    }
    (*gate, *up, *out) = (gates, ups, outs);
}

/// Computes (d_gate, d_up, out) from (gate, up, d_out).
#[inline(always)]
fn backward_one<T: Element>(gate: T, up: T, d_out: T) -> (T, T, T) {
    let (gate, up, d_out) = (gate.to_f32(), up.to_f32(), d_out.to_f32());
    let s = sigmoid(gate);
    let d_gate = d_out * up * s * (1.0 + gate * (1.0 - s));
    (T::from_f32(d_gate), T::from_f32(d_out * gate * s), T::from_f32(gate * s * up))
}
