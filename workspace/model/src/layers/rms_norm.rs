//! RMSNorm of the rank's own tokens.

use std::ops::Range;

use moh_kernels::rms_norm::{RmsNormBackward, RmsNormForward};
use moh_kernels::{Backend, Element, Memory};

use super::{ActivationGradients, BackwardContext, Context};
use crate::parameters::ParameterRange;
use crate::tensors::TensorList;
use crate::{PassSizes, Result};

/// RMSNorm with a weight, `[C]`, that all ranks have.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RmsNorm {
    pub weight: ParameterRange,
    eps: f64,
}

/// The output of a norm, and the input of its backward pass.
pub(crate) struct Normed<M: Memory, T: Element> {
    /// `[M, C]`.
    pub y: M::Buffer<T>,
    /// `[M]`.
    pub inv_rms: M::Buffer<f32>,
}

impl<M: Memory, T: Element> Normed<M, T> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        Ok(Normed {
            y: memory.allocate(sizes.stream())?,
            inv_rms: memory.allocate(sizes.token_share().per_rank)?,
        })
    }
}

impl RmsNorm {
    pub fn new(list: &mut TensorList<'_>, name: &str, width: usize, eps: f64) -> Self {
        RmsNorm { weight: list.norm(name, width), eps }
    }

    /// Norms the residual stream `x`, `[M, C]`, and returns the output.
    pub fn forward<'v, B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: &B::Buffer<T>,
        normed: &'v mut Normed<B, T>,
    ) -> Result<&'v B::Buffer<T>> {
        let (tokens, width) = (cx.own_tokens().local(), self.weight.range.len());
        cx.backend.rms_norm_forward(RmsNormForward {
            eps: self.eps,
            x: B::view(x, 0..tokens * width),
            weight: cx.weights.get(&self.weight),
            y: B::view_mut(&mut normed.y, 0..tokens * width),
            inv_rms: B::view_mut(&mut normed.inv_rms, 0..tokens),
        })?;
        Ok(&normed.y)
    }

    /// Adds the gradient of `x` to the gradient of the residual stream, and the gradient of the weight. `d_y` is the
    /// range of the output's gradient in `d.hidden`.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        x: &B::Buffer<T>,
        inv_rms: &B::Buffer<f32>,
        d_y: Range<usize>,
        d: &mut ActivationGradients<B, T>,
    ) -> Result<()> {
        let (tokens, len) = (cx.own_tokens().local(), d_y.len());
        cx.gradients.clear_stale(cx.forward.backend, &self.weight)?;
        cx.forward.backend.rms_norm_backward(RmsNormBackward {
            x: B::view(x, 0..len),
            weight: cx.forward.weights.get(&self.weight),
            inv_rms: B::view(inv_rms, 0..tokens),
            d_y: B::view(&d.hidden, d_y),
            d_x: B::view_mut(&mut d.residual, 0..len),
            d_weight: cx.gradients.get_mut(&self.weight),
        })?;
        Ok(())
    }
}
