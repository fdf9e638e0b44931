//! Adds the output of a branch to the residual stream if the output is a sum over several ranks. Otherwise
//! the branch's last matmul adds it.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::{Element, Memory, Result, View, ViewMut, check_len};

/// The addition as an operator of a device.
pub trait Add: Memory {
    /// Computes `out = x + y`, in f32, rounded once; all have the same length.
    fn add<T: Element>(
        &self,
        x: View<'_, Self, T>,
        y: View<'_, Self, T>,
        out: ViewMut<'_, Self, T>,
    ) -> Result<()>;
}

fn check([x, y, out]: [usize; 3]) -> Result<()> {
    check_len("add", "y", y, x)?;
    check_len("add", "out", out, x)
}
