//! Cross-entropy fused with the output projection: logits exist for one chunk of tokens at a time,
//! whatever the vocabulary, and their gradient is formed where they lay.
//!
//! With p = softmax(x W^T): loss = -log `p[target]`, d_logits = scale (p - onehot(target)),
//! d_x = d_logits W, d_W += d_logits^T x. With x and W in bf16, a device may round d_logits to bf16
//! before it multiplies by them; sums stay f32.

pub(crate) mod cpu;

use crate::backend::{Backend, ViewMut};
use crate::scalar::Element;

/// A target that has no loss.
pub const IGNORED: u32 = u32::MAX;

/// Shape of the output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Tokens, N.
    pub tokens: usize,
    /// Width of the residual stream, C.
    pub width: usize,
    /// Rows of the head, V.
    pub vocab_size: usize,
}

/// Where the gradients of the output head go.
pub struct HeadGradients<'a, B: Backend, T: Element, G: Element> {
    /// Gradient of the total loss with respect to each token's: 1 / (targets of the whole step).
    pub scale: f32,
    /// Overwritten; `[N, C]`.
    pub d_x: ViewMut<'a, B, T>,
    /// Added to; `[V, C]`.
    pub d_weight: ViewMut<'a, B, G>,
}
