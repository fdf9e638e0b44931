//! A tile of packed rows against the keys that they see, block by block.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::factor::{Block, Factor};
use super::lanes::{self, Bounds, Deltas, KEYS, MAX_ROWS, Softmax, num_lanes};
use super::matmul::{Left, Matmul, ROWS, Sizes};
use super::rows::Row;
use crate::attention::AttentionArgs;
use crate::cpu::Cpu;

#[derive(Clone, Copy)]
pub(super) struct Head {
    /// D rounded up to [`ROWS`].
    pub padded: usize,
}

impl Head {
    /// Multiplies a block's keys (or values) `[keys, D padded / TERMS]` by a tile's columns
    /// `[D padded / TERMS, rows]`: `[keys, rows]`.
    #[inline(always)]
    fn scores<S: Simd, F: Factor>(
        self,
        simd: S,
        keys: &Range<usize>,
        of: &[F],
        columns: &[F],
        out: &mut [f32],
    ) {
        let depth = self.padded / F::TERMS;
        let sizes = Sizes { rows: keys.len(), depth, columns: num_lanes::<S>() };
        let data = &of[keys.start * depth..];
        let left = Left { data, row_stride: depth, column_stride: 1 };
        Matmul { sizes, left, right: columns }.multiply(simd, out, false);
    }

    /// Adds the transpose of a block's keys (or values) `[keys / TERMS, D padded]` times its scores
    /// `[keys / TERMS, rows]` to `[D padded, rows]`.
    #[inline(always)]
    fn combine<S: Simd, F: Factor>(
        self,
        simd: S,
        keys: &Range<usize>,
        of: &[F],
        scores: &[F],
        out: &mut [f32],
    ) {
        let (first, depth) = (keys.start / F::TERMS, keys.len() / F::TERMS);
        let sizes = Sizes { rows: self.padded, depth, columns: num_lanes::<S>() };
        let data = &of[first * self.padded..];
        let left = Left { data, row_stride: 1, column_stride: self.padded };
        Matmul { sizes, left, right: scores }.multiply(simd, out, true);
    }
}

/// Returns the blocks of a range of keys. Their lengths are multiples of [`ROWS`], and the first block starts at
/// an even key, so that both keys of a pair are in the same block.
fn blocks(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = keys.end;
    (keys.start & !1..end).step_by(KEYS).map(move |start| {
        let len = KEYS.min(end - start).next_multiple_of(ROWS);
        start..start + len
    })
}

/// The forward pass of a tile; returns the rows' maxima and sums.
pub(super) struct ForwardTile<'a, 'v, F> {
    pub args: &'a AttentionArgs<'v, Cpu>,
    pub head: Head,
    /// `[key_length padded, D padded / TERMS]`, zero where padded.
    pub keys: &'a [F],
    /// `[key_length padded / TERMS, D padded]`, zero where padded.
    pub values: &'a [F],
    pub tile: &'a [Row],
    /// `[D padded / TERMS, rows]`.
    pub q: &'a [F],
    /// Scores of a block, `[KEYS, rows]`.
    pub scores: &'a mut [f32],
    /// The exponentials of a block's scores as factors, `[KEYS / TERMS, rows]`.
    pub factors: &'a mut [F],
    /// Overwritten with the outputs before the division by the sums, `[D padded, rows]`.
    pub o: &'a mut [f32],
}

impl<F: Factor> WithSimd for ForwardTile<'_, '_, F> {
    type Output = Softmax;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Softmax {
        let ForwardTile { args, head, keys: of_keys, values, tile, q, scores, factors, o } = self;
        let bounds = Bounds::new(args, tile, num_lanes::<S>());
        let mut softmax = Softmax::new(args.base2_scale());
        o.fill(0.0);
        for keys in blocks(args.tile_keys(tile)) {
            let len = keys.len() * num_lanes::<S>();
            let elements = &mut scores[..len];
            head.scores(simd, &keys, of_keys, q, elements);
            bounds.mask(simd, &keys, elements);
            let along_keys = &mut factors[..len / F::TERMS];
            let mut block = Block { elements, along_keys, along_rows: &mut [] };
            softmax.block(simd, &mut block, o);
            head.combine(simd, &keys, values, block.factors_along_keys(), o);
        }
        softmax
    }
}

/// The backward pass of a tile; adds its gradients and returns its delta.
///
/// `p` and `d_p` contain the tile's rows of all keys, since dS requires delta = sum(P dP). The
/// equivalent `<dO, O>` would include the rounding of the output.
pub(super) struct BackwardTile<'a, 'v, F> {
    pub args: &'a AttentionArgs<'v, Cpu>,
    pub head: Head,
    /// `[key_length padded, D padded / TERMS]`, zero where padded.
    pub keys: &'a [F],
    /// The same keys, `[key_length padded / TERMS, D padded]`.
    pub keys_along_rows: &'a [F],
    /// The values, in the layout of `keys`.
    pub values: &'a [F],
    pub tile: &'a [Row],
    pub log_sum_exp: &'a [f32],
    /// `[D padded / TERMS, rows]`.
    pub q: &'a [F],
    /// `[D padded / TERMS, rows]`.
    pub d_o: &'a [F],
    /// `[rows / TERMS, width]`.
    pub q_rows: &'a [F],
    /// `[rows / TERMS, width]`.
    pub d_o_rows: &'a [F],
    /// D rounded up to whole vectors.
    pub width: usize,
    /// `[key_length padded, rows]`.
    pub p: &'a mut [f32],
    /// The same shape as `p`.
    pub d_p: &'a mut [f32],
    /// A block's P along its rows, dS along its keys and along its rows, `KEYS * rows / TERMS` each.
    pub factors: [&'a mut [F]; 3],
    /// Overwritten with the gradient of the queries before the scale, `[D padded, rows]`.
    pub d_q: &'a mut [f32],
    /// Accumulated gradients of the keys before the scale, `[key_length padded, width]`.
    pub d_keys: &'a mut [f32],
    /// Accumulated gradients of the values, `[key_length padded, width]`.
    pub d_values: &'a mut [f32],
}

impl<F: Factor> WithSimd for BackwardTile<'_, '_, F> {
    type Output = [f32; MAX_ROWS];

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) -> [f32; MAX_ROWS] {
        let delta = self.probabilities(simd);
        self.gradients(simd, &delta);
        delta
    }
}

impl<F: Factor> BackwardTile<'_, '_, F> {
    /// Fills `p` and `d_p`; returns delta.
    #[inline(always)]
    fn probabilities<S: Simd>(&mut self, simd: S) -> [f32; MAX_ROWS] {
        let lanes = num_lanes::<S>();
        let (bounds, scale) = (Bounds::new(self.args, self.tile, lanes), self.args.base2_scale());
        let mut base2 = [0f32; MAX_ROWS];
        for (base2, row) in base2.iter_mut().zip(self.tile) {
            let value = self.log_sum_exp[row.token * self.args.shape.heads + row.head];
            *base2 = value * std::f32::consts::LOG2_E;
        }
        let mut deltas = Deltas::new();
        let blocks = blocks(self.args.tile_keys(self.tile));
        let p = self.p.chunks_mut(KEYS * lanes);
        for ((keys, p), d_p) in blocks.zip(p).zip(self.d_p.chunks_mut(KEYS * lanes)) {
            let (p, d_p) = (&mut p[..keys.len() * lanes], &mut d_p[..keys.len() * lanes]);
            self.head.scores(simd, &keys, self.keys, self.q, p);
            bounds.mask(simd, &keys, p);
            lanes::probabilities(simd, scale, &base2, p);
            self.head.scores(simd, &keys, self.values, self.d_o, d_p);
            deltas.block(simd, p, d_p);
        }
        deltas.finish()
    }

    /// Adds the gradients; replaces dP by dS, and multiplies P by the heads' weights for the
    /// gradient of the values.
    #[inline(always)]
    fn gradients<S: Simd>(&mut self, simd: S, delta: &[f32; MAX_ROWS]) {
        let (lanes, width) = (num_lanes::<S>(), self.width);
        let mut weights = [0f32; MAX_ROWS];
        for (weight, &row) in weights.iter_mut().zip(self.tile) {
            *weight = self.args.weight(row);
        }
        let weights = self.args.is_weighted().then_some(&weights);
        self.d_q.fill(0.0);
        let blocks = blocks(self.args.tile_keys(self.tile));
        let p = self.p.chunks_mut(KEYS * lanes);
        for ((keys, p), d_p) in blocks.zip(p).zip(self.d_p.chunks_mut(KEYS * lanes)) {
            let (p, d_p) = (&mut p[..keys.len() * lanes], &mut d_p[..keys.len() * lanes]);
            let [p_rows, d_s_keys, d_s_rows] = self.factors.each_mut();
            let room = keys.len() * lanes / F::TERMS;
            let mut p = Block { elements: p, along_keys: &mut [], along_rows: &mut p_rows[..room] };
            let mut d_s = Block {
                elements: d_p,
                along_keys: &mut d_s_keys[..room],
                along_rows: &mut d_s_rows[..room],
            };
            lanes::score_gradients(simd, weights, delta, &mut p, &mut d_s);
            let part = keys.start * width..keys.end * width;
            let of_values = &mut self.d_values[part.clone()];
            add_transposed(simd, p.factors_along_rows(), self.d_o_rows, width, of_values);
            let of_keys = &mut self.d_keys[part];
            add_transposed(simd, d_s.factors_along_rows(), self.q_rows, width, of_keys);
            let along_keys = d_s.factors_along_keys();
            self.head.combine(simd, &keys, self.keys_along_rows, along_keys, self.d_q);
        }
    }
}

/// Adds a block `[keys, rows / TERMS]` times a tile's rows `[rows / TERMS, width]` to the keys'
/// gradients `[keys, width]`.
#[inline(always)]
fn add_transposed<S: Simd, F: Factor>(
    simd: S,
    block: &[F],
    tile_rows: &[F],
    width: usize,
    out: &mut [f32],
) {
    let depth = num_lanes::<S>() / F::TERMS;
    let sizes = Sizes { rows: out.len() / width, depth, columns: width };
    let left = Left { data: block, row_stride: depth, column_stride: 1 };
    Matmul { sizes, left, right: tile_rows }.multiply(simd, out, true);
}
