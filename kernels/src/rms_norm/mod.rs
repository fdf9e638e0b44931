//! RMSNorm (Zhang and Sennrich, arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps) * weight.
//!
//! With r = inv_rms and h = d_y * weight, the gradients are
//! d_x = r h - x r^3 mean(h x) and d_weight = sum over tokens of d_y x r.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::error::{Result, check_len, ensure};

/// Checks the lengths that both passes share; returns the width.
fn check(operator: &'static str, x: usize, width: usize, inv_rms: usize) -> Result<usize> {
    ensure(operator, width > 0, || "weight is empty".into())?;
    check_len(operator, "x", x, inv_rms * width)?;
    Ok(width)
}
