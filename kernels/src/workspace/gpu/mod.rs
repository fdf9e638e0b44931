//! Memory that a GPU's operators need in addition to their arguments. It is compiled in every build, so
//! that it can be counted on machines without a GPU.

pub(crate) mod attention;

use crate::attention::AttentionShape;
use crate::cross_entropy::{GPU_CHUNK, HeadShape};
use crate::gpu_sizes::MAX_BLOCKS;
use crate::workspace::WorkingSet;

/// Maximum groups of tokens with separate sums of weight gradients: one block each, a few times
/// the multiprocessors of a large GPU.
pub(crate) const NORM_GROUPS: usize = 512;
/// Maximum groups of tokens with separate sums of the gradients of query and key norms.
pub(crate) const QK_NORM_GROUPS: usize = 1024;

/// Returns the maximum scratch of an operator in these passes, given the scratch of attention's backward pass.
/// Operators run one after the other and share the scratch.
pub(crate) fn scratch_bytes(passes: &WorkingSet, attention_backward: usize) -> usize {
    let WorkingSet { attention, routed, qk_norm, training, width, tensors, .. } = passes;
    let tokens = attention.tokens();
    let forward = attention::packed_bytes(attention, *routed)
        .max(row_loss_bytes(tokens))
        .max(balance_loss_bytes(attention.heads));
    if !training {
        return forward;
    }
    forward
        .max(attention_backward)
        .max(norm_bytes(tokens, *width))
        .max(if *qk_norm { qk_norm_bytes(attention) } else { 0 })
        .max(squared_norm_bytes(*tensors))
}

/// Returns the tokens of a chunk of logits of `bytes` bytes each.
pub(crate) fn logit_rows(shape: &HeadShape, bytes: usize) -> usize {
    GPU_CHUNK.min(shape.tokens.max(1)) * size_of::<f32>() / bytes
}

/// Returns the f32 elements of a chunk of logits; with a teacher, of both chunks and of the tokens' f64 distillation
/// losses.
pub(crate) fn cross_entropy_scratch(shape: &HeadShape) -> usize {
    let chunk = chunk_elements(shape);
    if shape.has_teacher { 2 * chunk + 2 * shape.tokens } else { chunk }
}

/// Returns the f32 elements of a chunk of logits.
pub(crate) fn chunk_elements(shape: &HeadShape) -> usize {
    GPU_CHUNK.min(shape.tokens.max(1)) * shape.vocab_size
}

/// Returns the elements of the table of a chunk that `ranks` ranks sum.
pub(crate) fn cross_entropy_sums(shape: &HeadShape, ranks: usize) -> usize {
    // The type of the logits is not known here. The smaller type has larger chunks.
    let columns = if shape.has_teacher { 4 * ranks + 1 } else { ranks + 1 };
    logit_rows(shape, size_of::<half::bf16>()) * columns
}

/// Returns the scratch of one loss or error for each token, for callers that do not pass this memory.
pub(crate) fn row_loss_bytes(tokens: usize) -> usize {
    tokens * size_of::<f64>()
}

pub(crate) fn balance_loss_bytes(routed: usize) -> usize {
    routed * size_of::<f64>()
}

pub(crate) fn norm_bytes(tokens: usize, width: usize) -> usize {
    tokens.min(NORM_GROUPS) * width * size_of::<f32>()
}

/// Returns the scratch of the backward pass of query and key norms: two values for each head of a token, and
/// the groups' gradients of both weights.
pub(crate) fn qk_norm_bytes(attention: &AttentionShape) -> usize {
    let (tokens, heads) = (attention.tokens(), attention.heads + attention.kv_heads);
    let elements = 2 * tokens * heads + tokens.min(QK_NORM_GROUPS) * 2 * attention.head_dim;
    elements * size_of::<f32>()
}

/// Returns the maximum scratch of the squared norm of this many segments: the last block of every segment may
/// be nearly empty.
pub(crate) fn squared_norm_bytes(segments: usize) -> usize {
    (MAX_BLOCKS + segments) * size_of::<f64>()
}
