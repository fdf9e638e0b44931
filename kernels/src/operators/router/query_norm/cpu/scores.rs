//! A token's selection, gates and gradients from the squares of its norms, in rows of columns.

use super::super::{QueryNormRouter, Selects};
use crate::Heads;

/// The square and the norm of a shared head.
pub(super) const SHARED: f64 = -1.0;

/// Returns whether a square or a norm belongs to a shared head.
#[inline(always)]
pub(super) fn is_shared(norm: f64) -> bool {
    norm < 0.0
}

/// How the columns of a layer are scored.
pub(super) struct Scores {
    /// Heads that a token selects.
    top_k: usize,
    /// The number of heads that share one norm, if whole groups are selected.
    group_size: Option<usize>,
}

impl Scores {
    pub fn new(router: QueryNormRouter, heads: Heads) -> Self {
        Scores {
            top_k: router.top_k,
            group_size: (router.selects == Selects::Groups).then_some(heads.group_size),
        }
    }

    /// Selects heads, replaces squares by norms, and writes the gates and 1 / std, or 0 if the norms are
    /// equal.
    #[inline(always)]
    pub fn route(
        &self,
        norms: &mut [f64],
        gates: &mut [f32],
        selected: &mut [u8],
        inv_std: &mut f64,
    ) {
        if let Some(size) = self.group_size {
            add_up_groups(norms, size);
            select(norms, self.top_k, selected);
            roots(norms, size as f64);
            *inv_std = 1.0;
        } else {
            select(norms, self.top_k, selected);
            roots(norms, 1.0);
            *inv_std = inverse_deviation(norms);
        }
        softmax(norms, *inv_std, gates);
    }

    /// Replaces the gradients of a token's gates by the gradients of its norms, 0 for shared heads. The
    /// gradient of a query is the gradient of its norm, divided by the norm, times the query. If whole groups
    /// are selected, each head gets its part of the gradient of its group's norm.
    #[inline(always)]
    pub fn gates_to_norms(&self, gates: &[f32], norms: &[f64], inv_std: f64, gradient: &mut [f32]) {
        if let Some(size) = self.group_size {
            let inner = ignore_shared(gates, norms, gradient);
            let groups = gradient.chunks_exact_mut(size).zip(gates.chunks_exact(size));
            for (gradient, gates) in groups {
                let of_head = |(&gate, &d): (&f32, &f32)| f64::from(gate) * (f64::from(d) - inner);
                let sum: f64 = gates.iter().zip(gradient.iter()).map(of_head).sum();
                gradient.fill((sum / size as f64) as f32);
            }
        } else {
            heads_to_norms(gates, norms, inv_std, gradient);
        }
    }
}

/// Replaces the squares of each group by their sum. All heads of a group are shared, or all are routed.
#[inline(always)]
fn add_up_groups(squares: &mut [f64], size: usize) {
    for group in squares.chunks_exact_mut(size) {
        let sum = if is_shared(group[0]) { SHARED } else { group.iter().sum() };
        group.fill(sum);
    }
}

#[inline(always)]
fn routed(norms: &[f64]) -> impl Iterator<Item = f64> {
    norms.iter().copied().filter(|&norm| !is_shared(norm))
}

/// Marks shared heads and the `top_k` largest squares of the other heads; among equal squares, lower heads
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

/// Replaces each square by the root of its `count`-th part.
#[inline(always)]
fn roots(squares: &mut [f64], count: f64) {
    for square in squares {
        *square = if is_shared(*square) { SHARED } else { (*square / count).sqrt() };
    }
}

/// Returns 1 / std of the norms, or 0 if all are equal.
#[inline(always)]
fn inverse_deviation(norms: &[f64]) -> f64 {
    let count = routed(norms).count() as f64;
    let mean = routed(norms).sum::<f64>() / count;
    let variance = routed(norms).map(|norm| (norm - mean).powi(2)).sum::<f64>() / (count - 1.0);
    // Rounding may make the mean of equal norms differ from them, so equality is tested explicitly.
    let first = routed(norms).next();
    let equal = routed(norms).all(|norm| Some(norm) == first);
    if equal { 0.0 } else { variance.sqrt().recip() }
}

/// Writes the gates, which sum to 1.
#[inline(always)]
fn softmax(norms: &[f64], inv_std: f64, gates: &mut [f32]) {
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
}

/// Sets the gradients of shared heads' gates to 0, and returns the mean of the other gradients, weighted by the gates.
#[inline(always)]
fn ignore_shared(gates: &[f32], norms: &[f64], gradient: &mut [f32]) -> f64 {
    for (slot, &norm) in gradient.iter_mut().zip(norms) {
        *slot = if is_shared(norm) { 0.0 } else { *slot };
    }
    let inner: f64 =
        gates.iter().zip(gradient.iter()).map(|(&g, &d)| f64::from(g) * f64::from(d)).sum();
    // Rounded gates do not sum to exactly 1. With the division the gradients of the scores sum to
    // 0, which the formula requires.
    inner / gates.iter().map(|&gate| f64::from(gate)).sum::<f64>()
}

/// Replaces the gradient of the gates by the gradient of the norms, 0 for shared heads.
///
/// Through the softmax, d_s = g (d - <g, d>); through s = n / std with unbiased std and
/// z = (n - mean) / std, d_n = (d_s - <d_s, z> z / (R - 1)) / std. (<d_s, z> equals <d_s, n / std>,
/// since d_s sums to 0, but has less cancellation.)
#[inline(always)]
fn heads_to_norms(gates: &[f32], norms: &[f64], inv_std: f64, gradient: &mut [f32]) {
    let count = routed(norms).count() as f64;
    let inner = ignore_shared(gates, norms, gradient);
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

    /// Returns 1 / std; replaces squares by norms and writes the gates.
    fn score(norms: &mut [f64], gates: &mut [f32]) -> f64 {
        roots(norms, 1.0);
        let inv_std = inverse_deviation(norms);
        softmax(norms, inv_std, gates);
        inv_std
    }

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
        heads_to_norms(&gates, &norms, inv_std, &mut gradient);
        heads_to_norms(&expected, &alone, inv_std, &mut without);
        assert_eq!(gradient, [without[0], 0.0, without[1], without[2], 0.0]);
    }

    #[test]
    fn equal_norms_give_uniform_gates_and_no_gradient() {
        let (mut norms, mut gates) = ([4f64; 4], [0f32; 4]);
        let inv_std = score(&mut norms, &mut gates);
        assert_eq!((inv_std, gates), (0.0, [0.25; 4]));
        let mut gradient = [1.0, -2.0, 0.5, 3.0];
        heads_to_norms(&gates, &norms, inv_std, &mut gradient);
        assert_eq!(gradient, [0.0; 4]);
    }

    #[test]
    fn two_routed_heads_always_have_the_same_gates() {
        // The normalised scores of two heads differ by sqrt 2 for any norms.
        let mut gates = [0f32; 2];
        score(&mut [9.0, 1.0], &mut gates);
        let expected = 1.0 / (1.0 + (-std::f64::consts::SQRT_2).exp());
        assert!((f64::from(gates[0]) - expected).abs() < 1e-7);
    }
}
