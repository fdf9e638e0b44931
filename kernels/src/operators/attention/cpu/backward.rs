//! The backward pass: dQ of the selected rows, and the gradients of all keys and values. Each
//! task sums the latter over its tiles in f32.

use pulp::Arch;

use super::factor::{Factor, NARROW};
use super::gather::{
    HeadRows, gather_along_rows, gather_columns, gather_rows, scatter_columns, tile_rows,
};
use super::lanes::{KEYS, MAX_ROWS, NumLanes, padded_rows};
use super::matmul::ROWS;
use super::rows::Row;
use super::tile::{BackwardTile, Head};
use super::{KvHead, as_factors, for_each_task, for_each_tile, with_factors};
use crate::attention::{AttentionArgs, AttentionBackward, AttentionShape, KeyValues};
use crate::disjoint::DisjointColumns;
use crate::scratch::with_scratch;
use crate::{Cpu, Element, Result};

#[derive(Clone, Copy)]
struct Saved<'a, T> {
    qkv: &'a [T],
    log_sum_exp: &'a [f32],
    d_out: &'a [T],
}

/// Runs the backward pass with the vector instructions of `arch`.
pub(super) fn backward<T: Element>(
    arch: Arch,
    backward: AttentionBackward<'_, Cpu, T>,
) -> Result<()> {
    with_factors!(F, T, arch, backward_by::<T, F>(arch, backward))
}

fn backward_by<T: Element, F: Factor>(
    arch: Arch,
    backward: AttentionBackward<'_, Cpu, T>,
) -> Result<()> {
    backward.check()?;
    let AttentionBackward { args, qkv, log_sum_exp, d_out, d_qkv, delta, .. } = backward;
    let shape = args.shape;
    let AttentionShape { heads, query_stride, .. } = shape;
    args.check_visible("attention_backward")?;
    let saved = Saved { qkv, log_sum_exp, d_out };
    if d_qkv.is_empty() {
        return Ok(());
    }
    let gradients = Gradients {
        d_qkv: DisjointColumns::new(d_qkv, query_stride),
        delta: delta.map(|delta| DisjointColumns::new(delta, heads)),
    };
    for_each_task(&shape, |kv_head| {
        backward_task::<T, F>(arch, &args, saved, &gradients, kv_head);
    });
    Ok(())
}

/// The outputs of the tasks.
struct Gradients<'a, T> {
    d_qkv: DisjointColumns<'a, T>,
    delta: Option<DisjointColumns<'a, f32>>,
}

impl<T: Element> Gradients<'_, T> {
    /// Returns the gradient of one head, or key/value head, of a token: elements `column..column + len`.
    #[allow(clippy::mut_from_ref)]
    fn head(&self, token: usize, column: usize, len: usize) -> &mut [T] {
        // SAFETY: a task accesses the columns of its own key/value head and of its own query heads,
        // in the tokens of its own sequence, each once.
        #[allow(unsafe_code)]
        unsafe {
            self.d_qkv.block_mut(token, column..column + len)
        }
    }

    /// Writes the gradients of a key/value head for all tokens of a sequence: rows of `width`
    /// elements times `scale`. A row contains `heads` before the key/value heads.
    fn set_sequence(
        &self,
        shape: &AttentionShape,
        KvHead { sequence, kv_head }: KvHead,
        heads: usize,
        gradients: &[f32],
        width: usize,
        scale: f32,
    ) {
        let rows = gradients.chunks_exact(width).take(shape.key_length);
        for (token, row) in (sequence * shape.query_length..).zip(rows) {
            let slots = self.head(token, (heads + kv_head) * shape.head_dim, shape.head_dim);
            for (slot, &value) in slots.iter_mut().zip(row) {
                *slot = T::from_f32(value * scale);
            }
        }
    }

    fn set_delta(&self, row: Row, value: f32) {
        if let Some(delta) = &self.delta {
            // SAFETY: a (token, head) pair belongs to only one task. The slice ends here.
            #[allow(unsafe_code)]
            unsafe {
                delta.block_mut(row.token, row.head..row.head + 1)[0] = value;
            }
        }
    }
}

/// Returns the number of columns in a row of gradients.
fn width(head_dim: usize, lanes: usize) -> usize {
    if head_dim <= NARROW { NARROW } else { head_dim.next_multiple_of(lanes / 2) }
}

pub(super) fn scratch<F: Factor>(arch: Arch, shape: &AttentionShape) -> [usize; 16] {
    let head_dim = shape.head_dim;
    let lanes = arch.dispatch(NumLanes);
    let padded = head_dim.next_multiple_of(ROWS);
    let width = width(head_dim, lanes);
    let rows = padded_rows::<F>(shape.key_length);
    let blocks = rows.next_multiple_of(KEYS) * lanes;
    let factors = |count: usize| count / F::TERMS;
    let (keys, columns, tile) = (rows * padded, padded * lanes, lanes * width);
    // If a factor has one term, both layouts of the keys are the same.
    let transposed = if F::TERMS == 1 { 0 } else { factors(keys) };
    let block = factors(KEYS * lanes);
    [
        factors(keys),
        transposed,
        factors(keys),
        factors(columns),
        factors(columns),
        factors(tile),
        factors(tile),
        block,
        block,
        block,
        blocks,
        blocks,
        padded * lanes,
        padded * lanes,
        rows * width,
        rows * width,
    ]
}

fn backward_task<T: Element, F: Factor>(
    arch: Arch,
    args: &AttentionArgs<'_, Cpu>,
    saved: Saved<'_, T>,
    gradients: &Gradients<'_, T>,
    kv_head: KvHead,
) {
    let shape = &args.shape;
    let AttentionShape { heads, kv_heads, head_dim, query_stride, .. } = *shape;
    let lanes = arch.dispatch(NumLanes);
    let padded = head_dim.next_multiple_of(ROWS);
    let width = width(head_dim, lanes);
    with_scratch(self::scratch::<F>(arch, shape), |scratch| {
        let [operands @ .., p, d_p, d_q, transposed, d_keys, d_values] = scratch;
        let [keys, keys_along_rows, values, q, d_o, q_rows, d_o_rows, p_rows, d_s_keys, d_s_rows] =
            operands.map(as_factors::<F>);
        let key_values = KeyValues::Contiguous {
            keys: &saved.qkv[heads * head_dim..],
            values: &saved.qkv[(heads + kv_heads) * head_dim..],
            row_stride: query_stride,
        };
        let (source, key_length) = (HeadRows::new(*shape, key_values, kv_head), shape.key_length);
        gather_rows(key_length, |position| source.key(position), padded, keys);
        gather_rows(key_length, |position| source.value(position), padded, values);
        let (keys, keys_along_rows) = if F::TERMS == 1 {
            (&*keys, &*keys)
        } else {
            gather_along_rows(key_length, |position| source.key(position), padded, keys_along_rows);
            (&*keys, &*keys_along_rows)
        };
        d_keys.fill(0.0);
        d_values.fill(0.0);
        let scale = args.scale();
        let process = |tile: &[Row]| {
            let queries = tile_rows(saved.qkv, query_stride, head_dim, tile);
            let outputs = tile_rows(saved.d_out, heads * head_dim, head_dim, tile);
            let rows = &mut as_factors(transposed)[..q.len()];
            gather_columns(tile.len(), &queries, lanes, rows, q);
            gather_columns(tile.len(), &outputs, lanes, rows, d_o);
            gather_along_rows(tile.len(), &queries, width, q_rows);
            gather_along_rows(tile.len(), &outputs, width, d_o_rows);
            let work = BackwardTile {
                args,
                head: Head { padded },
                keys,
                keys_along_rows,
                values,
                tile,
                log_sum_exp: saved.log_sum_exp,
                q,
                d_o,
                q_rows,
                d_o_rows,
                width,
                p,
                d_p,
                factors: [&mut *p_rows, &mut *d_s_keys, &mut *d_s_rows],
                d_q,
                d_keys,
                d_values,
            };
            let delta = F::dispatch(arch, work);
            let rows = tile.iter().zip(delta).map(|(&row, delta)| {
                gradients.set_delta(row, delta);
                gradients.head(row.token, row.head * head_dim, head_dim)
            });
            scatter_columns(d_q, &[scale; MAX_ROWS][..lanes], transposed, rows);
        };
        for_each_tile(args, kv_head, lanes, process, |row| {
            gradients.set_delta(row, 0.0);
            gradients.head(row.token, row.head * head_dim, head_dim).fill(T::zeroed());
        });
        gradients.set_sequence(shape, kv_head, heads, d_keys, width, scale);
        gradients.set_sequence(shape, kv_head, heads + kv_heads, d_values, width, 1.0);
    });
}
