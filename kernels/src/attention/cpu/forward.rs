//! The forward pass.

use pulp::Arch;

use super::gather::{gather_columns, gather_key_values};
use super::lanes::{KEYS, Lanes, padded_rows};
use super::problem::{Problem, Row, check_key_values};
use super::tile::{ForwardTile, Head};
use super::{for_each_task, for_each_tile, product};
use crate::attention::KeyValues;
use crate::cpu::Cpu;
use crate::disjoint::DisjointColumns;
use crate::error::Result;
use crate::scalar::Element;
use crate::scratch::with_scratch;

/// The forward pass with the vector instructions of `arch`.
pub(crate) fn forward<T: Element>(
    arch: Arch,
    problem: Problem<'_>,
    queries: &[T],
    key_values: KeyValues<'_, Cpu, T>,
    out: &mut [T],
    log_sum_exp: &mut [f32],
) -> Result<()> {
    const OPERATOR: &str = "attention_forward";
    let shape = problem.shape;
    shape.check(OPERATOR, out.len(), log_sum_exp.len())?;
    problem.check(OPERATOR)?;
    check_key_values(OPERATOR, &shape, key_values)?;
    shape.check_queries(OPERATOR, queries.len())?;
    if out.is_empty() {
        return Ok(());
    }
    let outputs = Outputs {
        out: DisjointColumns::new(out, shape.heads * shape.head_dim),
        log_sum_exp: DisjointColumns::new(log_sum_exp, shape.heads),
    };
    for_each_task(&shape, |sequence, kv_head| {
        forward_task(arch, &problem, queries, key_values, &outputs, (sequence, kv_head));
    });
    Ok(())
}

/// What the tasks write.
struct Outputs<'a, T> {
    out: DisjointColumns<'a, T>,
    log_sum_exp: DisjointColumns<'a, f32>,
}

impl<T: Element> Outputs<'_, T> {
    /// A row's output and log-sum-exp.
    #[allow(clippy::mut_from_ref)]
    fn row(&self, row: Row, head_dim: usize) -> (&mut [T], &mut f32) {
        let columns = row.head * head_dim..(row.head + 1) * head_dim;
        // SAFETY: a (token, head) pair belongs to one task only, which takes a row once.
        #[allow(unsafe_code)]
        unsafe {
            let log_sum_exp = self.log_sum_exp.block_mut(row.token, row.head..row.head + 1);
            (self.out.block_mut(row.token, columns), &mut log_sum_exp[0])
        }
    }
}

fn forward_task<T: Element>(
    arch: Arch,
    problem: &Problem<'_>,
    queries: &[T],
    key_values: KeyValues<'_, Cpu, T>,
    outputs: &Outputs<'_, T>,
    task: (usize, usize),
) {
    let shape = &problem.shape;
    let (head_dim, lanes) = (shape.head_dim, arch.dispatch(Lanes));
    let padded = head_dim.next_multiple_of(product::ROWS);
    let keys = padded_rows(shape.key_length) * padded;
    let lengths = [keys, keys, head_dim * lanes, KEYS * lanes, padded * lanes];
    let scale = problem.scale() * std::f32::consts::LOG2_E;
    with_scratch(lengths, |[keys, values, q, scores, o]| {
        gather_key_values(shape, key_values, task, padded, [&mut *keys, &mut *values]);
        let head = Head { keys, values, head_dim, padded };
        let take = |tile: &[Row]| {
            gather_columns(queries, (shape.query_stride, head_dim), tile, scale, lanes, q);
            let (scores, out) = (&mut *scores, &mut *o);
            let work = ForwardTile { problem, head, tile, q, scores, o: out };
            let softmax = arch.dispatch(work);
            for (lane, &row) in tile.iter().enumerate() {
                let (out, log_sum_exp) = outputs.row(row, head_dim);
                let (maximum, sum) = (softmax.maximum[lane], softmax.sum[lane]);
                *log_sum_exp = maximum * std::f32::consts::LN_2 + sum.ln();
                let factor = problem.weight(row) / sum;
                for (slot, o) in out.iter_mut().zip(o.chunks_exact(lanes)) {
                    *slot = T::from_f32(o[lane] * factor);
                }
            }
        };
        for_each_tile(problem, task, lanes, take, |row| {
            let (out, log_sum_exp) = outputs.row(row, head_dim);
            out.fill(T::zeroed());
            *log_sum_exp = 0.0;
        });
    });
}
