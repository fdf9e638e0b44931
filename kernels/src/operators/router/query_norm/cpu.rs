//! The CPU body of the query-norm router.

use std::ops::Range;

use rayon::prelude::*;

use super::{
    BackwardLens, QueryNorm, QueryNormBackward, QueryNormForward, QueryNormRopeBackward,
    QueryNormRopeForward, QueryNormRouter, begin, check_backward,
};
use crate::cpu::Cpu;
use crate::error::{Result, check_len};
use crate::math::sum_of_squares;
use crate::rope::{QkvShape, Rope};
use crate::router::cpu::load;
use crate::router::{RouterGradient, RouterRanks, Routers, Routing, exchange};
use crate::scalar::Element;
use crate::simd::vectorized;

/// Tokens of one task.
const ROWS: usize = 64;
/// The square and the norm of a shared head.
const SHARED: f64 = -1.0;

impl QueryNorm for Cpu {
    fn query_norm_forward<T: Element>(
        &self,
        router: QueryNormRouter,
        args: QueryNormForward<'_, Self, T>,
    ) -> Result<()> {
        const OPERATOR: &str = "query_norm_forward";
        let QueryNormForward { shape, qkv, routing, all_reduce } = args;
        let (tokens, heads) = (shape.tokens(), routing.heads());
        let columns = begin(OPERATOR, router, shape, qkv.len(), routing)?;
        let all_reduce = exchange(OPERATOR, heads, all_reduce)?;
        if columns == 0 {
            return Ok(());
        }
        measure(shape, qkv, routing);
        if let Some(all_reduce) = all_reduce {
            all_reduce(&mut routing.saved[..tokens * columns])?;
        }
        choose(routing, router.top_k);
        self.complete_routing(routing)
    }

    fn query_norm_rope_forward<T: Element>(
        &self,
        router: QueryNormRouter,
        args: QueryNormRopeForward<'_, Self, T>,
    ) -> Result<()> {
        let QueryNormRopeForward { rope, routing, all_reduce } = args;
        let (shape, qkv) = (rope.shape, &*rope.qkv);
        let route = QueryNormForward { shape, qkv, routing, all_reduce };
        self.query_norm_forward(router, route)?;
        self.rope_forward(rope)
    }

    fn query_norm_backward<T: Element>(&self, args: QueryNormBackward<'_, Self, T>) -> Result<()> {
        backward(args.shape, args.qkv, args.d_qkv, args.gradient)
    }

    fn query_norm_rope_backward<T: Element>(
        &self,
        args: QueryNormRopeBackward<'_, Self, T>,
    ) -> Result<()> {
        let QueryNormRopeBackward { qkv, gradient, rope } = args;
        // A rotation preserves norms, so the router's gradient may be added in rotated coordinates.
        backward(rope.shape, qkv, &mut *rope.qkv, gradient)?;
        self.rope_backward(rope)
    }
}

/// Norms of a routing, `[tokens, columns]`, and 1 / std of each token's norms, 0 if they are all
/// equal. They are f64, because the gradient divides differences of norms by their deviation, which
/// may be small.
fn saved(routing: &Routing<Cpu>) -> (&[f64], &[f64]) {
    let (tokens, columns) = (routing.tokens(), routing.columns());
    routing.saved[..tokens * (columns + 1)].split_at(tokens * columns)
}

/// The range of the local queries that have a column in a token's row.
fn local_queries(routing: &Routing<Cpu>, shape: &QkvShape) -> Range<usize> {
    routing.local_leading() * shape.head_dim..shape.heads * shape.head_dim
}

/// Writes the squared norms of the local queries, and zeros for the others.
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
fn choose(routing: &mut Routing<Cpu>, top_k: usize) {
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
                    select(norms, top_k, selected);
                    *inv_std = score(norms, gates);
                }
            });
        });
}

/// Whether a square or a norm is that of a shared head.
#[inline(always)]
fn is_shared(norm: f64) -> bool {
    norm < 0.0
}

/// The norms of routed heads.
#[inline(always)]
fn routed(norms: &[f64]) -> impl Iterator<Item = f64> {
    norms.iter().copied().filter(|&norm| !is_shared(norm))
}

/// Marks shared heads and the `top_k` largest squares of the others; among equals, lower heads
/// first.
#[inline(always)]
fn select(squares: &[f64], top_k: usize, selected: &mut [u8]) {
    for (head, mark) in selected.iter_mut().enumerate() {
        let square = squares[head];
        let ahead = squares
            .iter()
            .enumerate()
            .filter(|&(other, &s)| s > square || (s == square && other < head))
            .count();
        *mark = u8::from(is_shared(square) || ahead < top_k);
    }
}

/// Replaces a token's squares by norms and writes its gates; returns 1 / std, or 0 if all norms are
/// equal. The first head with a column is routed.
#[inline(always)]
fn score(norms: &mut [f64], gates: &mut [f32]) -> f64 {
    for norm in norms.iter_mut() {
        *norm = if is_shared(*norm) { SHARED } else { norm.sqrt() };
    }
    let count = routed(norms).count() as f64;
    let mean = routed(norms).sum::<f64>() / count;
    let variance = routed(norms).map(|norm| (norm - mean).powi(2)).sum::<f64>() / (count - 1.0);
    // The mean of equal norms may differ from them by a rounding, so equality is tested explicitly.
    let equal = routed(norms).all(|norm| norm == norms[0]);
    let inv_std = if equal { 0.0 } else { variance.sqrt().recip() };
    let largest = norms.iter().fold(0f64, |largest, &norm| largest.max(norm));
    let mut sum = 0f64;
    for (gate, &norm) in gates.iter_mut().zip(norms.iter()) {
        let exponential = if is_shared(norm) { 0.0 } else { ((norm - largest) * inv_std).exp() };
        *gate = exponential as f32;
        sum += exponential;
    }
    for gate in gates {
        *gate = (f64::from(*gate) / sum) as f32;
    }
    inv_std
}

/// Adds the router's gradient to the gradient of the queries.
fn backward<T: Element>(
    shape: &QkvShape,
    qkv: &[T],
    d_qkv: &mut [T],
    gradient: RouterGradient<'_, Cpu>,
) -> Result<()> {
    const OPERATOR: &str = "query_norm_backward";
    let RouterGradient { routing, delta, balance_weight, ranks } = gradient;
    let (tokens, columns) = (shape.tokens(), routing.columns());
    let lens = BackwardLens { qkv: qkv.len(), d_qkv: d_qkv.len(), delta: delta.map(<[f32]>::len) };
    check_backward(OPERATOR, shape, &lens, routing)?;
    let ranks = delta.map_or(Ok(None), |_| exchange(OPERATOR, routing.heads(), ranks))?;
    if columns == 0 {
        return Ok(());
    }
    let layer = Layer::new(routing, shape.head_dim);
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
    /// Local heads, and those without a column among them.
    heads: usize,
    local_leading: usize,
    head_dim: usize,
    /// Columns of local heads.
    local: Vec<usize>,
    selected: &'a [u8],
    gates: &'a [f32],
    norms: &'a [f64],
    inv_std: &'a [f64],
}

impl<'a> Layer<'a> {
    fn new(routing: &'a Routing<Cpu>, head_dim: usize) -> Self {
        let (norms, inv_std) = saved(routing);
        Layer {
            columns: routing.columns(),
            heads: routing.heads().local(),
            local_leading: routing.local_leading(),
            head_dim,
            local: routing.local_columns(),
            selected: routing.selected(),
            gates: routing.gates(),
            norms,
            inv_std,
        }
    }

    /// Writes the gradients of the selected local heads to the table, and zeros for the others.
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
        gates_to_norms(gates, norms, self.inv_std[token], gradient);
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
    /// None: the selection is a constant.
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

/// Replaces the gradient of a token's gates by the gradient of its norms, 0 for shared heads.
///
/// Through the softmax, d_s = g (d - <g, d>); through s = n / std with unbiased std and
/// z = (n - mean) / std, d_n = (d_s - <d_s, z> z / (R - 1)) / std. (<d_s, z> equals <d_s, n / std>,
/// since d_s sums to 0, but has less cancellation.)
#[inline(always)]
fn gates_to_norms(gates: &[f32], norms: &[f64], inv_std: f64, gradient: &mut [f32]) {
    let count = routed(norms).count() as f64;
    for (slot, &norm) in gradient.iter_mut().zip(norms) {
        *slot = if is_shared(norm) { 0.0 } else { *slot };
    }
    let inner: f64 =
        gates.iter().zip(gradient.iter()).map(|(&g, &d)| f64::from(g) * f64::from(d)).sum();
    // Rounded gates do not sum to exactly 1. The division makes d_s sum to 0, which the formula
    // requires.
    let inner = inner / gates.iter().map(|&gate| f64::from(gate)).sum::<f64>();
    let mean = routed(norms).sum::<f64>() / count;
    let d_score = |gate: f32, d: f32| f64::from(gate) * (f64::from(d) - inner);
    let deviation = |norm: f64| if is_shared(norm) { 0.0 } else { (norm - mean) * inv_std };
    let along: f64 = (gates.iter().zip(gradient.iter()).zip(norms))
        .map(|((&gate, &d), &norm)| d_score(gate, d) * deviation(norm))
        .sum();
    let pull = along / (count - 1.0);
    for ((slot, &gate), &norm) in gradient.iter_mut().zip(gates).zip(norms) {
        *slot = ((d_score(gate, *slot) - pull * deviation(norm)) * inv_std) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_head() {
        let mut selected = [9u8; 5];
        select(&[2.0, 3.0, 2.0, 3.0, 2.0], 3, &mut selected);
        assert_eq!(selected, [1, 1, 0, 1, 0]);
        select(&[1.0; 5], 0, &mut selected);
        assert_eq!(selected, [0; 5]);
    }

    #[test]
    fn shared_heads_are_selected_beside_the_largest_norms_and_pass_nothing() {
        let squares = [4.0, SHARED, 9.0, 1.0, SHARED];
        let mut selected = [9u8; 5];
        select(&squares, 1, &mut selected);
        assert_eq!(selected, [0, 1, 1, 0, 1]);
        let (mut norms, mut gates) = (squares, [9f32; 5]);
        let inv_std = score(&mut norms, &mut gates);
        let (mut alone, mut expected) = ([4.0, 9.0, 1.0], [0f32; 3]);
        assert_eq!(inv_std, score(&mut alone, &mut expected));
        assert_eq!((norms[1], gates), (SHARED, [expected[0], 0.0, expected[1], expected[2], 0.0]));
        let mut gradient = [1.0, f32::INFINITY, -2.0, 0.5, 3.0];
        let mut without = [1.0, -2.0, 0.5];
        gates_to_norms(&gates, &norms, inv_std, &mut gradient);
        gates_to_norms(&expected, &alone, inv_std, &mut without);
        assert_eq!(gradient, [without[0], 0.0, without[1], without[2], 0.0]);
    }

    #[test]
    fn equal_norms_give_uniform_gates_and_no_gradient() {
        let (mut norms, mut gates) = ([4f64; 4], [0f32; 4]);
        let inv_std = score(&mut norms, &mut gates);
        assert_eq!((inv_std, gates), (0.0, [0.25; 4]));
        let mut gradient = [1.0, -2.0, 0.5, 3.0];
        gates_to_norms(&gates, &norms, inv_std, &mut gradient);
        assert_eq!(gradient, [0.0; 4]);
    }

    #[test]
    fn two_routed_heads_always_have_the_same_gates() {
        // The normalised scores of two heads differ by sqrt 2 whatever the norms are.
        let mut gates = [0f32; 2];
        score(&mut [9.0, 1.0], &mut gates);
        let expected = 1.0 / (1.0 + (-std::f64::consts::SQRT_2).exp());
        assert!((f64::from(gates[0]) - expected).abs() < 1e-7);
    }
}
