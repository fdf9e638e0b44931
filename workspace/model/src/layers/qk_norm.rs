//! Norms of each query and key (arXiv 2302.05442), which Qwen3 applies before RoPE.

use moh_kernels::qk_norm::{QkNormBackward, QkNormForward};
use moh_kernels::{AnyView, AnyViewMut, Backend, for_element};

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
    pub fn forward<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        qkv: AnyView<'_, B>,
        mut normed: AnyViewMut<'_, B>,
    ) -> Result<()> {
        for_element!(T: qkv.element() => cx.backend.qk_norm_forward::<T>(QkNormForward {
            shape: &cx.tokens.shape,
            eps: self.eps,
            qkv: qkv.typed(),
            weight: cx.weights.get(&self.weight).typed(),
            normed: normed.reborrow().typed(),
        }))?;
        Ok(())
    }

    /// Replaces the gradients of normed queries and keys by the gradients of `qkv`, and adds the gradients of the
    /// weights.
    pub fn backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        qkv: AnyView<'_, B>,
        mut d_qkv: AnyViewMut<'_, B>,
    ) -> Result<()> {
        cx.gradients.clear_stale(cx.forward.backend, &self.weight)?;
        let Context { backend, weights, tokens, .. } = &cx.forward;
        let d_weight = cx.gradients.get_mut(&self.weight);
        for_element!(T: qkv.element(), G: d_weight.element() => {
            backend.qk_norm_backward::<T, G>(QkNormBackward {
                shape: &tokens.shape,
                eps: self.eps,
                qkv: qkv.typed(),
                weight: weights.get(&self.weight).typed(),
                d_qkv: d_qkv.reborrow().typed(),
                d_weight: d_weight.typed(),
            })
        })?;
        Ok(())
    }
}
