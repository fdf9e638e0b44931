//! Query and key norms (QK-norm, Dehghani et al., arXiv 2302.05442) in the form of Qwen3 (arXiv
//! 2505.09388): RMSNorm of each head's query and key before RoPE, with one weight for all query
//! heads and one for all key heads.
//!
//! ```text
//! y = r x * weight                                 r = 1 / sqrt(mean(x^2) + eps), over a head
//! d_x = r h - x r^3 mean(h x)                      h = d_y * weight
//! d_weight = sum over tokens and heads of d_y x r
//! ```

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::{Element, Memory, QkvShape, Result, View, ViewMut, check_len};

/// Arguments of [`QkNorm::qk_norm_forward`].
pub struct QkNormForward<'a, M: Memory, T: Element> {
    /// Shape of `qkv` and `normed`.
    pub shape: &'a QkvShape,
    /// Added to the mean square.
    pub eps: f64,
    /// Queries, keys and values, one row per token; `[B*T, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// Weight of the query heads, then of the key heads; `[2, D]`.
    pub weight: View<'a, M, T>,
    /// Overwritten with normed queries and keys, and the values; `[B*T, (H + 2G) D]`.
    pub normed: ViewMut<'a, M, T>,
}

/// Arguments of [`QkNorm::qk_norm_backward`].
pub struct QkNormBackward<'a, M: Memory, T: Element, G: Element> {
    /// Shape of `qkv` and `d_qkv`.
    pub shape: &'a QkvShape,
    /// Added to the mean square.
    pub eps: f64,
    /// As in the forward pass.
    pub qkv: View<'a, M, T>,
    /// As in the forward pass.
    pub weight: View<'a, M, T>,
    /// The gradient of `normed`, replaced by the gradient of `qkv`; `[B*T, (H + 2G) D]`.
    pub d_qkv: ViewMut<'a, M, T>,
    /// Added to; `[2, D]`.
    pub d_weight: ViewMut<'a, M, G>,
}

/// Query and key norms as an operator of a device.
pub trait QkNorm: Memory {
    /// Normalises queries and keys, and copies values.
    fn qk_norm_forward<T: Element>(&self, args: QkNormForward<'_, Self, T>) -> Result<()>;

    /// Replaces the gradients of normed queries and keys by the gradients before the norms, and
    /// adds the gradients of the weights.
    fn qk_norm_backward<T: Element, G: Element>(
        &self,
        args: QkNormBackward<'_, Self, T, G>,
    ) -> Result<()>;
}

/// Checks a shape, the lengths that both passes share, and the length of the output with this name.
fn check(
    operator: &'static str,
    shape: &QkvShape,
    [qkv, weight]: [usize; 2],
    (name, output): (&'static str, usize),
) -> Result<()> {
    shape.check(operator)?;
    check_len(operator, "qkv", qkv, shape.tokens() * shape.row())?;
    check_len(operator, "weight", weight, 2 * shape.head_dim)?;
    check_len(operator, name, output, qkv)
}
