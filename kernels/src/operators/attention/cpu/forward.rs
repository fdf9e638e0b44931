//! The forward pass.

use pulp::Arch;

use super::factor::Factor;
use super::gather::{
    HeadRows, gather_along_rows, gather_columns, gather_rows, scatter_columns, tile_rows,
};
use super::lanes::{KEYS, MAX_ROWS, NumLanes, padded_rows};
use super::matmul::ROWS;
use super::rows::{Row, blocks};
use super::tile::{ForwardTile, Head};
use super::{KvHead, as_factors, for_each_task, for_each_tile, token, with_factors};
use crate::attention::{AttentionArgs, AttentionForward, AttentionShape, KeyValues};
use crate::disjoint::DisjointColumns;
use crate::scratch::with_scratch;
use crate::{Cpu, Element, Result};

/// Runs the forward pass with the vector instructions of `arch`.
pub(super) fn forward<T: Element>(arch: Arch, forward: AttentionForward<'_, Cpu, T>) -> Result<()> {
    with_factors!(F, T, arch, forward_by::<T, F>(arch, forward))
}

fn forward_by<T: Element, F: Factor>(
    arch: Arch,
    forward: AttentionForward<'_, Cpu, T>,
) -> Result<()> {
    forward.check(blocks(forward.key_values))?;
    let AttentionForward { args, queries, key_values, out, log_sum_exp } = forward;
    let shape = args.shape;
    args.check_visible("attention_forward")?;
    if out.is_empty() {
        return Ok(());
    }
    let outputs = Outputs::new(out, log_sum_exp, &shape);
    if shape.query_length == 1 {
        for_each_task(&shape, |kv_head| {
            token::forward_task(arch, &args, queries, key_values, &outputs, kv_head);
        });
        return Ok(());
    }
    for_each_task(&shape, |kv_head| {
        forward_task::<T, F>(arch, &args, queries, key_values, &outputs, kv_head);
    });
    Ok(())
}

pub(super) struct Outputs<'a, T> {
    out: DisjointColumns<'a, T>,
    log_sum_exp: DisjointColumns<'a, f32>,
}

impl<'a, T: Element> Outputs<'a, T> {
    /// Creates the outputs from `out`, `[N, H D]`, and `log_sum_exp`, `[N, H]`.
    pub(super) fn new(
        out: &'a mut [T],
        log_sum_exp: &'a mut [f32],
        shape: &AttentionShape,
    ) -> Self {
        Outputs {
            out: DisjointColumns::new(out, shape.heads * shape.head_dim),
            log_sum_exp: DisjointColumns::new(log_sum_exp, shape.heads),
        }
    }

    /// Returns a row's output and log-sum-exp.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn row(&self, row: Row, head_dim: usize) -> (&mut [T], &mut f32) {
        let columns = row.head * head_dim..(row.head + 1) * head_dim;
        // SAFETY: a (token, head) pair belongs to only one task, which accesses a row once.
        #[allow(unsafe_code)]
        unsafe {
            let log_sum_exp = self.log_sum_exp.block_mut(row.token, row.head..row.head + 1);
            (self.out.block_mut(row.token, columns), &mut log_sum_exp[0])
        }
    }

    /// Writes zeros for a row that is not selected.
    pub(super) fn skip(&self, row: Row, head_dim: usize) {
        let (out, log_sum_exp) = self.row(row, head_dim);
        out.fill(T::zeroed());
        *log_sum_exp = 0.0;
    }
}

pub(super) fn scratch<F: Factor>(arch: Arch, shape: &AttentionShape) -> [usize; 7] {
    let lanes = arch.dispatch(NumLanes);
    let padded = shape.head_dim.next_multiple_of(ROWS);
    let (rows, block) = (padded_rows::<F>(shape.key_length), KEYS * lanes);
    let factors = |count: usize| count / F::TERMS;
    [
        factors(rows * padded),
        factors(rows * padded),
        factors(padded * lanes),
        block,
        factors(block),
        padded * lanes,
        padded * lanes,
    ]
}

pub(super) fn forward_task<T: Element, F: Factor>(
    arch: Arch,
    args: &AttentionArgs<'_, Cpu>,
    queries: &[T],
    key_values: KeyValues<'_, Cpu, T>,
    outputs: &Outputs<'_, T>,
    kv_head: KvHead,
) {
    let shape = &args.shape;
    let (head_dim, lanes) = (shape.head_dim, arch.dispatch(NumLanes));
    let padded = head_dim.next_multiple_of(ROWS);
    with_scratch(scratch::<F>(arch, shape), |[keys, values, q, scores, factors, o, transposed]| {
        let [keys, values, q, factors] = [keys, values, q, factors].map(as_factors::<F>);
        let source = HeadRows::new(*shape, key_values, kv_head);
        gather_rows(shape.key_length, |position| source.key(position), padded, keys);
        gather_along_rows(shape.key_length, |position| source.value(position), padded, values);
        let head = Head { padded };
        let process = |tile: &[Row]| {
            let row = tile_rows(queries, shape.query_stride, head_dim, tile);
            gather_columns(tile.len(), row, lanes, &mut as_factors(transposed)[..q.len()], q);
            let (scores, factors, o) = (&mut *scores, &mut *factors, &mut *o);
            let work = ForwardTile { args, head, keys, values, tile, q, scores, factors, o };
            let softmax = F::dispatch(arch, work);
            let mut output_scales = [0f32; MAX_ROWS];
            for (lane, &row) in tile.iter().enumerate() {
                output_scales[lane] = args.weight(row) / softmax.sum[lane];
            }
            let rows = tile.iter().enumerate().map(|(lane, &row)| {
                let (out, log_sum_exp) = outputs.row(row, head_dim);
                let (maximum, sum) = (softmax.maximum[lane], softmax.sum[lane]);
                *log_sum_exp = maximum * std::f32::consts::LN_2 + sum.ln();
                out
            });
            scatter_columns(o, &output_scales[..lanes], transposed, rows);
        };
        for_each_tile(args, kv_head, lanes, process, |row| outputs.skip(row, head_dim));
    });
}
