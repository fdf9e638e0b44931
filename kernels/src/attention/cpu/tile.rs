//! A tile of packed rows against the keys that they see, block by block.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::lanes::{self, Bounds, Deltas, KEYS, MOST_ROWS, Softmax, rows};
use super::problem::{Problem, Row};
use super::product::{Left, ROWS, Right, Sizes, product};

/// A key/value head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    /// `[key_length padded, D padded]`, zero where padded.
    pub keys: &'a [f32],
    /// The same shape.
    pub values: &'a [f32],
    pub head_dim: usize,
    /// D rounded up to [`ROWS`].
    pub padded: usize,
}

impl<'a> Head<'a> {
    /// Keys (or values) of a block times a tile's columns `[D, rows]`: `[keys, rows]`.
    #[inline(always)]
    fn scores<S: Simd>(
        self,
        simd: S,
        keys: &Range<usize>,
        of: &[f32],
        columns: &[f32],
        out: &mut [f32],
    ) {
        let sizes = Sizes { rows: keys.len(), depth: self.head_dim, columns: rows::<S>() };
        let data = &of[keys.start * self.padded..];
        let left = Left { data, row_stride: self.padded, column_stride: 1 };
        let right = Right { data: columns, stride: rows::<S>() };
        product(simd, sizes, left, right, out, rows::<S>(), false);
    }

    /// Adds the transpose of a block's keys (or values) times its scores `[keys, rows]` to
    /// `[D padded, rows]`.
    #[inline(always)]
    fn combine<S: Simd>(
        self,
        simd: S,
        keys: &Range<usize>,
        of: &[f32],
        scores: &[f32],
        out: &mut [f32],
    ) {
        let sizes = Sizes { rows: self.padded, depth: keys.len(), columns: rows::<S>() };
        let data = &of[keys.start * self.padded..];
        let left = Left { data, row_stride: 1, column_stride: self.padded };
        let right = Right { data: scores, stride: rows::<S>() };
        product(simd, sizes, left, right, out, rows::<S>(), true);
    }
}

/// The blocks of a range of keys, each a multiple of [`ROWS`] long.
fn blocks(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = keys.end;
    keys.step_by(KEYS).map(move |start| {
        let len = KEYS.min(end - start).next_multiple_of(ROWS);
        start..start + len
    })
}

/// Forward: returns the rows' maxima and sums.
pub(super) struct ForwardTile<'a> {
    pub problem: &'a Problem<'a>,
    pub head: Head<'a>,
    pub tile: &'a [Row],
    /// Scaled to base-2 scores, `[D, rows]`.
    pub q: &'a [f32],
    /// Of a block, `[KEYS, rows]`.
    pub scores: &'a mut [f32],
    /// Replaced by the outputs before the division by the sums, `[D padded, rows]`.
    pub o: &'a mut [f32],
}

impl WithSimd for ForwardTile<'_> {
    type Output = Softmax;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Softmax {
        let ForwardTile { problem, head, tile, q, scores, o } = self;
        let bounds = Bounds::new(problem, tile, rows::<S>());
        let mut softmax = Softmax::new();
        o.fill(0.0);
        for keys in blocks(problem.tile_keys(tile)) {
            let scores = &mut scores[..keys.len() * rows::<S>()];
            head.scores(simd, &keys, head.keys, q, scores);
            bounds.mask(simd, &keys, scores);
            softmax.block(simd, scores, o);
            head.combine(simd, &keys, head.values, scores, o);
        }
        softmax
    }
}

/// Backward: adds a tile's gradients and returns its delta.
///
/// `p` and `d_p` hold the tile's rows of all keys, since dS needs delta = sum(P dP), which is exact
/// where `<dO, O>` would have the output's rounding.
pub(super) struct BackwardTile<'a> {
    pub problem: &'a Problem<'a>,
    pub head: Head<'a>,
    pub tile: &'a [Row],
    pub log_sum_exp: &'a [f32],
    /// Scaled to base-2 scores, `[D, rows]`.
    pub q: &'a [f32],
    /// `[D, rows]`.
    pub d_o: &'a [f32],
    /// Scaled, `[rows, width]`.
    pub q_rows: &'a [f32],
    /// `[rows, width]`.
    pub d_o_rows: &'a [f32],
    /// D rounded up to the vector's length.
    pub width: usize,
    /// `[key_length padded, rows]`.
    pub p: &'a mut [f32],
    /// The same shape.
    pub d_p: &'a mut [f32],
    /// Replaced by the gradient of the queries before the scale, `[D padded, rows]`.
    pub d_q: &'a mut [f32],
    /// `[key_length padded, width]`; added to.
    pub d_keys: &'a mut [f32],
    /// The same.
    pub d_values: &'a mut [f32],
}

impl WithSimd for BackwardTile<'_> {
    type Output = [f32; MOST_ROWS];

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) -> [f32; MOST_ROWS] {
        let delta = self.probabilities(simd);
        self.gradients(simd, &delta);
        delta
    }
}

impl BackwardTile<'_> {
    /// Fills `p` and `d_p`; returns delta.
    #[inline(always)]
    fn probabilities<S: Simd>(&mut self, simd: S) -> [f32; MOST_ROWS] {
        let lanes = rows::<S>();
        let bounds = Bounds::new(self.problem, self.tile, lanes);
        let mut base2 = [0f32; MOST_ROWS];
        for (base2, row) in base2.iter_mut().zip(self.tile) {
            let value = self.log_sum_exp[row.token * self.problem.shape.heads + row.head];
            *base2 = value * std::f32::consts::LOG2_E;
        }
        let mut deltas = Deltas::new();
        let blocks = blocks(self.problem.tile_keys(self.tile));
        let p = self.p.chunks_mut(KEYS * lanes);
        for ((keys, p), d_p) in blocks.zip(p).zip(self.d_p.chunks_mut(KEYS * lanes)) {
            let (p, d_p) = (&mut p[..keys.len() * lanes], &mut d_p[..keys.len() * lanes]);
            self.head.scores(simd, &keys, self.head.keys, self.q, p);
            bounds.mask(simd, &keys, p);
            lanes::probabilities(simd, &base2, p);
            self.head.scores(simd, &keys, self.head.values, self.d_o, d_p);
            deltas.block(simd, p, d_p);
        }
        deltas.finish()
    }

    /// Adds the gradients; dP becomes dS and, for the values' gradient, P takes the heads' weights
    /// on.
    #[inline(always)]
    fn gradients<S: Simd>(&mut self, simd: S, delta: &[f32; MOST_ROWS]) {
        let (lanes, width) = (rows::<S>(), self.width);
        let mut weights = [0f32; MOST_ROWS];
        for (weight, &row) in weights.iter_mut().zip(self.tile) {
            *weight = self.problem.weight(row);
        }
        self.d_q.fill(0.0);
        let blocks = blocks(self.problem.tile_keys(self.tile));
        let p = self.p.chunks_mut(KEYS * lanes);
        for ((keys, p), d_p) in blocks.zip(p).zip(self.d_p.chunks_mut(KEYS * lanes)) {
            let (p, d_p) = (&mut p[..keys.len() * lanes], &mut d_p[..keys.len() * lanes]);
            if self.problem.weights.is_some() {
                lanes::weigh(simd, &weights, p);
            }
            lanes::score_gradients(simd, p, delta, d_p);
            let sizes = Sizes { rows: keys.len(), depth: lanes, columns: width };
            let part = keys.start * width..keys.end * width;
            let left = Left { data: p, row_stride: lanes, column_stride: 1 };
            let right = Right { data: self.d_o_rows, stride: width };
            product(simd, sizes, left, right, &mut self.d_values[part.clone()], width, true);
            let left = Left { data: d_p, ..left };
            let right = Right { data: self.q_rows, stride: width };
            product(simd, sizes, left, right, &mut self.d_keys[part], width, true);
            self.head.combine(simd, &keys, self.head.keys, d_p, self.d_q);
        }
    }
}
