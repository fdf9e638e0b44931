//! The CPU bodies of the linear layer: matrix products on rayon's threads, straight from and into
//! the buffers.

use super::check;
use crate::backend::Accumulation;
use crate::error::{Result, check_len};
use crate::matmul::{Destination, Matrix, MatrixMut, matmul_parallel};
use crate::scalar::Element;

pub(crate) fn forward<T: Element>(
    inputs: usize,
    x: &[T],
    weight: &[T],
    residual: Option<&[T]>,
    y: &mut [T],
) -> Result<()> {
    let (tokens, outputs) = check("linear_forward", inputs, x.len(), weight.len(), y.len())?;
    let destination = match residual {
        Some(residual) => {
            check_len("linear_forward", "residual", residual.len(), tokens * outputs)?;
            Destination::AddTo(Matrix::new(residual, tokens, outputs))
        }
        None => Destination::Overwrite,
    };
    let x = Matrix::new(x, tokens, inputs);
    let weight = Matrix::new(weight, outputs, inputs).transposed();
    matmul_parallel(MatrixMut::new(y, tokens, outputs), destination, 1.0, x, weight);
    Ok(())
}

pub(crate) fn backward_input<T: Element>(
    inputs: usize,
    d_y: &[T],
    weight: &[T],
    d_x: &mut [T],
) -> Result<()> {
    let (tokens, outputs) =
        check("linear_backward_input", inputs, d_x.len(), weight.len(), d_y.len())?;
    let d_x = MatrixMut::new(d_x, tokens, inputs);
    let d_y = Matrix::new(d_y, tokens, outputs);
    let weight = Matrix::new(weight, outputs, inputs);
    matmul_parallel(d_x, Destination::Overwrite, 1.0, d_y, weight);
    Ok(())
}

pub(crate) fn backward_weight<T: Element, G: Element>(
    inputs: usize,
    x: &[T],
    d_y: &[T],
    d_weight: &mut [G],
    accumulation: Accumulation,
) -> Result<()> {
    let (tokens, outputs) =
        check("linear_backward_weight", inputs, x.len(), d_weight.len(), d_y.len())?;
    let d_weight = MatrixMut::new(d_weight, outputs, inputs);
    let d_y = Matrix::new(d_y, tokens, outputs).transposed();
    let x = Matrix::new(x, tokens, inputs);
    matmul_parallel(d_weight, accumulation.into(), 1.0, d_y, x);
    Ok(())
}
