//! A tile of packed rows against blocks of keys. Lane r of the vectors is row r of the tile, so
//! that the softmax has no operation across lanes: scores are `[keys, rows]`, queries and outputs
//! `[D, rows]`.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::exp2::exp2;
use super::factor::{Block, Factor};
use super::matmul::ROWS;
use super::rows::Row;
use crate::attention::AttentionArgs;
use crate::cpu::Cpu;

/// Keys of a block; its scores stay in the first-level cache.
pub(super) const KEYS: usize = 64;
/// Maximum rows of a tile: two vectors of 16 elements.
pub(super) const MAX_ROWS: usize = 32;

/// The score of a key that a row does not see: its exponential is 0, and no intermediate value is
/// infinite.
const UNSEEN: f32 = f32::MIN;

/// Returns the lanes of a tile on this machine, the maximum of its rows.
#[inline(always)]
pub(super) fn num_lanes<S: Simd>() -> usize {
    2 * S::F32_LANES
}

/// Computes [`num_lanes`] for callers outside vector code.
pub(super) struct NumLanes;

impl WithSimd for NumLanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        num_lanes::<S>()
    }
}

/// Returns the rows of a gathered key/value head, in whole factors: the last block may extend beyond the last key.
pub(super) fn padded_rows<F: Factor>(keys: usize) -> usize {
    (keys + ROWS).next_multiple_of(F::TERMS)
}

/// The keys that each row of a tile sees, as f32 vectors for comparisons lane by lane.
pub(super) struct Bounds {
    first: [f32; MAX_ROWS],
    end: [f32; MAX_ROWS],
    /// Keys that every row sees.
    common: Range<usize>,
}

impl Bounds {
    /// Creates the bounds. Lanes beyond the tile's rows see no key.
    pub(super) fn new(args: &AttentionArgs<'_, Cpu>, tile: &[Row], lanes: usize) -> Self {
        let mut bounds =
            Bounds { first: [0.0; MAX_ROWS], end: [0.0; MAX_ROWS], common: 0..usize::MAX };
        for (lane, &row) in tile.iter().enumerate() {
            let visible = args.visible(row);
            bounds.first[lane] = visible.start as f32;
            bounds.end[lane] = visible.end as f32;
            bounds.common.start = bounds.common.start.max(visible.start);
            bounds.common.end = bounds.common.end.min(visible.end);
        }
        if tile.len() < lanes {
            bounds.common = 0..0;
        }
        bounds
    }

    /// Sets the scores of the block's keys that a row does not see to [`UNSEEN`].
    #[inline(always)]
    pub(super) fn mask<S: Simd>(&self, simd: S, keys: &Range<usize>, scores: &mut [f32]) {
        if self.common.start <= keys.start && keys.end <= self.common.end {
            return;
        }
        let (first, end) = (tile_vectors::<S>(&self.first), tile_vectors::<S>(&self.end));
        let unseen = simd.splat_f32s(UNSEEN);
        for (key, scores) in keys.clone().zip(as_vectors_mut::<S>(scores).chunks_exact_mut(2)) {
            let key = simd.splat_f32s(key as f32);
            for v in 0..2 {
                let seen = simd.less_than_or_equal_f32s(first[v], key);
                let scores = &mut scores[v];
                *scores = simd.select_f32s(seen, *scores, unseen);
                let seen = simd.less_than_f32s(key, end[v]);
                *scores = simd.select_f32s(seen, *scores, unseen);
            }
        }
    }
}

/// Returns one value for each lane of a tile, as two vectors.
#[inline(always)]
fn tile_vectors<S: Simd>(lanes: &[f32; MAX_ROWS]) -> [S::f32s; 2] {
    let (vectors, _) = S::as_simd_f32s(lanes);
    [vectors[0], vectors[1]]
}

/// Returns the vectors of two keys of a block.
#[inline(always)]
fn keys<S: Simd>(block: &[f32], two: usize) -> [[S::f32s; 2]; 2] {
    let vectors = &as_vectors::<S>(block)[4 * two..][..4];
    [[vectors[0], vectors[1]], [vectors[2], vectors[3]]]
}

/// Returns a slice as whole vectors.
#[inline(always)]
fn as_vectors<S: Simd>(x: &[f32]) -> &[S::f32s] {
    S::as_simd_f32s(x).0
}

/// Returns a slice as whole vectors.
#[inline(always)]
fn as_vectors_mut<S: Simd>(x: &mut [f32]) -> &mut [S::f32s] {
    S::as_mut_simd_f32s(x).0
}

/// Returns a score's exponent of 2, relative to `offset`.
#[inline(always)]
fn exponent<S: Simd>(simd: S, score: S::f32s, scale: S::f32s, offset: S::f32s) -> S::f32s {
    simd.sub_f32s(simd.mul_f32s(score, scale), offset)
}

/// The running maximum of every row's scores, and the sum of their exponentials.
pub(super) struct Softmax {
    /// The factor that turns scores into exponents of 2.
    scale: f32,
    /// Maxima of the scores times the scale.
    pub maximum: [f32; MAX_ROWS],
    pub sum: [f32; MAX_ROWS],
}

impl Softmax {
    /// Less than every score but greater than [`UNSEEN`] times any scale. If a row sees no key of a block,
    /// its exponentials are then zeros.
    const NOTHING: f32 = -1e30;

    pub(super) fn new(scale: f32) -> Self {
        Softmax { scale, maximum: [Self::NOTHING; MAX_ROWS], sum: [0.0; MAX_ROWS] }
    }

    /// Updates the maxima with a block's scores `[keys, rows]`. Replaces the scores by powers of 2
    /// relative to the new maxima, and rescales the output `[D, rows]` so far.
    #[inline(always)]
    pub(super) fn block<S: Simd, F: Factor>(
        &mut self,
        simd: S,
        scores: &mut Block<'_, F>,
        output: &mut [f32],
    ) {
        let (before, scale) = (tile_vectors::<S>(&self.maximum), simd.splat_f32s(self.scale));
        let mut maximum = [simd.splat_f32s(f32::MIN); 2];
        for scores in as_vectors::<S>(scores.elements).chunks_exact(2) {
            for v in 0..2 {
                maximum[v] = simd.max_f32s(maximum[v], scores[v]);
            }
        }
        for v in 0..2 {
            maximum[v] = simd.max_f32s(before[v], simd.mul_f32s(maximum[v], scale));
        }
        let mut sum = tile_vectors::<S>(&self.sum);
        let mut factor = sum;
        for v in 0..2 {
            factor[v] = exp2(simd, simd.sub_f32s(before[v], maximum[v]));
            sum[v] = simd.mul_f32s(sum[v], factor[v]);
        }
        for two in 0..as_vectors::<S>(scores.elements).len() / 4 {
            let mut keys = keys::<S>(scores.elements, two);
            for key in &mut keys {
                for v in 0..2 {
                    key[v] = exp2(simd, exponent(simd, key[v], scale, maximum[v]));
                    sum[v] = simd.add_f32s(sum[v], key[v]);
                }
            }
            F::store(simd, scores, two, keys);
        }
        for output in as_vectors_mut::<S>(output).chunks_exact_mut(2) {
            for v in 0..2 {
                output[v] = simd.mul_f32s(output[v], factor[v]);
            }
        }
        as_vectors_mut::<S>(&mut self.maximum)[..2].copy_from_slice(&maximum);
        as_vectors_mut::<S>(&mut self.sum)[..2].copy_from_slice(&sum);
    }
}

/// Replaces scores `[keys, rows]` by probabilities, given the rows' log-sum-exp. The log-sum-exp and the
/// scores times the scale are both to base 2.
#[inline(always)]
pub(super) fn probabilities<S: Simd>(
    simd: S,
    scale: f32,
    log_sum_exp: &[f32; MAX_ROWS],
    scores: &mut [f32],
) {
    let (scale, log_sum_exp) = (simd.splat_f32s(scale), tile_vectors::<S>(log_sum_exp));
    for scores in as_vectors_mut::<S>(scores).chunks_exact_mut(2) {
        for v in 0..2 {
            scores[v] = exp2(simd, exponent(simd, scores[v], scale, log_sum_exp[v]));
        }
    }
}

/// Sums over a tile's keys of P and of P dP, row by row.
pub(super) struct Deltas {
    p: [f32; MAX_ROWS],
    p_d_p: [f32; MAX_ROWS],
}

impl Deltas {
    pub(super) fn new() -> Self {
        Deltas { p: [0.0; MAX_ROWS], p_d_p: [0.0; MAX_ROWS] }
    }

    /// Adds a block's P and dP, both `[keys, rows]`, to the sums.
    #[inline(always)]
    pub(super) fn block<S: Simd>(&mut self, simd: S, p: &[f32], d_p: &[f32]) {
        let (mut sum, mut inner) = (tile_vectors::<S>(&self.p), tile_vectors::<S>(&self.p_d_p));
        let (p, d_p) = (as_vectors::<S>(p), as_vectors::<S>(d_p));
        for (p, d_p) in p.chunks_exact(2).zip(d_p.chunks_exact(2)) {
            for v in 0..2 {
                sum[v] = simd.add_f32s(sum[v], p[v]);
                inner[v] = simd.mul_add_e_f32s(p[v], d_p[v], inner[v]);
            }
        }
        as_vectors_mut::<S>(&mut self.p)[..2].copy_from_slice(&sum);
        as_vectors_mut::<S>(&mut self.p_d_p)[..2].copy_from_slice(&inner);
    }

    /// Returns delta = sum(P dP) / sum(P). P sums to 1 except for the rounding of the log-sum-exp. With the
    /// division dS sums to 0 even if a row's gradient vanishes, as with a single key.
    pub(super) fn finish(self) -> [f32; MAX_ROWS] {
        std::array::from_fn(
            |lane| if self.p[lane] == 0.0 { 0.0 } else { self.p_d_p[lane] / self.p[lane] },
        )
    }
}

/// Multiplies P by the rows' weights, if the rows have weights, and replaces dP by dS = P (dP - delta).
#[inline(always)]
pub(super) fn score_gradients<S: Simd, F: Factor>(
    simd: S,
    weights: Option<&[f32; MAX_ROWS]>,
    delta: &[f32; MAX_ROWS],
    p: &mut Block<'_, F>,
    d_p: &mut Block<'_, F>,
) {
    let (weights, delta) = (weights.map(tile_vectors::<S>), tile_vectors::<S>(delta));
    for two in 0..as_vectors::<S>(p.elements).len() / 4 {
        let (mut p_keys, mut d_keys) = (keys::<S>(p.elements, two), keys::<S>(d_p.elements, two));
        for (p, d_p) in p_keys.iter_mut().zip(&mut d_keys) {
            for v in 0..2 {
                if let Some(weights) = weights {
                    p[v] = simd.mul_f32s(p[v], weights[v]);
                }
                d_p[v] = simd.mul_f32s(p[v], simd.sub_f32s(d_p[v], delta[v]));
            }
        }
        if F::TERMS > 1 || weights.is_some() {
            F::store(simd, p, two, p_keys);
        }
        F::store(simd, d_p, two, d_keys);
    }
}
