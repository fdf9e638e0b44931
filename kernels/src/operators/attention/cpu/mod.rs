//! The CPU bodies of attention: one task per (sequence, key/value head), which processes the packed
//! rows in tiles and a tile's keys in blocks ([`tile`]).
//!
//! Keys, and the columns of queries, keys and values, are padded with zeros to
//! [`ROWS`](matmul::ROWS), columns of gradients to whole vectors; scores of padding are masked.
//!
//! A single token per sequence is computed without tiles ([`token`]).
//!
//! Matmuls of bf16 multiply pairs of terms if the machine has an instruction for it ([`factor`]).
//! Then probabilities and the gradients of scores are rounded to bf16 before their matmuls. Softmax
//! and sums are always f32.

mod backward;
mod exp2;
mod factor;
mod forward;
mod gather;
mod lanes;
mod matmul;
#[cfg(target_arch = "x86_64")]
mod pair;
mod rows;
mod sequences;
#[cfg(test)]
mod tests;
mod tile;
mod token;

use pulp::Arch;
use rayon::prelude::*;

use super::{
    Attention, AttentionArgs, AttentionBackward, AttentionForward, AttentionShape,
    SequenceAttention,
};
use crate::compiled::compiled;
use crate::{Cpu, Element, Result, scratch};
use backward::backward;
use factor::Factor;
use forward::forward;
use lanes::MAX_ROWS;
#[cfg(target_arch = "x86_64")]
use pair::Pair;
use rows::Row;
use sequences::forward as forward_sequences;

impl Attention for Cpu {
    fn attention_forward<T: Element>(&self, args: AttentionForward<'_, Self, T>) -> Result<()> {
        let arch = Arch::new();
        compiled!(forward::<T>(arch: Arch, args: AttentionForward<'_, Cpu, T>))
    }

    fn attention_of_sequences<T: Element>(
        &self,
        args: SequenceAttention<'_, Self, T>,
    ) -> Result<()> {
        let arch = Arch::new();
        compiled!(forward_sequences::<T>(arch: Arch, args: SequenceAttention<'_, Cpu, T>))
    }

    fn attention_backward<T: Element>(&self, args: AttentionBackward<'_, Self, T>) -> Result<()> {
        let arch = Arch::new();
        compiled!(backward::<T>(arch: Arch, args: AttentionBackward<'_, Cpu, T>))
    }
}

/// A call with fewer multiply-adds runs its tasks on one thread.
const SMALL: usize = 1 << 18;
/// Narrower heads take about as long as heads of this many elements.
const MIN_HEAD_DIM: usize = 32;

/// The factor of bf16 elements on architectures without an instruction for pairs.
#[cfg(not(target_arch = "x86_64"))]
type Pair = f32;

/// Evaluates an expression with `$factor` as the type of this machine's factors for elements of type
/// `$element`.
macro_rules! with_factors {
    ($factor:ident, $element:ty, $arch:expr, $body:expr) => {
        if <$crate::attention::cpu::Pair as Factor>::multiplies::<$element>($arch) {
            type $factor = $crate::attention::cpu::Pair;
            $body
        } else {
            type $factor = f32;
            $body
        }
    };
}
use with_factors;

/// Returns the bytes of scratch of a thread that computes attention, including its gradients if `training`.
pub(crate) fn scratch_bytes<T: Element>(shape: &AttentionShape, training: bool) -> usize {
    let arch = Arch::new();
    with_factors!(F, T, arch, {
        let forward = match shape.query_length {
            1 => scratch::bytes(&token::scratch(shape)),
            _ => scratch::bytes(&forward::scratch::<F>(arch, shape)),
        };
        let backward = || scratch::bytes(&backward::scratch::<F>(arch, shape));
        if training { forward.max(backward()) } else { forward }
    })
}

/// Returns the scratch as factors, which have the same size as scratch elements.
fn as_factors<F: Factor>(scratch: &mut [f32]) -> &mut [F] {
    bytemuck::cast_slice_mut(scratch)
}

#[derive(Clone, Copy)]
struct KvHead {
    sequence: usize,
    kv_head: usize,
}

/// Runs one task per key/value head of each sequence. Tasks are not grouped, since tasks of routed
/// heads take less time than tasks of shared heads.
fn for_each_task(shape: &AttentionShape, task: impl Fn(KvHead) + Sync) {
    let at = |index| KvHead { sequence: index / shape.kv_heads, kv_head: index % shape.kv_heads };
    let pairs = shape.tokens() * shape.key_length * shape.heads;
    run_tasks(shape.batch * shape.kv_heads, pairs, shape.head_dim, |index| task(at(index)));
}

/// Runs the tasks of a call, on one thread if the call is small. `pairs` is the number of pairs of a query and a key.
fn run_tasks(count: usize, pairs: usize, head_dim: usize, task: impl Fn(usize) + Sync + Send) {
    if pairs * head_dim.max(MIN_HEAD_DIM) < SMALL {
        (0..count).for_each(task);
    } else {
        (0..count).into_par_iter().with_max_len(1).for_each(task);
    }
}

/// Calls `process` with tiles of at most `lanes` selected rows, and `skip` with the rows that are not selected.
fn for_each_tile(
    args: &AttentionArgs<'_, Cpu>,
    kv_head: KvHead,
    lanes: usize,
    mut process: impl FnMut(&[Row]),
    skip: impl FnMut(Row),
) {
    let (mut tile, mut filled) = ([Row { token: 0, position: 0, head: 0 }; MAX_ROWS], 0);
    let select = |row| {
        tile[filled] = row;
        filled += 1;
        if filled == lanes {
            process(&tile[..lanes]);
            filled = 0;
        }
    };
    args.for_each_row(kv_head, select, skip);
    if filled > 0 {
        process(&tile[..filled]);
    }
}
