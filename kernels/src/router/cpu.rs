//! The CPU body of the query-norm router.

use std::ops::Range;

use rayon::prelude::*;

use super::{QueryNormRouter, RouterGradient, RouterRanks, exchange};
use crate::cpu::Cpu;
use crate::error::{Result, check_len, ensure};
use crate::math::sum_of_squares;
use crate::ranks::{AllReduce, Heads};
use crate::rope::QkvShape;
use crate::scalar::Element;
use crate::simd::vectorized;

/// Tokens of one task.
const ROWS: usize = 64;

/// The routing of one block and micro-batch; every table is `[tokens, routed]`.
#[derive(Debug)]
pub struct CpuRouting {
    router: QueryNormRouter,
    heads: Heads,
    /// Routed heads of the layer.
    routed: usize,
    /// Shared heads that are held here.
    held_shared: usize,
    /// Of the routed heads that are held here, their number among all of them.
    held: Vec<usize>,
    tokens: usize,
    /// In f64: the gradient divides differences of norms by their deviation, which may be small.
    norms: Vec<f64>,
    gates: Vec<f32>,
    /// 1 / std of a token's norms; 0 where they are all equal. `[tokens]`.
    inv_std: Vec<f64>,
    selected: Vec<u8>,
}

impl CpuRouting {
    pub(crate) fn new(capacity: usize, heads: Heads, router: QueryNormRouter) -> Result<Self> {
        let routed = router.check("routing", heads)?;
        let held_shared = heads.held_below(router.shared_heads);
        let number = |held| heads.index(held) - router.shared_heads;
        Ok(CpuRouting {
            router,
            heads,
            routed,
            held_shared,
            held: (held_shared..heads.held()).map(number).collect(),
            tokens: 0,
            norms: vec![0.0; capacity * routed],
            gates: vec![0.0; capacity * routed],
            inv_std: vec![0.0; capacity],
            selected: vec![0; capacity * routed],
        })
    }

    /// Whether query head `head` of those held here serves `token`.
    #[inline]
    pub(crate) fn serves(&self, token: usize, head: usize) -> bool {
        match head.checked_sub(self.held_shared) {
            None => true,
            Some(routed) => self.selected[token * self.routed + self.held[routed]] != 0,
        }
    }

    /// The routed queries that are held here, within a token's row.
    fn queries(&self, shape: &QkvShape) -> Range<usize> {
        self.held_shared * shape.head_dim..shape.heads * shape.head_dim
    }

    /// Refuses tokens or heads other than those that were routed.
    pub(crate) fn check(&self, operator: &'static str, tokens: usize, heads: usize) -> Result<()> {
        check_len(operator, "routing", self.tokens, tokens)?;
        self.check_heads(operator, heads)
    }

    fn check_heads(&self, operator: &'static str, heads: usize) -> Result<()> {
        let held = self.heads.held();
        ensure(operator, heads == held, || {
            format!("the routing was made for {held} heads, not {heads}")
        })
    }

    pub(crate) fn mask(&self) -> &[u8] {
        &self.selected[..self.tokens * self.routed]
    }

    pub(crate) fn gates(&self) -> &[f32] {
        &self.gates[..self.tokens * self.routed]
    }

    /// Share of tokens that selected each routed head.
    fn load(&self) -> Vec<f64> {
        let mut counts = vec![0u64; self.routed];
        for row in self.mask().chunks_exact(self.routed.max(1)) {
            for (count, &selected) in counts.iter_mut().zip(row) {
                *count += u64::from(selected);
            }
        }
        counts.iter().map(|&count| count as f64 / self.tokens.max(1) as f64).collect()
    }

    /// `sum_i f_i P_i` over the routed heads.
    pub(crate) fn balance_loss(&self) -> f64 {
        let mut mean_gate = vec![0f64; self.routed];
        for row in self.gates().chunks_exact(self.routed.max(1)) {
            for (sum, &gate) in mean_gate.iter_mut().zip(row) {
                *sum += f64::from(gate);
            }
        }
        let tokens = self.tokens.max(1) as f64;
        self.load().iter().zip(&mean_gate).map(|(share, sum)| share * sum / tokens).sum()
    }
}

/// Scores and selects from queries that are not yet rotated.
pub(crate) fn forward<T: Element>(
    shape: &QkvShape,
    qkv: &[T],
    routing: &mut CpuRouting,
    all_reduce: Option<AllReduce<'_, Cpu>>,
) -> Result<()> {
    const OPERATOR: &str = "rope_route_forward";
    let tokens = shape.tokens();
    ensure(OPERATOR, tokens <= routing.inv_std.len(), || {
        format!("the routing has room for {} tokens, not {tokens}", routing.inv_std.len())
    })?;
    routing.check_heads(OPERATOR, shape.heads)?;
    let all_reduce = exchange(OPERATOR, routing.heads, all_reduce)?;
    routing.tokens = tokens;
    if routing.routed == 0 {
        return Ok(());
    }
    measure(shape, qkv, routing);
    if let Some(all_reduce) = all_reduce {
        all_reduce(&mut routing.norms[..tokens * routing.routed])?;
    }
    choose(routing);
    Ok(())
}

/// Writes the squares of the queries that are held here, and zeros for the others.
fn measure<T: Element>(shape: &QkvShape, qkv: &[T], routing: &mut CpuRouting) {
    let (routed, queries) = (routing.routed, routing.queries(shape));
    let (held, norms) = (&routing.held, &mut routing.norms[..shape.tokens() * routed]);
    let parts = qkv.par_chunks(ROWS * shape.row()).zip(norms.par_chunks_mut(ROWS * routed));
    parts.for_each(|(qkv, squares)| {
        let rows = qkv.chunks_exact(shape.row()).zip(squares.chunks_exact_mut(routed));
        vectorized!({
            for (row, squares) in rows {
                if held.len() < routed {
                    squares.fill(0.0);
                }
                let heads = row[queries.clone()].chunks_exact(shape.head_dim);
                for (&number, query) in held.iter().zip(heads) {
                    squares[number] = sum_of_squares::<8, _>(query);
                }
            }
        });
    });
}

/// Selects, and turns squares into norms and gates.
fn choose(routing: &mut CpuRouting) {
    let (routed, tokens, top_k) = (routing.routed, routing.tokens, routing.router.top_k);
    (
        routing.norms[..tokens * routed].par_chunks_mut(ROWS * routed),
        routing.gates[..tokens * routed].par_chunks_mut(ROWS * routed),
        routing.selected[..tokens * routed].par_chunks_mut(ROWS * routed),
        routing.inv_std[..tokens].par_chunks_mut(ROWS),
    )
        .into_par_iter()
        .for_each(|(norms, gates, selected, inv_std)| {
            let rows = norms
                .chunks_exact_mut(routed)
                .zip(gates.chunks_exact_mut(routed))
                .zip(selected.chunks_exact_mut(routed))
                .zip(inv_std);
            vectorized!({
                for (((norms, gates), selected), inv_std) in rows {
                    select(norms, top_k, selected);
                    *inv_std = score(norms, gates);
                }
            });
        });
}

/// Marks the `top_k` largest squares, lower heads first among equals.
#[inline(always)]
fn select(squares: &[f64], top_k: usize, selected: &mut [u8]) {
    for (head, mark) in selected.iter_mut().enumerate() {
        let square = squares[head];
        let ahead = squares
            .iter()
            .enumerate()
            .filter(|&(other, &s)| s > square || (s == square && other < head))
            .count();
        *mark = u8::from(ahead < top_k);
    }
}

/// Turns a token's squares into norms and writes its gates; returns 1 / std, 0 where all norms are
/// equal.
#[inline(always)]
fn score(norms: &mut [f64], gates: &mut [f32]) -> f64 {
    for norm in norms.iter_mut() {
        *norm = norm.sqrt();
    }
    let count = norms.len() as f64;
    let mean = norms.iter().sum::<f64>() / count;
    let variance = norms.iter().map(|norm| (norm - mean).powi(2)).sum::<f64>() / (count - 1.0);
    // The mean of equal norms may differ from them by a rounding, so equality is asked for itself.
    let equal = norms.iter().all(|&norm| norm == norms[0]);
    let inv_std = if equal { 0.0 } else { variance.sqrt().recip() };
    let largest = norms.iter().fold(0f64, |largest, &norm| largest.max(norm));
    let mut sum = 0f64;
    for (gate, norm) in gates.iter_mut().zip(norms.iter()) {
        let exponential = ((norm - largest) * inv_std).exp();
        *gate = exponential as f32;
        sum += exponential;
    }
    for gate in gates {
        *gate = (f64::from(*gate) / sum) as f32;
    }
    inv_std
}

/// Adds the router's gradient to that of the rotated queries.
pub(crate) fn backward<T: Element>(
    shape: &QkvShape,
    qkv: &[T],
    d_qkv: &mut [T],
    gradient: RouterGradient<'_, Cpu>,
) -> Result<()> {
    const OPERATOR: &str = "rope_route_backward";
    let RouterGradient { routing, delta, balance_weight, ranks } = gradient;
    let tokens = shape.tokens();
    routing.check(OPERATOR, tokens, shape.heads)?;
    if let Some(delta) = delta {
        check_len(OPERATOR, "delta", delta.len(), tokens * shape.heads)?;
    }
    let ranks = delta.map_or(Ok(None), |_| exchange(OPERATOR, routing.heads, ranks))?;
    if routing.routed == 0 {
        return Ok(());
    }
    let weights = match (delta, ranks) {
        (None, _) => Weights::Constant,
        (Some(delta), None) => Weights::Held(delta),
        (Some(delta), Some(RouterRanks { table, all_reduce })) => {
            check_len(OPERATOR, "table", table.len(), tokens * routing.routed)?;
            spread(routing, delta, table);
            all_reduce(&mut *table)?;
            Weights::All(table)
        }
    };
    let share = |share: &f64| (f64::from(balance_weight) * share / tokens as f64) as f32;
    let balance: Vec<f32> = routing.load().iter().map(share).collect();
    let queries = routing.queries(shape);
    (qkv.par_chunks(ROWS * shape.row()), d_qkv.par_chunks_mut(ROWS * shape.row()))
        .into_par_iter()
        .enumerate()
        .for_each(|(part, (qkv, d_qkv))| {
            let mut d_norms = vec![0f32; routing.routed];
            let rows = qkv.chunks_exact(shape.row()).zip(d_qkv.chunks_exact_mut(shape.row()));
            vectorized!({
                for ((row, d_row), token) in rows.zip(part * ROWS..) {
                    d_norms.copy_from_slice(&balance);
                    weights.add(routing, token, &mut d_norms);
                    let (row, d_row) = (&row[queries.clone()], &mut d_row[queries.clone()]);
                    norms_backward(routing, token, &mut d_norms, row, d_row, shape.head_dim);
                }
            });
        });
    Ok(())
}

/// Where the gradients of the heads' weights are.
#[derive(Clone, Copy)]
enum Weights<'a> {
    /// Nowhere: the selection is a constant.
    Constant,
    /// Those of the heads that are held here, which are all of them.
    Held(&'a [f32]),
    /// `[tokens, routed]`, of all heads.
    All(&'a [f64]),
}

impl Weights<'_> {
    /// Adds those of a token's selected heads.
    #[inline(always)]
    fn add(self, routing: &CpuRouting, token: usize, gradient: &mut [f32]) {
        let table = token * routing.routed..(token + 1) * routing.routed;
        match self {
            Weights::Constant => {}
            Weights::Held(delta) => {
                let heads = routing.heads.held();
                let delta = &delta[token * heads + routing.held_shared..];
                let selected = &routing.selected[table];
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

/// Writes the gradients of the selected heads that are held here into the table, and zeros for the
/// others.
fn spread(routing: &CpuRouting, delta: &[f32], table: &mut [f64]) {
    let (heads, shared, routed) = (routing.heads.held(), routing.held_shared, routing.routed);
    let selected = routing.selected.par_chunks(routed);
    let rows = table.par_chunks_mut(routed).zip(delta.par_chunks(heads)).zip(selected);
    rows.for_each(|((row, delta), selected)| {
        row.fill(0.0);
        for (&number, &delta) in routing.held.iter().zip(&delta[shared..]) {
            row[number] = f64::from(delta) * f64::from(selected[number]);
        }
    });
}

/// From the gradients of a token's gates to those of its queries that are held here, which are added.
#[inline(always)]
fn norms_backward<T: Element>(
    routing: &CpuRouting,
    token: usize,
    gradient: &mut [f32],
    queries: &[T],
    d_queries: &mut [T],
    head_dim: usize,
) {
    let table = token * routing.routed..(token + 1) * routing.routed;
    let (gates, norms) = (&routing.gates[table.clone()], &routing.norms[table]);
    gates_to_norms(gates, norms, routing.inv_std[token], gradient);
    let heads = queries.chunks_exact(head_dim).zip(d_queries.chunks_exact_mut(head_dim));
    for (&number, (query, d_query)) in routing.held.iter().zip(heads) {
        let norm = norms[number];
        if norm == 0.0 {
            continue;
        }
        let factor = gradient[number] / norm as f32;
        for (d_query, query) in d_query.iter_mut().zip(query) {
            *d_query = T::from_f32(d_query.to_f32() + factor * query.to_f32());
        }
    }
}

/// Turns a token's gradient of its gates into that of its norms, in place.
///
/// Through the softmax, d_s = g (d - <g, d>); through s = n / std with unbiased std and
/// z = (n - mean) / std, d_n = (d_s - <d_s, z> z / (R - 1)) / std. (The formula has <d_s, n / std>,
/// which is the same since d_s sums to 0, with more to cancel.)
#[inline(always)]
fn gates_to_norms(gates: &[f32], norms: &[f64], inv_std: f64, gradient: &mut [f32]) {
    let count = gates.len() as f64;
    let inner: f64 =
        gates.iter().zip(gradient.iter()).map(|(&g, &d)| f64::from(g) * f64::from(d)).sum();
    // Rounded gates do not quite sum to 1, but d_s must to 0: what follows cancels all else.
    let inner = inner / gates.iter().map(|&gate| f64::from(gate)).sum::<f64>();
    let mean = norms.iter().sum::<f64>() / count;
    let d_score = |gate: f32, d: f32| f64::from(gate) * (f64::from(d) - inner);
    let deviation = |norm: f64| (norm - mean) * inv_std;
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
