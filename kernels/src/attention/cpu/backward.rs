//! The backward pass: dQ of the selected rows, and the gradients of all keys and values, which a
//! task sums over its tiles in f32.

use pulp::Arch;

use super::gather::{gather_columns, gather_key_values, gather_rows};
use super::lanes::{KEYS, Lanes, padded_rows};
use super::problem::{Problem, Row};
use super::tile::{BackwardTile, Head};
use super::{for_each_task, for_each_tile, product};
use crate::attention::{AttentionShape, BackwardLens, KeyValues};
use crate::disjoint::DisjointColumns;
use crate::error::Result;
use crate::scalar::Element;
use crate::scratch::with_scratch;

/// The saved tensors and gradients that the backward pass reads.
#[derive(Clone, Copy)]
pub(crate) struct Saved<'a, T> {
    pub qkv: &'a [T],
    pub out: &'a [T],
    pub log_sum_exp: &'a [f32],
    pub d_out: &'a [T],
}

/// The backward pass with the vector instructions of `arch`.
pub(crate) fn backward<T: Element>(
    arch: Arch,
    problem: Problem<'_>,
    saved: Saved<'_, T>,
    d_qkv: &mut [T],
    delta: Option<&mut [f32]>,
) -> Result<()> {
    let shape = problem.shape;
    let AttentionShape { heads, query_stride, .. } = shape;
    shape.check_backward(&BackwardLens {
        qkv: saved.qkv.len(),
        out: saved.out.len(),
        log_sum_exp: saved.log_sum_exp.len(),
        d_out: saved.d_out.len(),
        d_qkv: d_qkv.len(),
        delta: delta.as_ref().map(|delta| delta.len()),
    })?;
    problem.check("attention_backward")?;
    if d_qkv.is_empty() {
        return Ok(());
    }
    let gradients = Gradients {
        d_qkv: DisjointColumns::new(d_qkv, query_stride),
        delta: delta.map(|delta| DisjointColumns::new(delta, heads)),
    };
    for_each_task(&shape, |sequence, kv_head| {
        backward_task(arch, &problem, saved, &gradients, (sequence, kv_head));
    });
    Ok(())
}

/// What the tasks write.
struct Gradients<'a, T> {
    d_qkv: DisjointColumns<'a, T>,
    delta: Option<DisjointColumns<'a, f32>>,
}

impl<T: Element> Gradients<'_, T> {
    /// The gradient of one head, or key/value head, of a token: numbers `column..column + len`.
    #[allow(clippy::mut_from_ref)]
    fn head(&self, token: usize, column: usize, len: usize) -> &mut [T] {
        // SAFETY: a task takes the columns of its own key/value head and of its own query heads, in
        // the tokens of its own sequence, each once.
        #[allow(unsafe_code)]
        unsafe {
            self.d_qkv.block_mut(token, column..column + len)
        }
    }

    fn set_delta(&self, row: Row, value: f32) {
        if let Some(delta) = &self.delta {
            // SAFETY: a (token, head) pair belongs to one task only; the slice ends here.
            #[allow(unsafe_code)]
            unsafe {
                delta.block_mut(row.token, row.head..row.head + 1)[0] = value;
            }
        }
    }
}

fn backward_task<T: Element>(
    arch: Arch,
    problem: &Problem<'_>,
    saved: Saved<'_, T>,
    gradients: &Gradients<'_, T>,
    task: (usize, usize),
) {
    let shape = &problem.shape;
    let AttentionShape { heads, kv_heads, head_dim, query_stride, .. } = *shape;
    let lanes = arch.dispatch(Lanes);
    let padded = head_dim.next_multiple_of(product::ROWS);
    let narrow = head_dim <= product::NARROW;
    let width = if narrow { product::NARROW } else { head_dim.next_multiple_of(lanes / 2) };
    let rows = padded_rows(shape.key_length);
    let key_values = KeyValues::Contiguous {
        keys: &saved.qkv[heads * head_dim..],
        values: &saved.qkv[(heads + kv_heads) * head_dim..],
        row_stride: query_stride,
    };
    let blocks = rows.next_multiple_of(KEYS) * lanes;
    let (columns, tile_rows, d_columns) = (head_dim * lanes, lanes * width, padded * lanes);
    let (keys, d_keys) = (rows * padded, rows * width);
    let lengths = [
        keys, keys, d_keys, d_keys, columns, columns, tile_rows, tile_rows, blocks, blocks,
        d_columns,
    ];
    with_scratch(lengths, |scratch| {
        let [keys, values, d_keys, d_values, q, d_o, q_rows, d_o_rows, p, d_p, d_q] = scratch;
        gather_key_values(shape, key_values, task, padded, [&mut *keys, &mut *values]);
        d_keys.fill(0.0);
        d_values.fill(0.0);
        let head = Head { keys, values, head_dim, padded };
        let scale = problem.scale();
        let take = |tile: &[Row]| {
            let (queries, outputs) = ((query_stride, head_dim), (heads * head_dim, head_dim));
            let base2 = scale * std::f32::consts::LOG2_E;
            gather_columns(saved.qkv, queries, tile, base2, lanes, q);
            gather_columns(saved.d_out, outputs, tile, 1.0, lanes, d_o);
            gather_rows(saved.qkv, queries, tile, scale, width, q_rows);
            gather_rows(saved.d_out, outputs, tile, 1.0, width, d_o_rows);
            let delta = arch.dispatch(BackwardTile {
                problem,
                head,
                tile,
                log_sum_exp: saved.log_sum_exp,
                q,
                d_o,
                q_rows,
                d_o_rows,
                width,
                p,
                d_p,
                d_q,
                d_keys,
                d_values,
            });
            for (lane, &row) in tile.iter().enumerate() {
                gradients.set_delta(row, delta[lane]);
                let slots = gradients.head(row.token, row.head * head_dim, head_dim);
                for (slot, d_q) in slots.iter_mut().zip(d_q.chunks_exact(lanes)) {
                    *slot = T::from_f32(d_q[lane] * scale);
                }
            }
        };
        for_each_tile(problem, task, lanes, take, |row| {
            gradients.set_delta(row, 0.0);
            gradients.head(row.token, row.head * head_dim, head_dim).fill(T::zeroed());
        });
        let first = task.0 * shape.query_length;
        for (column, gradient) in [(heads, &*d_keys), (heads + kv_heads, &*d_values)] {
            let column = (column + task.1) * head_dim;
            let rows = gradient.chunks_exact(width).take(shape.key_length);
            for (token, row) in (first..).zip(rows) {
                let slots = gradients.head(token, column, head_dim);
                for (slot, &value) in slots.iter_mut().zip(row) {
                    *slot = T::from_f32(value);
                }
            }
        }
    });
}
