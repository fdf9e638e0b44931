//! Attention patterns: the rows of softmax(Q K^T / sqrt D) of every head, their distance and entropy, and the
//! similarity of two heads' rows.

use rayon::prelude::*;

use super::pairs::{Pairs, add};

/// The queries and keys of a window in a layer, as attention reads them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window<'a> {
    /// `[T, H, D]`.
    pub queries: &'a [f32],
    /// `[T, G, D]`.
    pub keys: &'a [f32],
    /// Whether a token computes a head, `[T, H]`.
    pub active: &'a [u8],
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// Sums over the rows of tokens that compute a head.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PatternSums {
    /// The number of rows of each head.
    pub rows: Vec<f64>,
    /// Mean distance, in tokens, between the token of a row and the tokens that it attends to.
    pub distance: Vec<f64>,
    /// Entropy of a row, in nats.
    pub entropy: Vec<f64>,
    /// Similarity of two heads that a token computes: 1 - |a - b|_1 / 2 of their rows.
    pub similarity: Pairs,
}

impl PatternSums {
    pub fn new(heads: usize) -> Self {
        let zeros = vec![0.0; heads];
        PatternSums {
            rows: zeros.clone(),
            distance: zeros.clone(),
            entropy: zeros,
            similarity: Pairs::new(heads),
        }
    }

    /// Adds the rows of a window, in an order that does not depend on the number of threads. The first token is
    /// omitted, because its row is 1 in every head.
    pub fn add(&mut self, window: Window<'_>) {
        let length = window.active.len() / window.heads;
        let rows = (1..length).into_par_iter().map(|token| window.sums_of(token));
        rows.collect::<Vec<_>>().iter().for_each(|of_token| self.merge(of_token));
    }

    fn merge(&mut self, other: &Self) {
        add(&mut self.rows, &other.rows);
        add(&mut self.distance, &other.distance);
        add(&mut self.entropy, &other.entropy);
        self.similarity.merge(&other.similarity);
    }
}

impl Window<'_> {
    /// Returns the attention of a token in a head over the tokens up to it, in f64.
    pub fn row(&self, token: usize, head: usize) -> Vec<f64> {
        let Window { queries, keys, heads, kv_heads, head_dim, .. } = *self;
        let query = &queries[(token * heads + head) * head_dim..][..head_dim];
        let group = head / (heads / kv_heads);
        let score = |key: usize| {
            let key = &keys[(key * kv_heads + group) * head_dim..][..head_dim];
            let product = |(&q, &k): (&f32, &f32)| f64::from(q) * f64::from(k);
            query.iter().zip(key).map(product).sum::<f64>() / (head_dim as f64).sqrt()
        };
        let mut row: Vec<f64> = (0..=token).map(score).collect();
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter_mut().for_each(|score| *score = (*score - largest).exp());
        let sum: f64 = row.iter().sum();
        row.iter_mut().for_each(|weight| *weight /= sum);
        row
    }

    pub fn is_active(&self, token: usize, head: usize) -> bool {
        self.active[token * self.heads + head] != 0
    }

    fn sums_of(&self, token: usize) -> PatternSums {
        let mut sums = PatternSums::new(self.heads);
        let active = (0..self.heads).filter(|&head| self.is_active(token, head));
        let rows: Vec<(usize, Vec<f64>)> =
            active.map(|head| (head, self.row(token, head))).collect();
        for (index, (head, row)) in rows.iter().enumerate() {
            sums.rows[*head] = 1.0;
            let distances = row.iter().enumerate();
            sums.distance[*head] =
                distances.map(|(key, weight)| weight * (token - key) as f64).sum();
            let terms = row.iter().filter(|&&weight| weight > 0.0);
            sums.entropy[*head] = -terms.map(|weight| weight * weight.ln()).sum::<f64>();
            for (other, row_of_other) in &rows[index + 1..] {
                let difference: f64 =
                    row.iter().zip(row_of_other).map(|(a, b)| (a - b).abs()).sum();
                sums.similarity.add(*head, *other, 1.0 - difference / 2.0);
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a window of three tokens and two heads that read the same key, with one element each.
    fn window<'a>(queries: &'a [f32], active: &'a [u8]) -> Window<'a> {
        const KEYS: [f32; 3] = [0.0, 1.0, 2.0];
        Window { queries, keys: &KEYS, active, heads: 2, kv_heads: 1, head_dim: 1 }
    }

    #[test]
    fn a_row_is_the_softmax_of_products() {
        let window = window(&[0.0, 0.0, 0.0, 0.0, 1.0, 0.0], &[1; 6]);
        let row = window.row(2, 0);
        let sum = 1.0 + 1f64.exp() + 2f64.exp();
        let expected = [1.0 / sum, 1f64.exp() / sum, 2f64.exp() / sum];
        assert!(row.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15));
        assert_eq!(window.row(1, 1), [0.5, 0.5]);
    }

    #[test]
    fn heads_with_the_same_queries_are_alike_and_others_less() {
        let mut same = PatternSums::new(2);
        same.add(window(&[1.0, 1.0, 2.0, 2.0, -1.0, -1.0], &[1; 6]));
        assert_eq!(same.similarity.mean(0, 1), Some(1.0));
        let mut other = PatternSums::new(2);
        other.add(window(&[1.0, 1.0, 2.0, -40.0, 40.0, -40.0], &[1; 6]));
        assert!(other.similarity.mean(0, 1).unwrap() < 0.2);
        // Uniform rows of 2 and 3 tokens have distances of a half and of one token.
        let mut uniform = PatternSums::new(2);
        uniform.add(window(&[0.0; 6], &[1, 1, 1, 0, 1, 1]));
        assert_eq!((uniform.rows[0], uniform.rows[1]), (2.0, 1.0));
        assert!(
            (uniform.distance[0] - 1.5).abs() < 1e-12 && (uniform.distance[1] - 1.0).abs() < 1e-12
        );
        assert!((uniform.entropy[0] - (2f64.ln() + 3f64.ln())).abs() < 1e-12);
    }

    #[test]
    fn tokens_that_do_not_compute_both_heads_do_not_count() {
        let mut sums = PatternSums::new(2);
        sums.add(window(&[0.0, 9.0, 0.0, 9.0, 0.0, 9.0], &[1, 1, 1, 0, 0, 1]));
        assert_eq!(sums.similarity.mean(0, 1), None);
    }
}
