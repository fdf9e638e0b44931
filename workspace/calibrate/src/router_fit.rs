//! The rows of a learned router, fitted to the heads' contributions: the ridge least-squares solution of x_t W^T = y_t,
//! with x_t the block's normed input and
//!
//! ```text
//! c_{t,h} = |W_O^h o_{t,h}|        y_{t,h} = a (c_{t,h} - mean_h c_{t,h}) / s
//! ```
//!
//! s is the layer's standard deviation over the heads of a token, so that a is the logits' standard deviation.
//! `docs/design.md` has the reasons.

use moh_kernels::Backend;
use moh_model::RouterKind;
use ndarray::{Array2, ArrayView2, Axis, s};
use rayon::prelude::*;

use crate::products::ProductSums;
use crate::ridge::Products;
use crate::{RIDGE, Result, matrix};

/// Number of tokens that a thread computes at a time.
const TOKENS: usize = 64;
/// The logits' standard deviation for a router that weighs heads. It is small, so that the weights are about 1.
const WEIGHING_SPREAD: f64 = 0.3;

/// The fitted rows of a layer's router.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterFit {
    /// `self_attn.router.weight`, `[heads, hidden_size]`.
    pub rows: Vec<f32>,
    /// The share of the targets' variance over the heads of a token that the logits explain, on the tokens of the fit.
    pub explained: f64,
}

pub(crate) struct RouterSums<'a, B: Backend> {
    sums: ProductSums<'a, B>,
    heads: usize,
    /// The standard deviation of the logits over the heads of a token.
    spread: f64,
    tokens: usize,
}

impl<'a, B: Backend> RouterSums<'a, B> {
    /// Creates empty sums for a layer with `heads` heads, each a target of `sums`, and for the matrix of `router`.
    pub fn new(sums: ProductSums<'a, B>, heads: usize, router: RouterKind) -> Self {
        let spread = if router.weighs() { WEIGHING_SPREAD } else { 1.0 };
        RouterSums { sums, heads, spread, tokens: 0 }
    }

    /// Adds a pass: the block's normed input, and the norms of the heads' contributions.
    pub fn add(&mut self, normed: &[f32], norms: &[f32]) -> Result<()> {
        let mut targets = norms.to_vec();
        for of_token in targets.chunks_exact_mut(self.heads) {
            let mean = of_token.iter().sum::<f32>() / self.heads as f32;
            of_token.iter_mut().for_each(|target| *target -= mean);
        }
        self.tokens += norms.len() / self.heads;
        self.sums.add(normed, &targets)
    }

    /// Returns the fit to the tokens so far, and resets the sums to zero.
    pub fn take(&mut self) -> Result<RouterFit> {
        let (products, tokens) = (self.sums.take(), std::mem::take(&mut self.tokens));
        fit(&products, tokens, self.spread)
    }
}

/// Returns the rows from the sums over `tokens` tokens of the centred norms, which are not divided by s yet; `spread`
/// is a.
fn fit(products: &Products, tokens: usize, spread: f64) -> Result<RouterFit> {
    let (heads, width) = products.cross.dim();
    let fit = products.fit(Array2::zeros((heads, width)).view(), RIDGE)?;
    let variance = products.target / (tokens * heads.saturating_sub(1)).max(1) as f64;
    // If heads contribute alike, logits cannot distinguish them.
    let scale = if variance > 0.0 { spread / variance.sqrt() } else { 0.0 };
    let rows = fit.iter().map(|&weight| (weight * scale) as f32).collect();
    Ok(RouterFit { rows, explained: 1.0 - products.error(fit.view()) })
}

/// Returns |W_h o_h| for each head h of each token, `[tokens, heads]`. The outputs o are `[tokens, heads * head_dim]`,
/// the output projection W is `[width, heads * head_dim]`, and W_h are the columns of head h.
pub(crate) fn contributions(
    outputs: &[f32],
    weight: ArrayView2<'_, f32>,
    heads: usize,
) -> Vec<f32> {
    let (inputs, head_dim) = (weight.ncols(), weight.ncols() / heads);
    let columns = |head: usize| s![.., head * head_dim..(head + 1) * head_dim];
    // |W_h o_h|^2 = o_h^T (W_h^T W_h) o_h takes head_dim^2 products, not `width` times head_dim.
    let squares: Vec<Array2<f32>> = (0..heads)
        .map(|head| weight.slice(columns(head)))
        .map(|weight| weight.t().dot(&weight))
        .collect();
    let outputs: Array2<f32> = matrix(outputs, inputs);
    let chunks: Vec<_> = outputs.axis_chunks_iter(Axis(0), TOKENS).collect();
    let of_chunk = |outputs: ArrayView2<'_, f32>| {
        let mut norms = vec![0f32; outputs.nrows() * heads];
        for (head, square) in squares.iter().enumerate() {
            let of_head = outputs.slice(columns(head));
            let mapped = of_head.dot(square);
            let rows = of_head.rows().into_iter().zip(mapped.rows());
            for ((output, mapped), norms) in rows.zip(norms.chunks_exact_mut(heads)) {
                // Rounding can leave a square below zero.
                norms[head] = output.dot(&mapped).max(0.0).sqrt();
            }
        }
        norms
    };
    let norms: Vec<Vec<f32>> = chunks.into_par_iter().map(of_chunk).collect();
    norms.concat()
}

#[cfg(test)]
mod tests {
    use moh_kernels::Cpu;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::products::ProductBuffers;

    fn random(rng: &mut StdRng, len: usize) -> Vec<f32> {
        (0..len).map(|_| rng.random_range(-1f32..1.0)).collect()
    }

    #[test]
    fn contributions_are_norms_of_projected_outputs() {
        let (heads, head_dim, width, tokens) = (3, 4, 7, 130);
        let mut rng = StdRng::seed_from_u64(1);
        let weight: Array2<f32> =
            matrix(&random(&mut rng, width * heads * head_dim), heads * head_dim);
        let outputs = random(&mut rng, tokens * heads * head_dim);
        let found = contributions(&outputs, weight.view(), heads);
        let of_tokens = outputs.chunks_exact(heads * head_dim).zip(found.chunks_exact(heads));
        for (output, norms) in of_tokens {
            for (head, &norm) in norms.iter().enumerate() {
                let part = head * head_dim..(head + 1) * head_dim;
                let projected = |row: usize| {
                    part.clone().map(|at| f64::from(weight[[row, at]] * output[at])).sum::<f64>()
                };
                let expected = (0..width).map(|row| projected(row).powi(2)).sum::<f64>().sqrt();
                assert!((f64::from(norm) - expected).abs() < 1e-5, "{norm} {expected}");
            }
        }
    }

    /// Returns inputs, norms that are a linear map of the inputs plus a shift of all heads, and the map without its
    /// mean.
    fn planted(rng: &mut StdRng, size: f32, tokens: usize) -> (Vec<f32>, Vec<f32>, Array2<f64>) {
        let (width, heads) = (10, 6);
        let inputs = random(rng, tokens * width);
        let map: Array2<f32> = matrix(&random(rng, heads * width), width);
        let logits = matrix::<f32>(&inputs, width).dot(&map.t());
        let shift = random(rng, tokens);
        let norm =
            |((token, _), logit): ((usize, usize), &f32)| size * (logit + 20.0 + shift[token]);
        let norms = logits.indexed_iter().map(norm).collect();
        let mean = map.mean_axis(Axis(0)).unwrap();
        (inputs, norms, (map - mean).mapv(f64::from))
    }

    fn sums(tokens: usize, width: usize, heads: usize) -> ProductSums<'static, Cpu> {
        ProductSums::new(&Cpu, ProductBuffers::new(&Cpu, tokens, width, heads).unwrap(), &|| false)
    }

    #[test]
    fn a_linear_map_is_found_at_any_size() {
        for (router, size, spread) in [
            (RouterKind::Linear, 1e-3, 1.0),
            (RouterKind::Linear, 1e3, 1.0),
            (RouterKind::OneStage, 1.0, 0.3),
            (RouterKind::TwoStage, 1e3, 0.3),
        ] {
            let mut rng = StdRng::seed_from_u64(2);
            let (inputs, norms, map) = planted(&mut rng, size, 512);
            let mut sums = RouterSums::new(sums(256, 10, 6), 6, router);
            for (inputs, norms) in inputs.chunks(256 * 10).zip(norms.chunks(256 * 6)) {
                sums.add(inputs, norms).unwrap();
            }
            let found = sums.take().unwrap();
            assert!(found.explained > 0.999, "{}", found.explained);
            let rows: Array2<f64> = matrix(&found.rows, 10);
            // The map up to its scale: the logits' standard deviation over heads is the router's.
            let scale = (&rows * &map).sum() / (&map * &map).sum();
            assert!((&rows - &map * scale).iter().all(|d| d.abs() < 1e-2 * scale), "{size}");
            let logits = matrix::<f64>(&inputs, 10).dot(&rows.t());
            let variance = logits.iter().map(|z| z * z).sum::<f64>() / (512.0 * 5.0);
            assert!((variance.sqrt() / spread - 1.0).abs() < 5e-3, "{variance}");
        }
    }

    #[test]
    fn heads_that_contribute_alike_have_equal_logits() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut sums = RouterSums::new(sums(64, 5, 4), 4, RouterKind::Linear);
        sums.add(&random(&mut rng, 64 * 5), &[2.5; 64 * 4]).unwrap();
        let found = sums.take().unwrap();
        assert!(found.rows.iter().all(|&row| row == 0.0), "{found:?}");
    }
}
