//! The CPU body of the query-norm router.

use rayon::prelude::*;

use super::{QueryNormRouter, RouterGradient};
use crate::cpu::Cpu;
use crate::error::{Result, check_len, ensure};
use crate::math::sum_of_squares;
use crate::rope::QkvShape;
use crate::scalar::Element;
use crate::simd::vectorized;

/// Tokens of one task.
const ROWS: usize = 64;

/// The routing of one block and micro-batch; every table is `[tokens, routed]`.
#[derive(Debug)]
pub struct CpuRouting {
    router: QueryNormRouter,
    routed: usize,
    tokens: usize,
    /// In f64: the gradient divides differences of norms by their deviation, which may be small.
    norms: Vec<f64>,
    gates: Vec<f32>,
    /// 1 / std of a token's norms; 0 where they are all equal. `[tokens]`.
    inv_std: Vec<f64>,
    selected: Vec<u8>,
}

impl CpuRouting {
    pub(crate) fn new(capacity: usize, heads: usize, router: QueryNormRouter) -> Result<Self> {
        let routed = router.check("routing", heads)?;
        Ok(CpuRouting {
            router,
            routed,
            tokens: 0,
            norms: vec![0.0; capacity * routed],
            gates: vec![0.0; capacity * routed],
            inv_std: vec![0.0; capacity],
            selected: vec![0; capacity * routed],
        })
    }

    /// Whether query head `head` serves `token`.
    #[inline]
    pub(crate) fn serves(&self, token: usize, head: usize) -> bool {
        match head.checked_sub(self.router.shared_heads) {
            None => true,
            Some(routed) => self.selected[token * self.routed + routed] != 0,
        }
    }

    /// Refuses tokens or heads other than those that were routed.
    pub(crate) fn check(&self, operator: &'static str, tokens: usize, heads: usize) -> Result<()> {
        check_len(operator, "routing", self.tokens, tokens)?;
        self.check_heads(operator, heads)
    }

    fn check_heads(&self, operator: &'static str, heads: usize) -> Result<()> {
        let routed = self.router.shared_heads + self.routed;
        ensure(operator, heads == routed, || {
            format!("the routing was made for {routed} heads, not {heads}")
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
) -> Result<()> {
    const OPERATOR: &str = "rope_route_forward";
    let (routed, tokens) = (routing.routed, shape.tokens());
    ensure(OPERATOR, tokens <= routing.inv_std.len(), || {
        format!("the routing has room for {} tokens, not {tokens}", routing.inv_std.len())
    })?;
    routing.check_heads(OPERATOR, shape.heads)?;
    routing.tokens = tokens;
    if routed == 0 {
        return Ok(());
    }
    let router = routing.router;
    let first = router.shared_heads * shape.head_dim;
    let queries = first..shape.heads * shape.head_dim;
    (
        qkv.par_chunks(ROWS * shape.row()),
        routing.norms[..tokens * routed].par_chunks_mut(ROWS * routed),
        routing.gates[..tokens * routed].par_chunks_mut(ROWS * routed),
        routing.selected[..tokens * routed].par_chunks_mut(ROWS * routed),
        routing.inv_std[..tokens].par_chunks_mut(ROWS),
    )
        .into_par_iter()
        .for_each(|(qkv, norms, gates, selected, inv_std)| {
            let rows = qkv
                .chunks_exact(shape.row())
                .zip(norms.chunks_exact_mut(routed))
                .zip(gates.chunks_exact_mut(routed))
                .zip(selected.chunks_exact_mut(routed))
                .zip(inv_std);
            vectorized!({
                for ((((row, norms), gates), selected), inv_std) in rows {
                    let heads = row[queries.clone()].chunks_exact(shape.head_dim);
                    for (square, query) in norms.iter_mut().zip(heads) {
                        *square = sum_of_squares::<8, _>(query);
                    }
                    select(norms, router.top_k, selected);
                    *inv_std = score(norms, gates);
                }
            });
        });
    Ok(())
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
    let RouterGradient { routing, delta, balance_weight } = gradient;
    let (routed, tokens) = (routing.routed, shape.tokens());
    routing.check("rope_route_backward", tokens, shape.heads)?;
    if let Some(delta) = delta {
        check_len("rope_route_backward", "delta", delta.len(), tokens * shape.heads)?;
    }
    if routed == 0 {
        return Ok(());
    }
    let balance: Vec<f32> = routing
        .load()
        .iter()
        .map(|share| (f64::from(balance_weight) * share / tokens as f64) as f32)
        .collect();
    let first = routing.router.shared_heads * shape.head_dim;
    let queries = first..shape.heads * shape.head_dim;
    (qkv.par_chunks(ROWS * shape.row()), d_qkv.par_chunks_mut(ROWS * shape.row()))
        .into_par_iter()
        .enumerate()
        .for_each(|(part, (qkv, d_qkv))| {
            let mut d_norms = vec![0f32; routed];
            let rows = qkv.chunks_exact(shape.row()).zip(d_qkv.chunks_exact_mut(shape.row()));
            vectorized!({
                for ((row, d_row), token) in rows.zip(part * ROWS..) {
                    let table = token * routed..(token + 1) * routed;
                    let gates = &routing.gates[table.clone()];
                    let norms = &routing.norms[table.clone()];
                    d_norms.copy_from_slice(&balance);
                    if let Some(delta) = delta {
                        let delta = &delta[token * shape.heads + routing.router.shared_heads..];
                        let selected = &routing.selected[table];
                        for ((slot, &delta), &selected) in
                            d_norms.iter_mut().zip(delta).zip(selected)
                        {
                            *slot += delta * f32::from(selected);
                        }
                    }
                    gates_to_norms(gates, norms, routing.inv_std[token], &mut d_norms);
                    let heads = row[queries.clone()].chunks_exact(shape.head_dim);
                    let d_heads = d_row[queries.clone()].chunks_exact_mut(shape.head_dim);
                    for (((query, d_query), &norm), &d_norm) in
                        heads.zip(d_heads).zip(norms).zip(&d_norms)
                    {
                        if norm == 0.0 {
                            continue;
                        }
                        let factor = d_norm / norm as f32;
                        for (d_query, query) in d_query.iter_mut().zip(query) {
                            *d_query = T::from_f32(d_query.to_f32() + factor * query.to_f32());
                        }
                    }
                }
            });
        });
    Ok(())
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
