//! SwiGLU (Shazeer, arXiv 2002.05202): out = silu(gate) * up, silu(x) = x / (1 + e^-x).
//!
//! With s = sigmoid(gate): d_up = d_out gate s, d_gate = d_out up s (1 + gate (1 - s)). Backward
//! has everything at hand that the output needs, so it computes it again at no cost: the output is
//! the largest tensor that a block would otherwise keep beside gate and up.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::error::{Result, check_len, ensure};

fn check(operator: &'static str, width: usize, gate_up: usize, out: usize) -> Result<()> {
    ensure(operator, width > 0 && out.is_multiple_of(width), || {
        format!("{out} numbers do not divide into tokens of {width}")
    })?;
    check_len(operator, "gate_up", gate_up, 2 * out)
}
