//! The CPU bodies of the linear layer: matrix products of a fixed number of rows a task.

use std::borrow::Cow;

use rayon::prelude::*;

use crate::error::{Result, check_len, ensure};
use crate::matmul::{Destination, Matrix, matmul};
use crate::scalar::{Element, Scalar};

/// Tokens of one task of the forward and input passes.
const TOKEN_ROWS: usize = 256;
/// Rows of the weight of one task of the weight pass.
const WEIGHT_ROWS: usize = 64;

/// The numbers as f32: borrowed when they are, converted otherwise.
pub(crate) fn as_f32<T: Element>(x: &[T]) -> Cow<'_, [f32]> {
    match bytemuck::try_cast_slice::<T, f32>(x) {
        Ok(x) if T::DTYPE == f32::DTYPE => Cow::Borrowed(x),
        _ => Cow::Owned(x.iter().map(|&value| value.to_f32()).collect()),
    }
}

/// Runs `body` on the numbers as f32, in place when they are, with `body`'s result converted back
/// otherwise.
fn with_f32<T: Element>(x: &mut [T], body: impl FnOnce(&mut [f32])) {
    if T::DTYPE == f32::DTYPE
        && let Ok(x) = bytemuck::try_cast_slice_mut::<T, f32>(x)
    {
        return body(x);
    }
    let mut values: Vec<f32> = x.iter().map(|&value| value.to_f32()).collect();
    body(&mut values);
    for (slot, value) in x.iter_mut().zip(values) {
        *slot = T::from_f32(value);
    }
}

pub(crate) fn forward<T: Element>(
    inputs: usize,
    x: &[T],
    weight: &[T],
    residual: Option<&[T]>,
    y: &mut [T],
) -> Result<()> {
    let (tokens, outputs) = check("linear_forward", inputs, x.len(), weight.len(), y.len())?;
    if let Some(residual) = residual {
        check_len("linear_forward", "residual", residual.len(), tokens * outputs)?;
        y.copy_from_slice(residual);
    }
    let destination =
        if residual.is_some() { Destination::Accumulate } else { Destination::Overwrite };
    let weight = as_f32(weight);
    let weight = Matrix::new(&weight, outputs, inputs).transposed();
    (y.par_chunks_mut(TOKEN_ROWS * outputs), x.par_chunks(TOKEN_ROWS * inputs))
        .into_par_iter()
        .for_each(|(y, x)| {
            let x = as_f32(x);
            let x = Matrix::new(&x, x.len() / inputs, inputs);
            with_f32(y, |y| matmul(y, destination, 1.0, x, weight));
        });
    Ok(())
}

pub(crate) fn backward_input<T: Element>(
    inputs: usize,
    d_y: &[T],
    weight: &[T],
    d_x: &mut [T],
) -> Result<()> {
    let (_, outputs) = check("linear_backward_input", inputs, d_x.len(), weight.len(), d_y.len())?;
    let weight = as_f32(weight);
    let weight = Matrix::new(&weight, outputs, inputs);
    (d_x.par_chunks_mut(TOKEN_ROWS * inputs), d_y.par_chunks(TOKEN_ROWS * outputs))
        .into_par_iter()
        .for_each(|(d_x, d_y)| {
            let d_y = as_f32(d_y);
            let d_y = Matrix::new(&d_y, d_y.len() / outputs, outputs);
            with_f32(d_x, |d_x| matmul(d_x, Destination::Overwrite, 1.0, d_y, weight));
        });
    Ok(())
}

pub(crate) fn backward_weight<T: Element, G: Element>(
    inputs: usize,
    x: &[T],
    d_y: &[T],
    d_weight: &mut [G],
) -> Result<()> {
    let (tokens, outputs) =
        check("linear_backward_weight", inputs, x.len(), d_weight.len(), d_y.len())?;
    let (x, d_y) = (as_f32(x), as_f32(d_y));
    let x = Matrix::new(&x, tokens, inputs);
    let d_y = Matrix::new(&d_y, tokens, outputs);
    d_weight.par_chunks_mut(WEIGHT_ROWS * inputs).enumerate().for_each(|(part, d_weight)| {
        let first = part * WEIGHT_ROWS;
        let rows = d_y.columns(first..first + d_weight.len() / inputs).transposed();
        with_f32(d_weight, |d_weight| matmul(d_weight, Destination::Accumulate, 1.0, rows, x));
    });
    Ok(())
}

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
