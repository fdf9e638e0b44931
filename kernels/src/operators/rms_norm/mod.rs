//! RMSNorm (Zhang and Sennrich, arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps) * weight.
//!
//! With r = inv_rms and h = d_y * weight, the gradients are
//! d_x = r h - x r^3 mean(h x) and d_weight = sum over tokens of d_y x r.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::{Element, Memory, Result, View, ViewMut, check_len, ensure};

/// Arguments of [`RmsNorm::rms_norm_forward`].
pub struct RmsNormForward<'a, M: Memory, T: Element> {
    /// Added to the mean square.
    pub eps: f64,
    /// `[N, C]`.
    pub x: View<'a, M, T>,
    /// `[C]`.
    pub weight: View<'a, M, T>,
    /// Overwritten; `[N, C]`.
    pub y: ViewMut<'a, M, T>,
    /// Overwritten, for the backward pass; `[N]`.
    pub inv_rms: ViewMut<'a, M, f32>,
}

/// Arguments of [`RmsNorm::rms_norm_backward`].
pub struct RmsNormBackward<'a, M: Memory, T: Element, G: Element> {
    /// `[N, C]`.
    pub x: View<'a, M, T>,
    /// `[C]`.
    pub weight: View<'a, M, T>,
    /// Written by the forward pass; `[N]`.
    pub inv_rms: View<'a, M, f32>,
    /// `[N, C]`.
    pub d_y: View<'a, M, T>,
    /// Added to; `[N, C]`.
    pub d_x: ViewMut<'a, M, T>,
    /// Added to; `[C]`.
    pub d_weight: ViewMut<'a, M, G>,
}

/// RMSNorm as an operator of a device.
pub trait RmsNorm: Memory {
    /// Computes `y = x * inv_rms * weight`, `inv_rms[n] = 1 / sqrt(mean(x[n]^2) + eps)`.
    fn rms_norm_forward<T: Element>(&self, args: RmsNormForward<'_, Self, T>) -> Result<()>;

    /// Adds the gradients of [`RmsNorm::rms_norm_forward`] to `d_x` and `d_weight`.
    fn rms_norm_backward<T: Element, G: Element>(
        &self,
        args: RmsNormBackward<'_, Self, T, G>,
    ) -> Result<()>;
}

/// Checks the lengths that both passes share; returns the width.
fn check(operator: &'static str, x: usize, width: usize, inv_rms: usize) -> Result<usize> {
    ensure(operator, width > 0, || "weight is empty".into())?;
    check_len(operator, "x", x, inv_rms * width)?;
    Ok(width)
}
