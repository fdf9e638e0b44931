//! Norms of each query and key (arXiv 2302.05442), which Qwen3 applies before RoPE.

use moh_kernels::qk_norm::{QkNormBackward, QkNormForward};
use moh_kernels::{Backend, Element, View, ViewMut};

use super::{BackwardContext, Context};
use crate::Result;
use crate::parameters::ParameterRange;
use crate::tensors::TensorList;

/// RMSNorm of every head's query and key, with one weight, `[D]`, for queries and another for keys.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct QkNorm {
    weight: ParameterRange,
    eps: f64,
}

impl QkNorm {
    pub fn new(list: &mut TensorList<'_>, head_dim: usize, eps: f64) -> Self {
        let queries = list.norm("self_attn.q_norm.weight", head_dim);
        let keys = list.norm("self_attn.k_norm.weight", head_dim);
        QkNorm { weight: ParameterRange::joined([queries, keys]), eps }
    }

    /// Writes normed queries and keys, and the unchanged values, `[N, (H + 2G) D]`.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        qkv: View<'_, B, T>,
        mut normed: ViewMut<'_, B, T>,
    ) -> Result<()> {
        cx.backend.qk_norm_forward(QkNormForward {
            shape: &cx.tokens.shape,
            eps: self.eps,
            qkv: B::reborrow(qkv),
            weight: cx.weights.get(&self.weight),
            normed: B::reborrow_mut(&mut normed),
        })?;
        Ok(())
    }

    /// Replaces the gradients of normed queries and keys by the gradients of `qkv`, and adds the gradients of the
    /// weights.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        qkv: View<'_, B, T>,
        mut d_qkv: ViewMut<'_, B, T>,
    ) -> Result<()> {
        cx.gradients.clear_stale(cx.forward.backend, &self.weight)?;
        cx.forward.backend.qk_norm_backward(QkNormBackward {
            shape: &cx.forward.tokens.shape,
            eps: self.eps,
            qkv: B::reborrow(qkv),
            weight: cx.forward.weights.get(&self.weight),
            d_qkv: B::reborrow_mut(&mut d_qkv),
            d_weight: cx.gradients.get_mut(&self.weight),
        })?;
        Ok(())
    }
}
