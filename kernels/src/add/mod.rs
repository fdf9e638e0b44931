//! Adds what a branch of a block computed to the residual stream, where the product that computed it
//! could not: its parts come from several ranks.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::error::{Result, check_len};

/// Refuses lengths that differ.
fn check([x, y, out]: [usize; 3]) -> Result<()> {
    check_len("add", "y", y, x)?;
    check_len("add", "out", out, x)
}
