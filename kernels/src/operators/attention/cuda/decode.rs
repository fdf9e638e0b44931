//! Attention of generated tokens, one token of each sequence (decode.cu).

use super::super::Span;
use super::{KeyValues, SequenceAttention};
use crate::attention::sequences::{blocks_of, shape_of};
use crate::cuda::parameters::decode_attention::Parameters;
use crate::cuda::{Cuda, THREADS, address_or_null, name};
use crate::{Element, Result, ensure};

/// Maximum keys of a block: longer sequences are divided.
const SPLIT: usize = 512;
/// Widths of heads with kernels. Narrower heads use the next width.
const WIDTHS: [usize; 3] = [64, 128, 256];
const WARPS: usize = THREADS / 32;

/// Returns the bytes of the partial results of `count` tokens.
fn scratch_bytes(count: usize, heads: usize, head_dim: usize, splits: usize) -> usize {
    if splits > 1 { count * heads * splits * (head_dim + 2) * size_of::<f32>() } else { 0 }
}

/// Computes the attention of the sequences with a generated token.
pub(super) fn forward<T: Element>(
    cuda: &Cuda,
    args: &SequenceAttention<'_, Cuda, T>,
) -> Result<()> {
    const OPERATOR: &str = "attention_of_sequences";
    let (shape, generated) = (args.shape, || args.sequences.iter().filter(|span| !span.is_prompt));
    let count = generated().count();
    if count == 0 {
        return Ok(());
    }
    for span in generated() {
        // Only the GPU reads the entries of the table.
        let block_length = args.block_length;
        let block_table = args.block_table.part(blocks_of(span, block_length));
        let (keys, values) = (args.keys, args.values);
        let key_values: KeyValues<'_, Cuda, T> =
            KeyValues::Paged { keys, values, block_table, block_length };
        key_values.check(OPERATOR, &shape_of(shape, span), None)?;
    }
    let width = WIDTHS.into_iter().find(|&width| shape.head_dim <= width);
    ensure(OPERATOR, width.is_some(), || {
        format!("heads of {} elements, at most {}", shape.head_dim, WIDTHS[2])
    })?;
    let width = width.unwrap_or_default();
    let keys = |span: &Span| span.position + 1;
    let splits = generated().map(keys).max().unwrap_or(1).div_ceil(SPLIT);
    let (heads, kv_heads) = (shape.heads, shape.kv_heads);
    let shared_heads = args.selection.map_or(heads, |selection| selection.shared_heads);
    let routed = args.selection.map(|selection| selection.routed).filter(|mask| mask.len > 0);
    let parameters = Parameters {
        q: args.qkv.address,
        k: args.keys.address,
        v: args.values.address,
        out: args.out.address,
        log_sum_exp: args.log_sum_exp.address,
        partial: cuda.scratch(scratch_bytes(count, heads, shape.head_dim, splits))?,
        tokens: args.generated.address,
        selected: address_or_null(routed),
        weights: address_or_null(args.selection.and_then(|selection| selection.weights)),
        block_table: args.block_table.address,
        query_stride: shape.row() as u64,
        count: count as u32,
        block_length: args.block_length as u32,
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        head_dim: shape.head_dim as u32,
        routed: (heads - shared_heads) as u32,
        split: SPLIT as u32,
        splits: splits as u32,
        scale: args.score_factor / (shape.head_dim as f32).sqrt(),
        padding: 0,
    };
    let kernel = name::<T>(&format!("decode_attention_{width}"));
    cuda.launch(&kernel, [count * kv_heads, splits], 0, &parameters)?;
    if splits == 1 {
        return Ok(());
    }
    let kernel = name::<T>(&format!("decode_attention_merge_{width}"));
    cuda.launch(&kernel, [(count * heads).div_ceil(WARPS), 1], 0, &parameters)
}
