//! How much scratch memory the operators of a model's passes need, known before the first of them.

use super::Cuda;
use crate::memory::WorkingSet;
use crate::scalar::Element;
use crate::{adamw, attention, cross_entropy, rms_norm, router};

/// The most that an operator asks of [`Cuda::scratch`] on such passes. They run one after the other
/// and share it.
pub(super) fn scratch_bytes<T: Element>(cuda: &Cuda, passes: &WorkingSet) -> usize {
    let WorkingSet { attention, routed, training, width, tensors } = passes;
    let tokens = attention.tokens();
    let forward = attention::cuda::forward_scratch_bytes(attention, *routed)
        .max(cross_entropy::cuda::own_scratch_bytes(tokens))
        .max(router::cuda::scratch_bytes(attention.heads));
    if !training {
        return forward;
    }
    forward
        .max(attention::cuda::backward_scratch_bytes::<T>(cuda, attention, *routed))
        .max(rms_norm::cuda::scratch_bytes(tokens, *width))
        .max(adamw::cuda::scratch_bytes(*tensors))
}
