//! The matmuls of attention's tiles: a broadcast left operand times vectors of the right operand, on
//! register tiles, without packing.
//!
//! These matmuls are thin (a head's width, a tile of rows), so a general matmul would spend its
//! time on packing. Here the vectors of the right operand and of the result contain the tile's
//! packed rows, or a head's columns, and the left operand is read factor by factor at any strides.
//! A factor is one term of the sums, or a pair of terms ([`Factor`]).

use pulp::Simd;

use super::factor::{Factor, NARROW};

/// The number of rows of the left operand, and of the result, is a multiple of this.
pub(super) const ROWS: usize = 8;

/// The left operand: factor (i, k) is `data[i * row_stride + k * column_stride]`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a, F> {
    pub data: &'a [F],
    pub row_stride: usize,
    pub column_stride: usize,
}

/// Sizes of a matmul, `depth` in factors: `rows` is a multiple of [`ROWS`], `columns` a multiple of
/// the vector's length, or [`NARROW`].
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub rows: usize,
    pub depth: usize,
    pub columns: usize,
}

pub(super) struct Matmul<'a, F> {
    pub sizes: Sizes,
    pub left: Left<'a, F>,
    /// `[depth, columns]`.
    pub right: &'a [F],
}

impl<F: Factor> Matmul<'_, F> {
    /// Computes `out = left right`, or `out += left right`, `[rows, columns]`. Only within [`Factor::dispatch`].
    #[inline(always)]
    pub(super) fn multiply<S: Simd>(self, simd: S, out: &mut [f32], accumulate: bool) {
        let (Sizes { rows, depth, columns }, left) = (self.sizes, self.left);
        let narrow = columns == NARROW && S::F32_LANES > NARROW;
        assert!(rows.is_multiple_of(ROWS) && (narrow || columns.is_multiple_of(S::F32_LANES)));
        if rows == 0 || columns == 0 || depth == 0 {
            let is_defined = accumulate || rows == 0 || columns == 0;
            assert!(is_defined, "a matmul without terms would be zero");
            return;
        }
        assert!(left.data.len() > (rows - 1) * left.row_stride + (depth - 1) * left.column_stride);
        assert!(self.right.len() >= depth * columns);
        assert!(out.len() >= rows * columns);
        if narrow {
            return self.narrow_tiles(out, accumulate);
        }
        // 32 registers have room for eight rows of two vectors and their operands, 16 for four rows.
        if S::REGISTER_COUNT >= 32 {
            self.tiles::<S, 8>(simd, out, accumulate);
        } else {
            self.tiles::<S, 4>(simd, out, accumulate);
        }
    }

    #[inline(always)]
    fn tiles<S: Simd, const M: usize>(self, simd: S, out: &mut [f32], accumulate: bool) {
        let (Sizes { rows, depth, columns }, left) = (self.sizes, self.left);
        let mut column = 0;
        while column < columns {
            let pair = column + 2 * S::F32_LANES <= columns;
            for row in (0..rows).step_by(M) {
                // SAFETY: `multiply` checked that rows x depth, depth x columns and rows x columns
                // are within the operands; this tile's rows and columns are among them, since M
                // divides the rows and one or two vectors of columns remain.
                #[allow(unsafe_code)]
                unsafe {
                    let a = left.data.as_ptr().add(row * left.row_stride);
                    let b = self.right.as_ptr().add(column);
                    let c = out.as_mut_ptr().add(row * columns + column);
                    let strides = (left.row_stride, left.column_stride, columns);
                    if pair {
                        tile::<S, F, M, 2>(simd, depth, a, b, c, strides, accumulate);
                    } else {
                        tile::<S, F, M, 1>(simd, depth, a, b, c, strides, accumulate);
                    }
                }
            }
            column += if pair { 2 * S::F32_LANES } else { S::F32_LANES };
        }
    }

    /// Multiplies [`NARROW`] columns on machines with longer vectors, where half of a vector would be unused.
    #[inline(always)]
    fn narrow_tiles(self, out: &mut [f32], accumulate: bool) {
        let left = self.left;
        let (rows, _) = out.as_chunks_mut::<NARROW>();
        let (vectors, _) = self.right.as_chunks::<NARROW>();
        for (part, rows) in rows[..self.sizes.rows].chunks_exact_mut(ROWS).enumerate() {
            let mut sums = [[0f32; NARROW]; ROWS];
            for (k, vector) in vectors[..self.sizes.depth].iter().enumerate() {
                for (i, sums) in sums.iter_mut().enumerate() {
                    let index = (part * ROWS + i) * left.row_stride + k * left.column_stride;
                    // SAFETY: `multiply` checked that rows x depth are within the left operand.
                    #[allow(unsafe_code)]
                    let factor = unsafe { *left.data.get_unchecked(index) };
                    *sums = factor.multiply_add_narrow(*vector, *sums);
                }
            }
            for (slot, sum) in rows.iter_mut().flatten().zip(sums.as_flattened()) {
                *slot = if accumulate { *slot + sum } else { *sum };
            }
        }
    }
}

/// Multiplies M rows and V vectors of columns; their sums stay in registers over the whole depth.
///
/// # Safety
/// All elements at these strides are within their operands, and `c` has no other borrower.
#[allow(unsafe_code)]
#[inline(always)]
unsafe fn tile<S: Simd, F: Factor, const M: usize, const V: usize>(
    simd: S,
    depth: usize,
    a: *const F,
    b: *const F,
    c: *mut f32,
    (a_row, a_column, columns): (usize, usize, usize),
    accumulate: bool,
) {
    let mut sums = [[simd.splat_f32s(0.0); V]; M];
    for k in 0..depth {
        let mut vectors = [simd.splat_f32s(0.0); V];
        for (v, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: row k and these columns of the right operand, by the caller's promise.
            *vector =
                unsafe { b.add(k * columns + v * S::F32_LANES).cast::<S::f32s>().read_unaligned() };
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: factor (i, k) of the left operand, by the caller's promise.
            let factor = unsafe { *a.add(i * a_row + k * a_column) };
            for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                *sum = factor.multiply_add(simd, vector, *sum);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        for (v, &sum) in sums.iter().enumerate() {
            // SAFETY: row i and these columns of the result, by the caller's promise.
            unsafe {
                let slot = c.add(i * columns + v * S::F32_LANES).cast::<S::f32s>();
                let before = slot.read_unaligned();
                let after = if accumulate { simd.add_f32s(before, sum) } else { sum };
                slot.write_unaligned(after);
            }
        }
    }
}
