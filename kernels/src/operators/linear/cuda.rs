//! Linear layers on a GPU.

use super::{
    Accumulation, Linear, LinearBackwardInput, LinearBackwardWeight, LinearForward, check,
};
use crate::cuda::{Cuda, Matmul, Operand};
use crate::{Element, Memory, Result, View, ViewMut, check_len};

impl Linear for Cuda {
    fn linear_forward<T: Element>(&self, args: LinearForward<'_, Self, T>) -> Result<()> {
        let LinearForward { inputs, x, weight, residual, y, .. } = args;
        let (tokens, outputs) = check("linear_forward", inputs, x.len, weight.len, y.len)?;
        if let Some(residual) = residual {
            check_len("linear_forward", "residual", residual.len, tokens * outputs)?;
        }
        self.matmul(&Matmul {
            out: Operand::new(y.address, T::DTYPE, tokens, outputs),
            left: Operand::new(x.address, T::DTYPE, tokens, inputs),
            right: Operand::new(weight.address, T::DTYPE, outputs, inputs).transposed(),
            addend: residual.map(|residual| residual.address),
        })
    }

    fn pack_weight<T: Element>(
        &self,
        _inputs: usize,
        _weight: View<'_, Self, T>,
        packed: ViewMut<'_, Self, u32>,
    ) -> Result<()> {
        check_len("pack_weight", "packed", packed.len, 0)
    }

    fn linear_backward_input<T: Element>(
        &self,
        args: LinearBackwardInput<'_, Self, T>,
    ) -> Result<()> {
        let LinearBackwardInput { inputs, d_y, weight, d_x, accumulation } = args;
        let (tokens, outputs) =
            check("linear_backward_input", inputs, d_x.len, weight.len, d_y.len)?;
        self.matmul(&Matmul {
            out: Operand::new(d_x.address, T::DTYPE, tokens, inputs),
            left: Operand::new(d_y.address, T::DTYPE, tokens, outputs),
            right: Operand::new(weight.address, T::DTYPE, outputs, inputs),
            addend: (accumulation == Accumulation::Add).then_some(d_x.address),
        })
    }

    fn linear_backward_weight<T: Element, G: Element>(
        &self,
        args: LinearBackwardWeight<'_, Self, T, G>,
    ) -> Result<()> {
        let LinearBackwardWeight { inputs, x, d_y, d_weight, accumulation } = args;
        let (tokens, outputs) =
            check("linear_backward_weight", inputs, x.len, d_weight.len, d_y.len)?;
        let adds = accumulation == Accumulation::Add;
        if tokens == 0 && !adds {
            return self.zero(d_weight);
        }
        self.matmul(&Matmul {
            out: Operand::new(d_weight.address, G::DTYPE, outputs, inputs),
            left: Operand::new(d_y.address, T::DTYPE, tokens, outputs).transposed(),
            right: Operand::new(x.address, T::DTYPE, tokens, inputs),
            addend: adds.then_some(d_weight.address),
        })
    }
}
