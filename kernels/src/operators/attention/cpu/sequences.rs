//! Attention of sequences of different lengths: one task for each key/value head of each sequence, as if the sequence
//! were alone.

use pulp::Arch;

use super::factor::Factor;
use super::forward::{Outputs, forward_task};
use super::rows::blocks;
use super::{KvHead, run_tasks, token, with_factors};
use crate::attention::sequences::{args_of, blocks_of};
use crate::attention::{AttentionArgs, KeyValues, SequenceAttention};
use crate::{Cpu, Element, Result};

/// Runs the forward pass with the vector instructions of `arch`.
pub(super) fn forward<T: Element>(arch: Arch, args: SequenceAttention<'_, Cpu, T>) -> Result<()> {
    with_factors!(F, T, arch, forward_by::<T, F>(arch, args))
}

struct Part<'a, T: Element> {
    args: AttentionArgs<'a, Cpu>,
    queries: &'a [T],
    key_values: KeyValues<'a, Cpu, T>,
    outputs: Outputs<'a, T>,
    is_prompt: bool,
}

fn forward_by<T: Element, F: Factor>(
    arch: Arch,
    args: SequenceAttention<'_, Cpu, T>,
) -> Result<()> {
    args.check()?;
    let SequenceAttention { shape, sequences, qkv, block_table, block_length, .. } = args;
    let (mut out, mut log_sum_exp) = (args.out, args.log_sum_exp);
    let mut parts = Vec::with_capacity(sequences.len());
    for span in sequences {
        let tokens = span.rows.len();
        let (own_out, rest) = out.split_at_mut(tokens * shape.heads * shape.head_dim);
        let (own_sums, rest_of_sums) = log_sum_exp.split_at_mut(tokens * shape.heads);
        (out, log_sum_exp) = (rest, rest_of_sums);
        let key_values = KeyValues::Paged {
            keys: args.keys,
            values: args.values,
            block_table: &block_table[blocks_of(span, block_length)],
            block_length,
        };
        let attention = args_of(shape, args.selection, args.score_factor, span);
        key_values.check("attention_of_sequences", &attention.shape, blocks(key_values))?;
        parts.push(Part {
            args: attention,
            queries: &qkv[span.rows.start * shape.row()..span.rows.end * shape.row()],
            key_values,
            outputs: Outputs::new(own_out, own_sums, &attention.shape),
            is_prompt: span.is_prompt,
        });
    }
    let task = |index: usize| {
        let (part, kv_head) = (&parts[index / shape.kv_heads], index % shape.kv_heads);
        let Part { args, queries, key_values, outputs, is_prompt } = part;
        let kv_head = KvHead { sequence: 0, kv_head };
        match is_prompt {
            true => forward_task::<T, F>(arch, args, queries, *key_values, outputs, kv_head),
            false => token::forward_task(arch, args, queries, *key_values, outputs, kv_head),
        }
    };
    let pairs: usize =
        parts.iter().map(|part| part.args.shape.tokens() * part.args.shape.key_length).sum();
    run_tasks(parts.len() * shape.kv_heads, pairs * shape.heads, shape.head_dim, task);
    Ok(())
}
