//! A tile of packed rows against blocks of keys. The rows lie along the vectors (lane r is row r of
//! the tile), so that the softmax needs no step across lanes: scores are `[keys, rows]`, queries and
//! outputs `[D, rows]`.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::problem::{Problem, Row};
use super::product::ROWS;

/// Keys of a block: its scores stay in the first cache.
pub(super) const KEYS: usize = 64;
/// The most rows of a tile: two vectors of 16 numbers.
pub(super) const MOST_ROWS: usize = 32;

/// Rows of a tile on this machine.
#[inline(always)]
pub(super) fn rows<S: Simd>() -> usize {
    2 * S::F32_LANES
}

/// Rows of a tile on this machine, asked for from outside vector code.
pub(super) struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        rows::<S>()
    }
}

/// Rows of a gathered key/value head: the last block may reach beyond the last key.
pub(super) fn padded_rows(keys: usize) -> usize {
    keys + ROWS
}

/// The keys that each row of a tile sees, as numbers that compare lane by lane.
pub(super) struct Bounds {
    first: [f32; MOST_ROWS],
    end: [f32; MOST_ROWS],
    /// Keys that every row sees.
    common: Range<usize>,
}

impl Bounds {
    /// Lanes beyond the tile's rows see no key.
    pub(super) fn new(problem: &Problem<'_>, tile: &[Row], lanes: usize) -> Self {
        let mut bounds =
            Bounds { first: [0.0; MOST_ROWS], end: [0.0; MOST_ROWS], common: 0..usize::MAX };
        for (lane, row) in tile.iter().enumerate() {
            let visible = problem.visible(row.token);
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

    /// Puts minus infinity where a row does not see a key of the block.
    #[inline(always)]
    pub(super) fn mask<S: Simd>(&self, simd: S, keys: &Range<usize>, scores: &mut [f32]) {
        if self.common.start <= keys.start && keys.end <= self.common.end {
            return;
        }
        let (first, end) = (vectors::<S>(&self.first), vectors::<S>(&self.end));
        let unseen = simd.splat_f32s(f32::NEG_INFINITY);
        for (key, scores) in keys.clone().zip(lanes_mut::<S>(scores).chunks_exact_mut(2)) {
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

/// The two vectors of a tile's lanes.
#[inline(always)]
fn vectors<S: Simd>(lanes: &[f32; MOST_ROWS]) -> [S::f32s; 2] {
    let (vectors, _) = S::as_simd_f32s(lanes);
    [vectors[0], vectors[1]]
}

/// Whole vectors of a slice.
#[inline(always)]
fn lanes_mut<S: Simd>(x: &mut [f32]) -> &mut [S::f32s] {
    S::as_mut_simd_f32s(x).0
}

/// 2^x to within 1.5e-7 of itself for x <= 127, and 0 below -126.
///
/// x = k + f with k the nearest integer, and a polynomial of degree 5 for 2^f (its coefficients make
/// the largest relative error least, the constant one being set to 1).
#[inline(always)]
fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to the nearest integer
    const COEFFICIENTS: [f32; 5] =
        [1.327_647_2e-3, 9.675_541e-3, 5.550_713_3e-2, 2.402_212e-1, 6.931_469_7e-1];
    let round = simd.splat_f32s(ROUND);
    let shifted = simd.add_f32s(x, round);
    let f = simd.sub_f32s(x, simd.sub_f32s(shifted, round));
    let mut p = simd.splat_f32s(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        p = simd.mul_add_e_f32s(p, f, simd.splat_f32s(*coefficient));
    }
    p = simd.mul_add_e_f32s(p, f, simd.splat_f32s(1.0));
    // The low bits of `shifted` hold k; moved to the exponent they multiply by 2^k.
    let k = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let scaled = simd.transmute_f32s_u32s(simd.add_u32s(simd.transmute_u32s_f32s(p), k));
    // In this order a score that is not a number stays one.
    let tiny = simd.less_than_f32s(x, simd.splat_f32s(-126.0));
    simd.select_f32s(tiny, simd.splat_f32s(0.0), scaled)
}

/// Running maximum and sum of every row's exponentials, to base 2.
pub(super) struct Softmax {
    pub maximum: [f32; MOST_ROWS],
    pub sum: [f32; MOST_ROWS],
}

impl Softmax {
    /// Below every score: finite, so that a block in which a row sees nothing leaves zeros, not NaN.
    const NOTHING: f32 = -1e30;

    pub(super) fn new() -> Self {
        Softmax { maximum: [Self::NOTHING; MOST_ROWS], sum: [0.0; MOST_ROWS] }
    }

    /// Takes a block's scores `[keys, rows]` in, turns them into exponentials less the new maximum, and
    /// scales the output `[D, rows]` so far to it.
    #[inline(always)]
    pub(super) fn block<S: Simd>(&mut self, simd: S, scores: &mut [f32], output: &mut [f32]) {
        let before = vectors::<S>(&self.maximum);
        let mut maximum = before;
        let scores = lanes_mut::<S>(scores);
        for scores in scores.chunks_exact(2) {
            for v in 0..2 {
                maximum[v] = simd.max_f32s(maximum[v], scores[v]);
            }
        }
        let mut sum = vectors::<S>(&self.sum);
        let mut factor = sum;
        for v in 0..2 {
            factor[v] = exp2(simd, simd.sub_f32s(before[v], maximum[v]));
            sum[v] = simd.mul_f32s(sum[v], factor[v]);
        }
        for scores in scores.chunks_exact_mut(2) {
            for v in 0..2 {
                scores[v] = exp2(simd, simd.sub_f32s(scores[v], maximum[v]));
                sum[v] = simd.add_f32s(sum[v], scores[v]);
            }
        }
        for output in lanes_mut::<S>(output).chunks_exact_mut(2) {
            for v in 0..2 {
                output[v] = simd.mul_f32s(output[v], factor[v]);
            }
        }
        lanes_mut::<S>(&mut self.maximum)[..2].copy_from_slice(&maximum);
        lanes_mut::<S>(&mut self.sum)[..2].copy_from_slice(&sum);
    }
}

/// Turns scores `[keys, rows]` into probabilities by the rows' log-sum-exp, to base 2.
#[inline(always)]
pub(super) fn probabilities<S: Simd>(simd: S, log_sum_exp: &[f32; MOST_ROWS], scores: &mut [f32]) {
    let log_sum_exp = vectors::<S>(log_sum_exp);
    for scores in lanes_mut::<S>(scores).chunks_exact_mut(2) {
        for v in 0..2 {
            scores[v] = exp2(simd, simd.sub_f32s(scores[v], log_sum_exp[v]));
        }
    }
}

/// Sums over a tile's keys of P and of P dP, row by row.
pub(super) struct Deltas {
    p: [f32; MOST_ROWS],
    p_d_p: [f32; MOST_ROWS],
}

impl Deltas {
    pub(super) fn new() -> Self {
        Deltas { p: [0.0; MOST_ROWS], p_d_p: [0.0; MOST_ROWS] }
    }

    /// Takes a block's P and dP in, both `[keys, rows]`.
    #[inline(always)]
    pub(super) fn block<S: Simd>(&mut self, simd: S, p: &[f32], d_p: &[f32]) {
        let (mut sum, mut inner) = (vectors::<S>(&self.p), vectors::<S>(&self.p_d_p));
        let (p, d_p) = (S::as_simd_f32s(p).0, S::as_simd_f32s(d_p).0);
        for (p, d_p) in p.chunks_exact(2).zip(d_p.chunks_exact(2)) {
            for v in 0..2 {
                sum[v] = simd.add_f32s(sum[v], p[v]);
                inner[v] = simd.mul_add_e_f32s(p[v], d_p[v], inner[v]);
            }
        }
        lanes_mut::<S>(&mut self.p)[..2].copy_from_slice(&sum);
        lanes_mut::<S>(&mut self.p_d_p)[..2].copy_from_slice(&inner);
    }

    /// delta = sum(P dP). P sums to 1 but for the rounding of the log-sum-exp; divided by its sum,
    /// dS sums to 0 even where a row's gradient vanishes, as with a single key.
    pub(super) fn finish(self) -> [f32; MOST_ROWS] {
        std::array::from_fn(
            |lane| if self.p[lane] == 0.0 { 0.0 } else { self.p_d_p[lane] / self.p[lane] },
        )
    }
}

/// Multiplies P `[keys, rows]` by the rows' weights.
#[inline(always)]
pub(super) fn weigh<S: Simd>(simd: S, weights: &[f32; MOST_ROWS], p: &mut [f32]) {
    let weights = vectors::<S>(weights);
    for p in lanes_mut::<S>(p).chunks_exact_mut(2) {
        for v in 0..2 {
            p[v] = simd.mul_f32s(p[v], weights[v]);
        }
    }
}

/// Turns dP into dS = P (dP - delta), all `[keys, rows]`.
#[inline(always)]
pub(super) fn score_gradients<S: Simd>(
    simd: S,
    p: &[f32],
    delta: &[f32; MOST_ROWS],
    d_p: &mut [f32],
) {
    let delta = vectors::<S>(delta);
    let p = S::as_simd_f32s(p).0;
    for (p, d_p) in p.chunks_exact(2).zip(lanes_mut::<S>(d_p).chunks_exact_mut(2)) {
        for v in 0..2 {
            d_p[v] = simd.mul_f32s(p[v], simd.sub_f32s(d_p[v], delta[v]));
        }
    }
}
