//! The CPU bodies of the linear layer: matmuls on rayon's threads, which read and write the buffers
//! directly.

use super::{Linear, LinearBackwardInput, LinearBackwardWeight, LinearForward, check};
use crate::compiled::compiled;
use crate::matmul::{
    self, Destination, Matrix, MatrixMut, Packed, matmul_of_rows, matmul_packed, matmul_parallel,
};
use crate::{Cpu, Element, Result, check_len, ensure};

impl Linear for Cpu {
    fn linear_forward<T: Element>(&self, args: LinearForward<'_, Self, T>) -> Result<()> {
        compiled!(forward::<T>(args: LinearForward<'_, Cpu, T>))
    }

    fn packed_len<T: Element>(&self, inputs: usize, outputs: usize) -> usize {
        matmul::packed_len::<T>(inputs, outputs)
    }

    fn pack_weight<T: Element>(
        &self,
        inputs: usize,
        weight: &[T],
        packed: &mut [u32],
    ) -> Result<()> {
        compiled!(pack::<T>(inputs: usize, weight: &[T], packed: &mut [u32]))
    }

    fn linear_backward_input<T: Element>(
        &self,
        args: LinearBackwardInput<'_, Self, T>,
    ) -> Result<()> {
        compiled!(backward_input::<T>(args: LinearBackwardInput<'_, Cpu, T>))
    }

    fn linear_backward_weight<T: Element, G: Element>(
        &self,
        args: LinearBackwardWeight<'_, Self, T, G>,
    ) -> Result<()> {
        compiled!(backward_weight::<T, G>(args: LinearBackwardWeight<'_, Cpu, T, G>))
    }
}

fn forward<T: Element>(args: LinearForward<'_, Cpu, T>) -> Result<()> {
    let LinearForward { inputs, x, weight, residual, y, independent, packed } = args;
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
    let y = MatrixMut::new(y, tokens, outputs).with(destination);
    match packed {
        Some(packed) => {
            let len = matmul::packed_len::<T>(inputs, outputs);
            check_len("linear_forward", "packed", packed.len(), len)?;
            ensure("linear_forward", len > 0, || format!("{:?} is not packed", T::DTYPE))?;
            let packed = Packed::new::<T>(packed, inputs, outputs);
            matmul_packed(y, x, packed);
        }
        None if independent => matmul_of_rows(y, x, weight),
        None => matmul_parallel(y, x, weight),
    }
    Ok(())
}

fn pack<T: Element>(inputs: usize, weight: &[T], packed: &mut [u32]) -> Result<()> {
    let (_, outputs) = check("pack_weight", inputs, 0, weight.len(), 0)?;
    let len = matmul::packed_len::<T>(inputs, outputs);
    check_len("pack_weight", "packed", packed.len(), len)?;
    matmul::pack(Matrix::new(weight, outputs, inputs).transposed(), packed);
    Ok(())
}

fn backward_input<T: Element>(args: LinearBackwardInput<'_, Cpu, T>) -> Result<()> {
    let LinearBackwardInput { inputs, d_y, weight, d_x, accumulation } = args;
    let (tokens, outputs) =
        check("linear_backward_input", inputs, d_x.len(), weight.len(), d_y.len())?;
    let d_x = MatrixMut::new(d_x, tokens, inputs).with(accumulation);
    let d_y = Matrix::new(d_y, tokens, outputs);
    let weight = Matrix::new(weight, outputs, inputs);
    matmul_parallel(d_x, d_y, weight);
    Ok(())
}

fn backward_weight<T: Element, G: Element>(
    args: LinearBackwardWeight<'_, Cpu, T, G>,
) -> Result<()> {
    let LinearBackwardWeight { inputs, x, d_y, d_weight, accumulation } = args;
    let (tokens, outputs) =
        check("linear_backward_weight", inputs, x.len(), d_weight.len(), d_y.len())?;
    let d_weight = MatrixMut::new(d_weight, outputs, inputs).with(accumulation);
    let d_y = Matrix::new(d_y, tokens, outputs).transposed();
    let x = Matrix::new(x, tokens, inputs);
    matmul_parallel(d_weight, d_y, x);
    Ok(())
}
