//! Matmuls of inner products, which read both matrices along k, in memory order: matmuls of a few rows, as in
//! generation, and matmuls with rows that may not depend on each other.
//!
//! An inner product's sum has the same order in every tile and in every matmul. The bits of a row of the
//! result depend only on that row of the left matrix and on the right matrix.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::matrix::{Matrix, MatrixMut};
use crate::scalar::{DType, Element};
use crate::scratch::with_scratch;

/// Maximum rows of the left matrix, unless its rows must be independent. The other implementations copy
/// the right matrix, which costs more than reading it once per row. f32 gains less from a copy than bf16.
const MAX_ROWS: usize = 4;
const MAX_ROWS_F32: usize = 7;
/// Maximum rows and columns of a tile of inner products: with its operands it fills the registers.
const TILE_ROWS: usize = 3;
const TILE_COLUMNS: usize = 4;
/// Maximum rows that are multiplied by one column at a time.
const SEQUENTIAL_ROWS: usize = 2;
/// Rows that are converted to f32 at a time.
const BLOCK_ROWS: usize = 2 * TILE_ROWS;
/// Elements of the right matrix that are multiplied by all rows before the next elements are read: they stay in the
/// second-level cache.
const BLOCK: usize = 1 << 16;
/// Distance in bytes of prefetches of the right matrix; they can reach later columns.
const AHEAD: isize = 4096;
/// Elements of the longest vectors.
const MAX_LANES: usize = 16;
/// Bytes of a line of the caches.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

pub(super) fn along_k<A, B>(left: &Matrix<'_, A>, right: &Matrix<'_, B>) -> bool {
    left.column_stride == 1 && right.row_stride == 1
}

/// Returns whether the left matrix has few rows and both matrices are contiguous along k.
pub(super) fn applies<A, B: Element>(left: &Matrix<'_, A>, right: &Matrix<'_, B>) -> bool {
    let most = if B::DTYPE == DType::F32 { MAX_ROWS_F32 } else { MAX_ROWS };
    left.rows <= most && along_k(left, right)
}

/// Returns the maximum scratch, in elements, of a matmul of at most `most` terms.
pub(super) fn most_scratch(most: usize) -> [usize; 1] {
    [MAX_ROWS_F32.max(BLOCK_ROWS).saturating_mul(most)]
}

/// Computes `out = left right`, according to the destination.
pub(super) fn multiply<O: Element, A: Element, B: Element>(
    mut out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    let accumulate = out.prepare();
    let weight = right.transposed();
    // f32 elements are read in place.
    let rows = if left.as_f32().is_some() && B::DTYPE == DType::F32 { 0 } else { BLOCK_ROWS };
    with_scratch([rows.min(left.rows) * left.columns], |[values]| {
        Arch::new().dispatch(Products { out, accumulate, left, weight, values });
    });
}

struct Products<'a, 'b, O, A, B> {
    out: MatrixMut<'a, O>,
    accumulate: bool,
    left: Matrix<'a, A>,
    weight: Matrix<'a, B>,
    /// Room for some rows of the left matrix in f32.
    values: &'b mut [f32],
}

impl<O: Element, A: Element, B: Element> WithSimd for Products<'_, '_, O, A, B> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let inner = self.left.columns;
        let step = (BLOCK / inner.max(1)).next_multiple_of(TILE_COLUMNS);
        for first in (0..self.out.columns).step_by(step) {
            let columns = first..self.out.columns.min(first + step);
            for row in (0..self.left.rows).step_by(BLOCK_ROWS) {
                let rows = row..self.left.rows.min(row + BLOCK_ROWS);
                self.block(simd, rows, columns.clone());
            }
        }
    }
}

impl<O: Element, A: Element, B: Element> Products<'_, '_, O, A, B> {
    /// Computes the products of at most [`BLOCK_ROWS`] rows and some columns.
    #[inline(always)]
    fn block<S: Simd>(&mut self, simd: S, rows: Range<usize>, columns: Range<usize>) {
        let inner = self.left.columns;
        if !self.values.is_empty() {
            for (row, values) in rows.clone().zip(self.values.chunks_exact_mut(inner)) {
                widen(self.left.row(row), values);
                if B::DTYPE == DType::BF16 {
                    separate::<S>(self.left.row(row), values);
                }
            }
        }
        let (tile_rows, tile_columns) = match S::REGISTER_COUNT >= 32 {
            // Memory bandwidth limits few rows, and it is highest if addresses only increase.
            _ if rows.len() <= SEQUENTIAL_ROWS => (SEQUENTIAL_ROWS, 1),
            true => (TILE_ROWS, TILE_COLUMNS),
            false => (TILE_ROWS - 1, TILE_COLUMNS - 2),
        };
        for column in columns.clone().step_by(tile_columns) {
            // Only the first tile reads the weight's rows from memory.
            for row in rows.clone().step_by(tile_rows) {
                let size = (tile_rows.min(rows.end - row), tile_columns.min(columns.end - column));
                self.tile(simd, row, row - rows.start, column, size);
            }
        }
    }

    #[inline(always)]
    fn tile<S: Simd>(
        &mut self,
        simd: S,
        row: usize,
        row_of_block: usize,
        column: usize,
        size: (usize, usize),
    ) {
        macro_rules! of_size {
            ($($rows:literal $columns:literal)*) => {
                match size {
                    $(($rows, $columns) => {
                        self.of::<S, $rows, $columns>(simd, row, row_of_block, column)
                    })*
                    _ => unreachable!("a tile has 1 to {TILE_ROWS} rows and 1 to {TILE_COLUMNS} columns"),
                }
            };
        }
        of_size!(1 1 1 2 1 3 1 4 2 1 2 2 2 3 2 4 3 1 3 2 3 3 3 4);
    }

    /// Computes the products of R rows from `row` on and C columns from `column` on.
    #[inline(always)]
    fn of<S: Simd, const R: usize, const C: usize>(
        &mut self,
        simd: S,
        row: usize,
        row_of_block: usize,
        column: usize,
    ) {
        let inner = self.left.columns;
        let mut left: [&[f32]; R] = [&[]; R];
        for (r, slot) in left.iter_mut().enumerate() {
            *slot = match self.left.as_f32().filter(|_| self.values.is_empty()) {
                Some(left) => left.row(row + r),
                None => &self.values[(row_of_block + r) * inner..][..inner],
            };
        }
        let mut weight: [&[B]; C] = [&[]; C];
        for (c, slot) in weight.iter_mut().enumerate() {
            *slot = self.weight.row(column + c);
        }
        let products = products(simd, left, weight, AHEAD);
        for (r, products) in products.iter().enumerate() {
            let slots = &mut self.out.row_mut(row + r)[column..column + C];
            for (slot, product) in slots.iter_mut().zip(products) {
                let before = if self.accumulate { slot.to_f32() } else { 0.0 };
                *slot = O::from_f32(before + product);
            }
        }
    }
}

#[inline(always)]
pub(super) fn widen<T: Element>(elements: &[T], out: &mut [f32]) {
    for (slot, element) in out.iter_mut().zip(elements) {
        *slot = element.to_f32();
    }
}

/// Writes the elements at even indices of each two vectors to the first vector, and the elements at odd indices
/// to the second: a bf16 vector read as u32 separates in this way.
#[inline(always)]
pub(crate) fn separate<S: Simd>(elements: &[impl Element], out: &mut [f32]) {
    let chunks =
        out.chunks_exact_mut(2 * S::F32_LANES).zip(elements.chunks_exact(2 * S::F32_LANES));
    for (out, elements) in chunks {
        let (even, odd) = out.split_at_mut(S::F32_LANES);
        for ((even, odd), pair) in even.iter_mut().zip(odd).zip(elements.chunks_exact(2)) {
            (*even, *odd) = (pair[0].to_f32(), pair[1].to_f32());
        }
    }
}

/// Undoes [`separate`].
#[inline(always)]
pub(crate) fn join<S: Simd>(elements: &mut [f32]) {
    let mut separated = [0.0; 2 * MAX_LANES];
    for elements in elements.chunks_exact_mut(2 * S::F32_LANES) {
        let separated = &mut separated[..elements.len()];
        separated.copy_from_slice(elements);
        let (even, odd) = separated.split_at(S::F32_LANES);
        for ((pair, even), odd) in elements.chunks_exact_mut(2).zip(even).zip(odd) {
            (pair[0], pair[1]) = (*even, *odd);
        }
    }
}

/// Returns the inner products of R rows and C columns. Every product sums in the same order, which depends only on the
/// length and on the machine's vectors: two interleaved sums of vectors, and then, one by one, the last elements
/// that do not fill two vectors.
#[inline(always)]
pub(crate) fn products<S: Simd, B: Element, const R: usize, const C: usize>(
    simd: S,
    left: [&[f32]; R],
    weight: [&[B]; C],
    ahead: isize,
) -> [[f32; C]; R] {
    let inner = left[0].len();
    assert!(left.iter().all(|row| row.len() == inner));
    assert!(weight.iter().all(|column| column.len() == inner));
    let chunk = 2 * S::F32_LANES;
    let whole = inner / chunk * chunk;
    let mut sums = [[[simd.splat_f32s(0.0); 2]; C]; R];
    let mut at = 0;
    while at < whole {
        weight.iter().for_each(|weight| prefetch(&weight[at..at + chunk], ahead));
        for half in 0..2 {
            let mut columns = [simd.splat_f32s(0.0); C];
            for (slot, weight) in columns.iter_mut().zip(&weight) {
                // SAFETY: two vectors from `at` on are within the column, as `whole` is at most its length.
                #[allow(unsafe_code)]
                let elements = unsafe { weight.get_unchecked(at..at + chunk) };
                *slot = vector_of_two(simd, elements, half);
            }
            for (sums, left) in sums.iter_mut().zip(&left) {
                let start = at + half * S::F32_LANES;
                // SAFETY: the range is within the row, as for the column.
                #[allow(unsafe_code)]
                let row = vector::<S>(unsafe { left.get_unchecked(start..start + S::F32_LANES) });
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    sum[half] = simd.mul_add_e_f32s(column, row, sum[half]);
                }
            }
        }
        at += chunk;
    }
    let mut products = [[0f32; C]; R];
    for ((products, sums), left) in products.iter_mut().zip(&sums).zip(&left) {
        for ((product, [first, second]), weight) in products.iter_mut().zip(sums).zip(&weight) {
            let rest = left[whole..].iter().zip(&weight[whole..]);
            let rest: f32 = rest.map(|(left, weight)| left * weight.to_f32()).sum();
            *product = rest + simd.reduce_sum_f32s(simd.add_f32s(*first, *second));
        }
    }
    products
}

/// Prefetches the memory `ahead` bytes after a slice, with the slice's length. Processors do not prefetch as far ahead
/// by themselves, nor from one block of the key/value cache to the next.
#[inline(always)]
pub(crate) fn prefetch<B>(elements: &[B], ahead: isize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for line in (0..size_of_val(elements)).step_by(LINE) {
            let address = elements.as_ptr().cast::<i8>().wrapping_offset(ahead).wrapping_add(line);
            // SAFETY: a prefetch reads nothing, at any address.
            #[allow(unsafe_code)]
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(address);
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (elements, ahead);
}

/// Returns the first or second vector of two vectors of elements: in order if they are f32, [separated](separate) if
/// bf16.
#[inline(always)]
pub(crate) fn vector_of_two<S: Simd, B: Element>(simd: S, elements: &[B], half: usize) -> S::f32s {
    if B::DTYPE == DType::F32 {
        let elements: &[f32] = bytemuck::cast_slice(elements);
        return vector::<S>(&elements[half * S::F32_LANES..][..S::F32_LANES]);
    }
    let pairs: S::u32s = bytemuck::pod_read_unaligned(bytemuck::cast_slice(elements));
    // bf16 is the upper half of f32.
    simd.transmute_f32s_u32s(match half {
        0 => simd.wrapping_dyn_shl_u32s(pairs, simd.splat_u32s(16)),
        _ => simd.and_u32s(pairs, simd.splat_u32s(0xffff_0000)),
    })
}

#[inline(always)]
fn vector<S: Simd>(elements: &[f32]) -> S::f32s {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(elements))
}
