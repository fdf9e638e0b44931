//! The routers by norms of queries on a CPU: the passes over the tokens. `scores.rs` has the formulas.

mod scores;

use std::ops::Range;

use rayon::prelude::*;

use self::scores::{SHARED, Scores, is_shared};
use super::{
    QueryNorm, QueryNormBackward, QueryNormForward, QueryNormRouter, begin, check_backward,
};
use crate::compiled::compiled;
use crate::math::sum_of_squares;
use crate::rope::{Rope, RopeArgs};
use crate::router::cpu::load;
use crate::router::{RouterGradient, RouterRanks, Routers, Routing, exchange};
use crate::simd::vectorized;
use crate::{Cpu, Element, QkvShape, Result, check_len};

/// Tokens of one task.
const ROWS: usize = 64;

impl QueryNorm for Cpu {
    fn query_norm_forward<T: Element>(&self, args: QueryNormForward<'_, Self, T>) -> Result<()> {
        const OPERATOR: &str = "query_norm_forward";
        let QueryNormForward { router, shape, qkv, rope, routing, all_reduce } = args;
        let (tokens, heads) = (shape.tokens(), routing.heads());
        let columns = begin(OPERATOR, router, shape, qkv.len(), routing)?;
        let all_reduce = exchange(OPERATOR, heads, all_reduce)?;
        if columns > 0 {
            compiled!(measure::<T>(shape: &QkvShape, qkv: &[T], routing: &mut Routing<Cpu>) -> ());
            if let Some(all_reduce) = all_reduce {
                all_reduce(&mut routing.saved[..tokens * columns])?;
            }
            choose(routing, &Scores::new(router, routing.heads()));
            self.complete_routing(routing)?;
        }
        rope.map_or(Ok(()), |table| self.rope_forward(RopeArgs { shape, table, qkv }))
    }

    fn query_norm_backward<T: Element>(&self, args: QueryNormBackward<'_, Self, T>) -> Result<()> {
        let QueryNormBackward { router, shape, qkv, d_qkv, rope, gradient } = args;
        // A rotation preserves norms, so the router's gradient may be added in rotated coordinates.
        compiled!(backward::<T>(
            router: QueryNormRouter, shape: &QkvShape, qkv: &[T], d_qkv: &mut [T], gradient: RouterGradient<'_, Cpu>
        ))?;
        rope.map_or(Ok(()), |table| self.rope_backward(RopeArgs { shape, table, qkv: d_qkv }))
    }
}

/// Returns the range of the local queries that have a column in a token's row.
fn local_queries(routing: &Routing<Cpu>, shape: &QkvShape) -> Range<usize> {
    routing.local_leading() * shape.head_dim..shape.heads * shape.head_dim
}

/// Writes the squared norms of the local queries, and zeros for other heads.
fn measure<T: Element>(shape: &QkvShape, qkv: &[T], routing: &mut Routing<Cpu>) {
    let (columns, queries) = (routing.columns(), local_queries(routing, shape));
    let (local, shared) = (routing.local_columns(), routing.shared());
    let norms = &mut routing.saved[..shape.tokens() * columns];
    let parts = qkv.par_chunks(ROWS * shape.row()).zip(norms.par_chunks_mut(ROWS * columns));
    parts.for_each(|(qkv, squares)| {
        let rows = qkv.chunks_exact(shape.row()).zip(squares.chunks_exact_mut(columns));
        vectorized!({
            for (row, squares) in rows {
                if local.len() < columns {
                    squares.fill(0.0);
                }
                let heads = row[queries.clone()].chunks_exact(shape.head_dim);
                for (&column, query) in local.iter().zip(heads) {
                    squares[column] = match shared.contains(shared.leading() + column) {
                        true => SHARED,
                        false => sum_of_squares::<8, _>(query),
                    };
                }
            }
        });
    });
}

/// Selects heads, replaces squares by norms, and writes the gates.
fn choose(routing: &mut Routing<Cpu>, scores: &Scores) {
    let (columns, tokens) = (routing.columns(), routing.tokens());
    let (norms, inv_std) = routing.saved[..tokens * (columns + 1)].split_at_mut(tokens * columns);
    (
        norms.par_chunks_mut(ROWS * columns),
        routing.gates[..tokens * columns].par_chunks_mut(ROWS * columns),
        routing.selected[..tokens * columns].par_chunks_mut(ROWS * columns),
        inv_std.par_chunks_mut(ROWS),
    )
        .into_par_iter()
        .for_each(|(norms, gates, selected, inv_std)| {
            let rows = norms
                .chunks_exact_mut(columns)
                .zip(gates.chunks_exact_mut(columns))
                .zip(selected.chunks_exact_mut(columns))
                .zip(inv_std);
            vectorized!({
                for (((norms, gates), selected), inv_std) in rows {
                    scores.route(norms, gates, selected, inv_std);
                }
            });
        });
}

fn backward<T: Element>(
    router: QueryNormRouter,
    shape: &QkvShape,
    qkv: &[T],
    d_qkv: &mut [T],
    gradient: RouterGradient<'_, Cpu>,
) -> Result<()> {
    const OPERATOR: &str = "query_norm_backward";
    check_backward(OPERATOR, router, shape, [qkv.len(), d_qkv.len()], &gradient)?;
    let RouterGradient { routing, delta, balance_weight, ranks } = gradient;
    let (tokens, columns) = (shape.tokens(), routing.columns());
    let ranks = delta.map_or(Ok(None), |_| exchange(OPERATOR, routing.heads(), ranks))?;
    if columns == 0 {
        return Ok(());
    }
    let layer = Layer::new(router, routing, shape.head_dim);
    let weights = match (delta, ranks) {
        (None, _) => Weights::Constant,
        (Some(delta), None) => Weights::Local(delta),
        (Some(delta), Some(RouterRanks { table, all_reduce })) => {
            check_len(OPERATOR, "table", table.len(), tokens * columns)?;
            layer.spread(delta, table);
            all_reduce(&mut *table)?;
            Weights::All(table)
        }
    };
    let share = |share: f64| (f64::from(balance_weight) * share / tokens as f64) as f32;
    let balance: Vec<f32> = load(routing).map(share).collect();
    let queries = local_queries(routing, shape);
    (qkv.par_chunks(ROWS * shape.row()), d_qkv.par_chunks_mut(ROWS * shape.row()))
        .into_par_iter()
        .enumerate()
        .for_each(|(part, (qkv, d_qkv))| {
            let mut d_norms = vec![0f32; columns];
            let rows = qkv.chunks_exact(shape.row()).zip(d_qkv.chunks_exact_mut(shape.row()));
            vectorized!({
                for ((row, d_row), token) in rows.zip(part * ROWS..) {
                    d_norms.copy_from_slice(&balance);
                    weights.add(&layer, token, &mut d_norms);
                    let (row, d_row) = (&row[queries.clone()], &mut d_row[queries.clone()]);
                    layer.norms_backward(token, &mut d_norms, row, d_row);
                }
            });
        });
    Ok(())
}

/// A layer's results of the forward pass.
struct Layer<'a> {
    columns: usize,
    /// Local heads, and the number of local heads without a column.
    heads: usize,
    local_leading: usize,
    head_dim: usize,
    /// Columns of local heads.
    local: Vec<usize>,
    selected: &'a [u8],
    gates: &'a [f32],
    scores: Scores,
    /// `[tokens, columns]`, and 1 / std, `[tokens]`. They are f64, because the gradient
    /// divides differences of norms by their deviation, which may be small.
    norms: &'a [f64],
    inv_std: &'a [f64],
}

impl<'a> Layer<'a> {
    fn new(router: QueryNormRouter, routing: &'a Routing<Cpu>, head_dim: usize) -> Self {
        let (tokens, columns) = (routing.tokens(), routing.columns());
        let scores = Scores::new(router, routing.heads());
        let saved = &routing.saved[..tokens * (columns + 1)];
        let (norms, inv_std) = saved.split_at(tokens * columns);
        Layer {
            columns,
            heads: routing.heads().local(),
            local_leading: routing.local_leading(),
            head_dim,
            local: routing.local_columns(),
            selected: routing.selected(),
            gates: routing.gates(),
            scores,
            norms,
            inv_std,
        }
    }

    /// Writes the gradients of the selected local heads to the table, and zeros for other heads.
    fn spread(&self, delta: &[f32], table: &mut [f64]) {
        let selected = self.selected.par_chunks(self.columns);
        let rows =
            table.par_chunks_mut(self.columns).zip(delta.par_chunks(self.heads)).zip(selected);
        rows.for_each(|((row, delta), selected)| {
            row.fill(0.0);
            for (&column, &delta) in self.local.iter().zip(&delta[self.local_leading..]) {
                row[column] = f64::from(delta) * f64::from(selected[column]);
            }
        });
    }

    /// Adds the gradients of a token's local queries, from the gradients of its gates.
    #[inline(always)]
    fn norms_backward<T: Element>(
        &self,
        token: usize,
        gradient: &mut [f32],
        queries: &[T],
        d_queries: &mut [T],
    ) {
        let table = token * self.columns..(token + 1) * self.columns;
        let (gates, norms) = (&self.gates[table.clone()], &self.norms[table]);
        self.scores.gates_to_norms(gates, norms, self.inv_std[token], gradient);
        let heads =
            queries.chunks_exact(self.head_dim).zip(d_queries.chunks_exact_mut(self.head_dim));
        for (&column, (query, d_query)) in self.local.iter().zip(heads) {
            let norm = norms[column];
            if norm == 0.0 || is_shared(norm) {
                continue;
            }
            let factor = gradient[column] / norm as f32;
            for (d_query, query) in d_query.iter_mut().zip(query) {
                *d_query = T::from_f32(d_query.to_f32() + factor * query.to_f32());
            }
        }
    }
}

/// The gradients of the heads' weights.
#[derive(Clone, Copy)]
enum Weights<'a> {
    /// No gradients: the selection is a constant.
    Constant,
    /// `[tokens, heads]`, if all heads are local.
    Local(&'a [f32]),
    /// `[tokens, columns]`, of all ranks' heads.
    All(&'a [f64]),
}

impl Weights<'_> {
    /// Adds the gradients of a token's selected heads.
    #[inline(always)]
    fn add(self, layer: &Layer<'_>, token: usize, gradient: &mut [f32]) {
        let table = token * layer.columns..(token + 1) * layer.columns;
        match self {
            Weights::Constant => {}
            Weights::Local(delta) => {
                let delta = &delta[token * layer.heads + layer.local_leading..];
                let selected = &layer.selected[table];
                for ((slot, &delta), &selected) in gradient.iter_mut().zip(delta).zip(selected) {
                    *slot += delta * f32::from(selected);
                }
            }
            Weights::All(deltas) => {
                for (slot, &delta) in gradient.iter_mut().zip(&deltas[table]) {
                    *slot += delta as f32;
                }
            }
        }
    }
}
