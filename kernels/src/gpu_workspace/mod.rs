//! How much memory a GPU's operators need beside their arguments: known in every build, so that it can be counted where there is no GPU.

pub(crate) mod attention;

use crate::cross_entropy::{GPU_CHUNK, HeadShape};
use crate::memory::WorkingSet;

/// Blocks that fill a large GPU some times over.
pub(crate) const MOST_BLOCKS: usize = 4096;
/// Parts of the tokens whose gradients of a norm's weight are summed apart, at most.
pub(crate) const NORM_PARTS: usize = 64;
/// Device memory that products may use.
pub(crate) const PRODUCTS: usize = 64 << 20;
/// Bytes of the number that kernels find at 0 and leave so.
pub(crate) const COUNTER: usize = size_of::<u32>();

/// The most that an operator asks for on such passes, of which attention's backward pass asks for
/// `attention_backward`. Operators run one after the other and share it.
pub(crate) fn scratch_bytes(passes: &WorkingSet, attention_backward: usize) -> usize {
    let WorkingSet { attention, routed, training, width, tensors, .. } = passes;
    let tokens = attention.tokens();
    let forward = attention::packed_bytes(attention, *routed)
        .max(cross_entropy_bytes(tokens))
        .max(balance_loss_bytes(attention.heads));
    if !training {
        return forward;
    }
    forward
        .max(attention_backward)
        .max(norm_bytes(tokens, *width))
        .max(squared_norm_bytes(*tensors))
}

/// Tokens of a chunk of logits of `bytes` bytes each.
pub(crate) fn logit_rows(shape: &HeadShape, bytes: usize) -> usize {
    GPU_CHUNK.min(shape.tokens.max(1)) * size_of::<f32>() / bytes
}

/// f32 elements of a chunk of logits.
pub(crate) fn cross_entropy_scratch(shape: &HeadShape) -> usize {
    GPU_CHUNK.min(shape.tokens.max(1)) * shape.vocab_size
}

/// Elements of the table of a chunk that `ranks` ranks add up.
pub(crate) fn cross_entropy_sums(shape: &HeadShape, ranks: usize) -> usize {
    // The type of the logits is not known here; those of the smaller one come more at a time.
    logit_rows(shape, size_of::<half::bf16>()) * (ranks + 1)
}

/// Bytes of the tokens' losses, which do not lie in the caller's scratch.
pub(crate) fn cross_entropy_bytes(tokens: usize) -> usize {
    tokens * size_of::<f64>()
}

/// Scratch of the balance loss.
pub(crate) fn balance_loss_bytes(routed: usize) -> usize {
    routed * size_of::<f64>()
}

/// Scratch of a norm's backward pass.
pub(crate) fn norm_bytes(tokens: usize, width: usize) -> usize {
    tokens.min(NORM_PARTS) * width * size_of::<f32>()
}

/// The most scratch that the squared norm of so many segments needs: every segment has a last block
/// that may be nearly empty.
pub(crate) fn squared_norm_bytes(segments: usize) -> usize {
    (MOST_BLOCKS + segments) * size_of::<f64>()
}
