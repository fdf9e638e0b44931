//! RMSNorm of the rank's own tokens.

use std::ops::Range;

use moh_kernels::rms_norm::{RmsNormBackward, RmsNormForward};
use moh_kernels::{AnyBuffer, Backend, Memory, for_element};

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
pub(crate) struct Normed<M: Memory> {
    /// `[M, C]`.
    pub y: AnyBuffer<M>,
    /// `[M]`.
    pub inv_rms: M::Buffer<f32>,
}

impl<M: Memory> Normed<M> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        Ok(Normed {
            y: sizes.zeros(memory, sizes.stream())?,
            inv_rms: memory.allocate(sizes.token_share().per_rank)?,
        })
    }
}

impl RmsNorm {
    pub fn new(list: &mut TensorList<'_>, name: &str, width: usize, eps: f64) -> Self {
        RmsNorm { weight: list.norm(name, width), eps }
    }

    /// Norms the residual stream `x`, `[M, C]`, and returns the output.
    pub fn forward<'v, B: Backend>(
        &self,
        cx: &Context<'_, B>,
        x: &AnyBuffer<B>,
        normed: &'v mut Normed<B>,
    ) -> Result<&'v AnyBuffer<B>> {
        let (tokens, width) = (cx.own_tokens().local(), self.weight.range.len());
        for_element!(T: x.element() => cx.backend.rms_norm_forward::<T>(RmsNormForward {
            eps: self.eps,
            x: x.view(0..tokens * width).typed(),
            weight: cx.weights.get(&self.weight).typed(),
            y: normed.y.view_mut(0..tokens * width).typed(),
            inv_rms: B::view_mut(&mut normed.inv_rms, 0..tokens),
        }))?;
        Ok(&normed.y)
    }

    /// Adds the gradient of `x` to the gradient of the residual stream, and the gradient of the weight. `d_y` is the
    /// range of the output's gradient in `d.hidden`.
    pub fn backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        x: &AnyBuffer<B>,
        inv_rms: &B::Buffer<f32>,
        d_y: Range<usize>,
        d: &mut ActivationGradients<B>,
    ) -> Result<()> {
        let (tokens, len) = (cx.own_tokens().local(), d_y.len());
        cx.gradients.clear_stale(cx.forward.backend, &self.weight)?;
        let Context { backend, weights, .. } = cx.forward;
        let d_weight = cx.gradients.get_mut(&self.weight);
        for_element!(T: x.element(), G: d_weight.element() => {
            backend.rms_norm_backward::<T, G>(RmsNormBackward {
                x: x.view(0..len).typed(),
                weight: weights.get(&self.weight).typed(),
                inv_rms: B::view(inv_rms, 0..tokens),
                d_y: d.hidden.view(d_y).typed(),
                d_x: d.residual.view_mut(0..len).typed(),
                d_weight: d_weight.typed(),
            })
        })?;
        Ok(())
    }
}
