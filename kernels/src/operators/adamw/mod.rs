//! AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), over flat buffers.
//!
//! ```text
//! g <- g * min(1, clip_norm / (norm + 1e-6))
//! p <- p (1 - lr * decay)
//! m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
//! p <- p - lr / (1 - beta1^s) * m / (sqrt(v) / sqrt(1 - beta2^s) + eps)
//! ```
//!
//! Parameters of a bf16 model are updated in f32, each stored as a weight and its [`remainder`].

mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;
pub mod remainder;

use crate::{DType, Element, Memory, Result, View, ViewMut, check_len, ensure};

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
    /// Maximum global gradient norm. Larger gradients are scaled down to it.
    pub clip_norm: f64,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Number of this step, starting at 1, for the bias corrections.
    pub step: u64,
}

/// Arguments of [`Optimizer::adamw`]: ranges of flat buffers, all of the same length.
pub struct AdamWUpdate<'a, M: Memory, T: Element, G: Element, S: Element> {
    /// The step's constants.
    pub step: &'a AdamW,
    /// Gradients.
    pub gradients: View<'a, M, G>,
    /// Weights, updated in place.
    pub weights: ViewMut<'a, M, T>,
    /// The remainders of bf16 weights ([`remainder`]), updated in place. With them the update is in
    /// f32; without them `weights` is updated as stored.
    pub remainder: Option<ViewMut<'a, M, i16>>,
    /// First moments, updated in place.
    pub first_moment: ViewMut<'a, M, S>,
    /// Second moments, updated in place.
    pub second_moment: ViewMut<'a, M, S>,
}

/// The optimiser as operators of a device.
pub trait Optimizer: Memory {
    /// Computes `out[0] += sum(x^2)` over all of `xs`, of any length and alignment.
    fn squared_norms<G: Element>(
        &self,
        xs: &[View<'_, Self, G>],
        out: ViewMut<'_, Self, f64>,
    ) -> Result<()>;

    /// Computes one AdamW step on a range of flat buffers.
    fn adamw<T: Element, G: Element, S: Element>(
        &self,
        args: AdamWUpdate<'_, Self, T, G, S>,
    ) -> Result<()>;
}

/// The constants in the form of the inner loop (`Update` of adamw.cu has the same fields).
#[derive(Debug, Clone, Copy)]
struct Constants {
    /// The factor by which clipping scales every gradient.
    clip: f32,
    keep: f32,
    rate: f32,
    root_correction: f32,
    beta1: f32,
    beta2: f32,
    /// 1 - beta, subtracted in f64: the rounding of beta2 to f32 would be large relative to the
    /// difference.
    share1: f32,
    share2: f32,
    eps: f32,
}

impl Constants {
    fn new(step: &AdamW) -> Self {
        let exponent = i32::try_from(step.step).unwrap_or(i32::MAX);
        Constants {
            clip: (step.clip_norm / (step.grad_norm + 1e-6)).min(1.0) as f32,
            keep: (1.0 - step.learning_rate * step.weight_decay) as f32,
            rate: (step.learning_rate / (1.0 - step.beta1.powi(exponent))) as f32,
            root_correction: (1.0 / (1.0 - step.beta2.powi(exponent)).sqrt()) as f32,
            beta1: step.beta1 as f32,
            beta2: step.beta2 as f32,
            share1: (1.0 - step.beta1) as f32,
            share2: (1.0 - step.beta2) as f32,
            eps: step.eps as f32,
        }
    }
}

impl<M: Memory, T: Element, G: Element, S: Element> AdamWUpdate<'_, M, T, G, S> {
    fn check(&self) -> Result<()> {
        let len = M::view_len::<G>(self.gradients);
        check_len("adamw", "weights", M::view_mut_len::<T>(&self.weights), len)?;
        check_len("adamw", "first_moment", M::view_mut_len::<S>(&self.first_moment), len)?;
        check_len("adamw", "second_moment", M::view_mut_len::<S>(&self.second_moment), len)?;
        let Some(remainder) = &self.remainder else { return Ok(()) };
        ensure("adamw", T::DTYPE == DType::BF16, || {
            format!("weights of {:?} have no remainder, only BF16 weights do", T::DTYPE)
        })?;
        check_len("adamw", "remainder", M::view_mut_len::<i16>(remainder), len)
    }
}
