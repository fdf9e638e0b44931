//! The scratch memory of a model's operators, computed before the first pass.

use super::Cuda;
use crate::memory::WorkingSet;
use crate::scalar::Element;
use crate::{adamw, attention, cross_entropy, qk_norm, rms_norm, router};

/// The maximum of all operators' requests to [`Cuda::scratch`] for these passes. Operators run in
/// sequence and share it.
pub(super) fn scratch_bytes<T: Element>(cuda: &Cuda, passes: &WorkingSet) -> usize {
    let WorkingSet { attention, routed, qk_norm: norms, training, width, tensors } = passes;
    let tokens = attention.tokens();
    let forward = attention::cuda::forward_scratch_bytes(attention, *routed)
        .max(cross_entropy::cuda::own_scratch_bytes(tokens))
        .max(router::cuda::scratch_bytes(attention.heads));
    if !training {
        return forward;
    }
    let normed = match norms {
        true => attention.heads + attention.kv_heads,
        false => 0,
    };
    forward
        .max(qk_norm::cuda::scratch_bytes(tokens, normed, attention.head_dim))
        .max(attention::cuda::backward_scratch_bytes::<T>(cuda, attention, *routed))
        .max(rms_norm::cuda::scratch_bytes(tokens, *width))
        .max(adamw::cuda::scratch_bytes(*tensors))
}
