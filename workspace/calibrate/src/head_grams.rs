//! The inner products of the heads' contributions to attention's output, token by token. With them the loss of leaving
//! heads out is a quadratic form, for any set of heads.

use moh_model::LayerHeads;
use ndarray::{Array2, ArrayView2, Axis, s};
use rayon::prelude::*;

use crate::selection::Scores;

/// Number of tokens that a thread computes at a time.
const TOKENS: usize = 64;

/// `<W_h o_h, W_g o_g>` for the heads h and g of each token, `[tokens, heads, heads]`. o_h is the output of head h, W_h
/// are the output projection's columns of head h.
#[derive(Debug)]
pub(crate) struct HeadGrams {
    grams: Vec<f32>,
    heads: usize,
}

impl HeadGrams {
    /// Computes the products from the outputs o, `[tokens, heads * head_dim]`, and the output projection W,
    /// `[width, heads * head_dim]`.
    pub fn new(outputs: ArrayView2<'_, f32>, weight: ArrayView2<'_, f32>, heads: usize) -> Self {
        let head_dim = weight.ncols() / heads;
        // o_h^T (W_h^T W_g) o_g takes head_dim products for a pair of heads, not `width`.
        let products: Array2<f32> = weight.t().dot(&weight);
        let chunks: Vec<_> = outputs.axis_chunks_iter(Axis(0), TOKENS).collect();
        let of_chunk = |outputs: ArrayView2<'_, f32>| {
            let mut grams = vec![0f32; outputs.nrows() * heads * heads];
            for g in 0..heads {
                let of_g = g * head_dim..(g + 1) * head_dim;
                // W_h^T W_g o_g for every head h.
                let mapped = outputs.slice(s![.., of_g.clone()]).dot(&products.slice(s![of_g, ..]));
                let rows = outputs.rows().into_iter().zip(mapped.rows());
                for ((output, mapped), gram) in rows.zip(grams.chunks_exact_mut(heads * heads)) {
                    for h in 0..heads {
                        let of_h = s![h * head_dim..(h + 1) * head_dim];
                        gram[h * heads + g] = output.slice(of_h).dot(&mapped.slice(of_h));
                    }
                }
            }
            grams
        };
        let grams: Vec<Vec<f32>> = chunks.into_par_iter().map(of_chunk).collect();
        HeadGrams { grams: grams.concat(), heads }
    }

    /// Returns |sum of W_h o_h over the heads h of `heads`|^2 of a token.
    fn square(&self, gram: &[f32], heads: &[usize]) -> f64 {
        let mut sum = 0.0;
        for (at, &h) in heads.iter().enumerate() {
            let row = &gram[h * self.heads..][..self.heads];
            // A pair of heads has the same product in both orders.
            let pairs: f32 = heads[..at].iter().map(|&g| row[g]).sum();
            sum += f64::from(row[h] + 2.0 * pairs);
        }
        sum
    }

    /// Returns the sum over tokens of |sum of W_h o_h over the heads h that the token does not compute|^2.
    pub fn loss(&self, scores: &Scores, heads: LayerHeads) -> f64 {
        let size = self.heads * self.heads;
        let tokens: Vec<(&[u16], &[f32])> =
            scores.tokens().zip(self.grams.chunks_exact(size)).collect();
        let selector = scores.selector(heads);
        let of_chunk = |tokens: &[(&[u16], &[f32])]| {
            let (mut active, mut left_out) = (vec![false; self.heads], Vec::new());
            let of_token = |&(order, gram): &(&[u16], &[f32])| {
                selector.select(order, &mut active);
                left_out.clear();
                left_out.extend((0..self.heads).filter(|&head| !active[head]));
                self.square(gram, &left_out)
            };
            tokens.iter().map(of_token).sum::<f64>()
        };
        tokens.par_chunks(TOKENS).map(of_chunk).collect::<Vec<f64>>().iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use moh_kernels::router::SharedHeads;
    use moh_model::RouterKind;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::selection::Ranking;

    #[test]
    fn the_loss_is_that_of_the_outputs_without_the_left_out_heads() {
        let (heads, head_dim, width, tokens) = (5, 4, 7, 150);
        let mut rng = StdRng::seed_from_u64(1);
        let mut random = |rows| {
            Array2::from_shape_fn((rows, heads * head_dim), |_| rng.random_range(-1f32..1.0))
        };
        let (outputs, weight, queries) = (random(tokens), random(width), random(tokens));
        let grams = HeadGrams::new(outputs.view(), weight.view(), heads);
        let mut scores = Scores::new(Ranking { router: RouterKind::QueryNorm, heads, group: 1 });
        scores.add(queries.as_slice().unwrap(), head_dim);
        for (shared, top_k) in [(vec![], 2), (vec![1, 4], 1), (vec![0, 1, 2], 0), (vec![3], 4)] {
            let layer = LayerHeads { shared: SharedHeads::from_heads(shared).unwrap(), top_k };
            let mut expected = 0f64;
            let mut active = vec![false; heads];
            for (token, order) in scores.tokens().enumerate() {
                scores.selector(layer).select(order, &mut active);
                assert_eq!(active.iter().filter(|&&on| on).count(), layer.active());
                let mut left_out = outputs.row(token).to_owned();
                for (at, value) in left_out.iter_mut().enumerate() {
                    if active[at / head_dim] {
                        *value = 0.0;
                    }
                }
                expected += weight.dot(&left_out).iter().map(|&y| f64::from(y * y)).sum::<f64>();
            }
            let found = grams.loss(&scores, layer);
            assert!((found - expected).abs() <= 1e-4 * expected.max(1e-3), "{found} {expected}");
        }
    }
}
