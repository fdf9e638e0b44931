//! AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), over flat buffers.
//!
//! ```text
//! g <- g * min(1, clip_norm / (norm + 1e-6))
//! p <- p (1 - lr * decay)
//! m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
//! p <- p - lr / (1 - beta1^s) * m / (sqrt(v) / sqrt(1 - beta2^s) + eps)
//! ```

pub(crate) mod cpu;

/// Constants of one step on one range of parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; 0 for norms.
    pub weight_decay: f64,
    /// Global gradient norm above which gradients are scaled down to it.
    pub clip_norm: f64,
    /// Number of this step, from 1, for the bias corrections.
    pub step: u64,
}

/// The factor that clipping puts on every gradient, from the squared global norm.
pub fn clip_factor(clip_norm: f64, squared_norm: f64) -> f64 {
    (clip_norm / (squared_norm.sqrt() + 1e-6)).min(1.0)
}
