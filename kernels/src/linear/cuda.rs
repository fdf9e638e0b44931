//! Linear layers on a GPU.

use super::check;
use crate::backend::{Accumulation, Backend};
use crate::cuda::{Cuda, CudaView, CudaViewMut, Gemm, Operand};
use crate::error::{Result, check_len};
use crate::scalar::Element;

pub(crate) fn forward<T: Element>(
    cuda: &Cuda,
    inputs: usize,
    x: CudaView<'_, T>,
    weight: CudaView<'_, T>,
    residual: Option<CudaView<'_, T>>,
    y: CudaViewMut<'_, T>,
) -> Result<()> {
    let (tokens, outputs) = check("linear_forward", inputs, x.len, weight.len, y.len)?;
    if let Some(residual) = residual {
        check_len("linear_forward", "residual", residual.len, tokens * outputs)?;
    }
    run(
        cuda,
        Gemm {
            out: Operand::new(y.address, T::DTYPE, tokens, outputs),
            left: Operand::new(x.address, T::DTYPE, tokens, inputs),
            right: Operand::new(weight.address, T::DTYPE, outputs, inputs).transposed(),
            addend: residual.map(|residual| residual.address),
        },
    )
}

pub(crate) fn backward_input<T: Element>(
    cuda: &Cuda,
    inputs: usize,
    d_y: CudaView<'_, T>,
    weight: CudaView<'_, T>,
    d_x: CudaViewMut<'_, T>,
) -> Result<()> {
    let (tokens, outputs) = check("linear_backward_input", inputs, d_x.len, weight.len, d_y.len)?;
    run(
        cuda,
        Gemm {
            out: Operand::new(d_x.address, T::DTYPE, tokens, inputs),
            left: Operand::new(d_y.address, T::DTYPE, tokens, outputs),
            right: Operand::new(weight.address, T::DTYPE, outputs, inputs),
            addend: None,
        },
    )
}

pub(crate) fn backward_weight<T: Element, G: Element>(
    cuda: &Cuda,
    inputs: usize,
    x: CudaView<'_, T>,
    d_y: CudaView<'_, T>,
    d_weight: CudaViewMut<'_, G>,
    accumulation: Accumulation,
) -> Result<()> {
    let (tokens, outputs) = check("linear_backward_weight", inputs, x.len, d_weight.len, d_y.len)?;
    let adds = accumulation == Accumulation::Add;
    if tokens == 0 && !adds {
        return cuda.zero(d_weight);
    }
    run(
        cuda,
        Gemm {
            out: Operand::new(d_weight.address, G::DTYPE, outputs, inputs),
            left: Operand::new(d_y.address, T::DTYPE, tokens, outputs).transposed(),
            right: Operand::new(x.address, T::DTYPE, tokens, inputs),
            addend: adds.then_some(d_weight.address),
        },
    )
}

/// Runs a product, unless it is of no token.
fn run(cuda: &Cuda, gemm: Gemm) -> Result<()> {
    if gemm.left.rows == 0 || gemm.left.columns == 0 {
        return Ok(());
    }
    cuda.gemm(&gemm)
}
