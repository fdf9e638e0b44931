//! Linear layers: y = x W^T with W `[outputs, inputs]`, as checkpoints store it.
//!
//! Backward: d_x = d_y W, and d_W = d_y^T x, or d_W += d_y^T x, straight into the gradient buffer.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::error::{Result, check_len, ensure};

/// Checks the lengths of a layer's `[tokens, inputs]`, weight and `[tokens, outputs]`; returns
/// (tokens, outputs).
fn check(
    operator: &'static str,
    inputs: usize,
    x: usize,
    weight: usize,
    y: usize,
) -> Result<(usize, usize)> {
    ensure(operator, inputs > 0 && weight > 0 && weight.is_multiple_of(inputs), || {
        format!("a weight of {weight} numbers does not divide into rows of {inputs} inputs")
    })?;
    ensure(operator, x.is_multiple_of(inputs), || {
        format!("{x} numbers do not divide into tokens of {inputs} inputs")
    })?;
    let (tokens, outputs) = (x / inputs, weight / inputs);
    check_len(operator, "the outputs' side", y, tokens * outputs)?;
    Ok((tokens, outputs))
}
