//! SwiGLU (Shazeer, arXiv 2002.05202): out = silu(gate) * up, silu(x) = x / (1 + e^-x).
//!
//! With s = sigmoid(gate): d_up = d_out gate s, d_gate = d_out up s (1 + gate (1 - s)). The
//! backward pass reads all inputs of the output, so it recomputes the output for free. Therefore the
//! largest activation except gate and up is not saved.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::{Element, Memory, Result, View, ViewMut, check_len, ensure};

/// SwiGLU as an operator of a device.
pub trait Swiglu: Memory {
    /// Computes `out = silu(gate) * up`; gate_up `[N, 2I]` with the gate first, out `[N, I]`, `width` I.
    fn swiglu_forward<T: Element>(
        &self,
        width: usize,
        gate_up: View<'_, Self, T>,
        out: ViewMut<'_, Self, T>,
    ) -> Result<()>;

    /// Computes the gradient of [`Swiglu::swiglu_forward`] in place. `gate_up` is replaced by its gradient. `out` is
    /// the output's gradient on entry and is replaced by the output, which therefore need not be saved.
    fn swiglu_backward<T: Element>(
        &self,
        width: usize,
        gate_up: ViewMut<'_, Self, T>,
        out: ViewMut<'_, Self, T>,
    ) -> Result<()>;
}

fn check(operator: &'static str, width: usize, gate_up: usize, out: usize) -> Result<()> {
    ensure(operator, width > 0 && out.is_multiple_of(width), || {
        format!("{out} elements do not divide into tokens of {width}")
    })?;
    check_len(operator, "gate_up", gate_up, 2 * out)
}
