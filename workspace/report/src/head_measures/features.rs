//! The features of heads, which are their outputs before the output projection: the similarity of two heads' features,
//! and the rank of each head's features.

use nalgebra::{DMatrix, SymmetricEigen};
use rayon::prelude::*;

use super::pairs::Pairs;

/// The share of the squared singular values that defines the rank of a head's features.
pub const RANK_SHARE: f64 = 0.99;

/// Sums over the tokens that compute a head.
#[derive(Debug, Clone)]
pub(super) struct FeatureSums {
    head_dim: usize,
    /// Sum of o o^T of each head, `[H, D, D]`.
    grams: Vec<f64>,
    /// Cosines of two heads' outputs.
    pub similarity: Pairs,
}

impl FeatureSums {
    pub fn new(heads: usize, head_dim: usize) -> Self {
        let grams = vec![0.0; heads * head_dim * head_dim];
        FeatureSums { head_dim, grams, similarity: Pairs::new(heads) }
    }

    /// Adds tokens: their outputs `[N, H, D]`, and flags whether they compute a head, `[N, H]`.
    pub fn add(&mut self, outputs: &[f32], active: &[u8], heads: usize) {
        let dim = self.head_dim;
        let tokens = || outputs.chunks_exact(heads * dim).zip(active.chunks_exact(heads));
        self.grams.par_chunks_mut(dim * dim).enumerate().for_each(|(head, gram)| {
            for (output, active) in tokens() {
                if active[head] != 0 {
                    add_outer_product(gram, &output[head * dim..][..dim]);
                }
            }
        });
        for (output, active) in tokens() {
            self.add_cosines(output, active);
        }
    }

    fn add_cosines(&mut self, output: &[f32], active: &[u8]) {
        let dot = |a: &[f32], b: &[f32]| {
            a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>()
        };
        let of = |head: usize| &output[head * self.head_dim..][..self.head_dim];
        let computed: Vec<usize> = (0..active.len()).filter(|&head| active[head] != 0).collect();
        let norms: Vec<f64> = computed.iter().map(|&head| dot(of(head), of(head)).sqrt()).collect();
        for (index, (&low, norm)) in computed.iter().zip(&norms).enumerate() {
            for (&high, other) in computed.iter().zip(&norms).skip(index + 1) {
                if norm * other > 0.0 {
                    self.similarity.add(low, high, dot(of(low), of(high)) / (norm * other));
                }
            }
        }
    }

    /// Returns the rank of each head's features, the matrix `[N, D]` of its outputs. The rank is the number of largest
    /// singular values with [`RANK_SHARE`] of the sum of all squares.
    pub fn ranks(&self) -> Vec<usize> {
        let of_head = |gram: &[f64]| rank(gram, self.head_dim);
        self.grams.par_chunks(self.head_dim * self.head_dim).map(of_head).collect()
    }
}

fn add_outer_product(gram: &mut [f64], output: &[f32]) {
    for (row, &a) in gram.chunks_exact_mut(output.len()).zip(output) {
        for (sum, &b) in row.iter_mut().zip(output) {
            *sum += f64::from(a) * f64::from(b);
        }
    }
}

/// Returns the rank, given the Gram matrix `[D, D]` of the features. Its eigenvalues are the squared singular values.
/// The rank of zero features is 0.
fn rank(gram: &[f64], dim: usize) -> usize {
    let eigen = SymmetricEigen::new(DMatrix::from_row_slice(dim, dim, gram));
    let mut values: Vec<f64> = eigen.eigenvalues.iter().map(|value| value.max(0.0)).collect();
    values.sort_by(|a, b| b.total_cmp(a));
    let all: f64 = values.iter().sum();
    let mut sum = 0.0;
    let below = values.iter().take_while(|&&value| {
        let is_below = sum < RANK_SHARE * all;
        sum += value;
        is_below
    });
    below.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns features of a head of `dim` elements: tokens along the first `rank` axes in turn, rotated by
    /// reflections.
    fn features(dim: usize, rank: usize) -> Vec<f32> {
        let mut all = Vec::new();
        for token in 0..6 * rank {
            let mut output = vec![0.0; dim];
            output[token % rank] = 1.0 + (token / rank) as f32 / 8.0;
            let reflect = |normal: &dyn Fn(usize) -> f32, x: &mut [f32]| {
                let square: f32 = (0..dim).map(|i| normal(i).powi(2)).sum();
                let dot: f32 = x.iter().enumerate().map(|(i, x)| normal(i) * x).sum();
                x.iter_mut().enumerate().for_each(|(i, x)| *x -= 2.0 * dot / square * normal(i));
            };
            reflect(&|i| 1.0 + i as f32, &mut output);
            reflect(&|i| (i as f32).cos(), &mut output);
            all.extend(output);
        }
        all
    }

    #[test]
    fn features_of_a_known_rank_have_it() {
        for (dim, known) in [(1, 1), (5, 1), (8, 3), (16, 16), (7, 6)] {
            let mut sums = FeatureSums::new(1, dim);
            let outputs = features(dim, known);
            sums.add(&outputs, &vec![1; outputs.len() / dim], 1);
            assert_eq!(sums.ranks(), [known], "{dim}");
        }
        assert_eq!(FeatureSums::new(1, 4).ranks(), [0]);
        // A direction with a thousandth of the squares does not count.
        assert_eq!(rank(&[1.0, 0.0, 0.0, 0.001], 2), 1);
        assert_eq!(rank(&[1.0, 0.0, 0.0, 0.02], 2), 2);
    }

    #[test]
    fn outputs_of_equal_heads_are_alike_and_only_computed_ones_count() {
        let mut sums = FeatureSums::new(3, 2);
        let outputs = [1.0, 2.0, 2.0, 4.0, -2.0, 1.0, 5.0, 0.0, 0.0, 3.0, 1.0, 0.0];
        sums.add(&outputs, &[1, 1, 1, 1, 0, 1], 3);
        assert!((sums.similarity.mean(0, 1).unwrap() - 1.0).abs() < 1e-12);
        assert!((sums.similarity.mean(0, 2).unwrap() - 0.5).abs() < 1e-12);
        assert!(sums.similarity.mean(1, 2).unwrap().abs() < 1e-12);
        // The second head is computed only by the first token.
        assert_eq!(sums.ranks(), [2, 1, 2]);
    }
}
