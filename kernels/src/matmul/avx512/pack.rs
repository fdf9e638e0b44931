//! Packing for the bf16 kernel: terms k and k + 1 of a row or column become one u32 (the even term
//! in the low half), the operand of the instruction; f32 is rounded while it is packed.
//!
//! Elements outside the matrix are zeros, so an odd number of terms and a partial last panel need
//! no special code.

use std::arch::x86_64::*;

use crate::matmul::blocked::PANEL;
use crate::matmul::matrix::Matrix;
use crate::matmul::transpose::square_of_u32;
use crate::scalar::{DType, Element};

/// Rows of the left matrix in a tile.
pub(super) const TILE_ROWS: usize = 12;
/// Elements of a bf16 vector, and of a vector of pairs.
const VECTOR: usize = 32;
const PAIRS: usize = 16;
/// Indices of the pairs of the two vectors' first halves, and of their last halves.
const FIRST: [u16; VECTOR] = interleaved(0, VECTOR);
const LAST: [u16; VECTOR] = interleaved(16, VECTOR);

/// Returns the indices of a vector's elements that form pairs: `start` and `start + distance`, and the
/// following pairs.
pub(crate) const fn interleaved(start: usize, distance: usize) -> [u16; VECTOR] {
    let mut order = [0; VECTOR];
    let mut i = 0;
    while i < VECTOR {
        order[i] = (start + i / 2 + i % 2 * distance) as u16;
        i += 1;
    }
    order
}

pub(super) const fn pairs(terms: usize) -> usize {
    terms.div_ceil(2)
}

/// Packs into panels of [`PANEL`] columns, each `[pairs, PANEL]`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn right<T: Element>(matrix: Matrix<'_, T>, out: &mut [u32]) {
    let pairs = pairs(matrix.rows);
    if pairs == 0 {
        return;
    }
    for (panel, out) in out.chunks_exact_mut(pairs * PANEL).enumerate() {
        let start = panel * PANEL;
        if start >= matrix.columns {
            return;
        }
        let panel = matrix.columns(start..matrix.columns.min(start + PANEL));
        if panel.column_stride == 1 {
            interleave_rows(panel, out, PANEL);
        } else {
            transpose_columns(panel, out);
        }
    }
}

/// Packs a matrix with contiguous rows (terms) to `[pairs, width]`, `width` a multiple of the
/// vector.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn interleave_rows<T: Element>(matrix: Matrix<'_, T>, out: &mut [u32], width: usize) {
    // SAFETY: the arrays have a vector's length.
    #[allow(unsafe_code)]
    let (first, last) = unsafe {
        (_mm512_loadu_epi16(FIRST.as_ptr().cast()), _mm512_loadu_epi16(LAST.as_ptr().cast()))
    };
    for (pair, out) in out.chunks_exact_mut(width).take(pairs(matrix.rows)).enumerate() {
        let even = matrix.row(2 * pair);
        let odd = if 2 * pair + 1 < matrix.rows { matrix.row(2 * pair + 1) } else { &[] };
        for (start, out) in (0..width).step_by(VECTOR).zip(out.chunks_exact_mut(VECTOR)) {
            let (even, odd) = (load(vector_of(even, start)), load(vector_of(odd, start)));
            store(&mut out[..PAIRS], _mm512_permutex2var_epi16(even, first, odd));
            store(&mut out[PAIRS..], _mm512_permutex2var_epi16(even, last, odd));
        }
    }
}

/// Returns up to [`VECTOR`] elements of a row.
fn vector_of<T>(row: &[T], start: usize) -> &[T] {
    &row[start.min(row.len())..row.len().min(start + VECTOR)]
}

/// Packs a panel of a matrix with contiguous columns.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn transpose_columns<T: Element>(panel: Matrix<'_, T>, out: &mut [u32]) {
    let columns = panel.transposed();
    for half in 0..PANEL / PAIRS {
        for (block, out) in out.chunks_mut(PAIRS * PANEL).enumerate() {
            let terms = block * VECTOR..columns.columns.min((block + 1) * VECTOR);
            let mut square = [_mm512_setzero_si512(); PAIRS];
            for (lane, vector) in square.iter_mut().enumerate() {
                let column = half * PAIRS + lane;
                if column < columns.rows {
                    *vector = load(&columns.row(column)[terms.clone()]);
                }
            }
            let square = square_of_u32(square);
            for (out, vector) in out.chunks_exact_mut(PANEL).zip(square) {
                store(&mut out[half * PAIRS..][..PAIRS], vector);
            }
        }
    }
}

/// Returns the distance between the pairs of a packed left matrix with this many rows.
pub(super) const fn left_width(rows: usize) -> usize {
    rows.next_multiple_of(VECTOR)
}

/// Packs a left matrix with contiguous columns (terms) to `[pairs, left_width(rows)]`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn left_columns<T: Element>(matrix: Matrix<'_, T>, out: &mut [u32]) {
    interleave_rows(matrix.transposed(), out, left_width(matrix.rows));
}

/// Returns the distance between packed rows of this many terms, which spreads the rows over the cache sets.
pub(super) const fn left_stride(terms: usize) -> usize {
    terms.next_multiple_of(VECTOR) / 2 + PAIRS
}

/// Copies a left matrix with contiguous rows to rows of [`left_stride`] pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn left_rows<T: Element>(matrix: Matrix<'_, T>, out: &mut [u32]) {
    let stride = left_stride(matrix.columns);
    for (row, out) in out.chunks_exact_mut(stride).take(matrix.rows).enumerate() {
        for (terms, out) in matrix.row(row).chunks(VECTOR).zip(out.chunks_exact_mut(PAIRS)) {
            store(out, load(terms));
        }
    }
}

/// Loads up to [`VECTOR`] elements as bf16, padded with zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn load<T: Element>(elements: &[T]) -> __m512i {
    debug_assert!(elements.len() <= VECTOR);
    let mask = if elements.len() < VECTOR { (1u32 << elements.len()) - 1 } else { u32::MAX };
    // SAFETY: the masks cover only the slice's elements, of the type that `DTYPE` names (f32 or
    // bf16, the two implementors). Both vector types are 64 bytes, and every bit pattern is
    // valid in them.
    #[allow(unsafe_code)]
    unsafe {
        if T::DTYPE == DType::F32 {
            let start = elements.as_ptr().cast::<f32>();
            let low = _mm512_maskz_loadu_ps(mask as u16, start);
            let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, start.wrapping_add(16));
            std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
        } else {
            _mm512_maskz_loadu_epi16(mask, elements.as_ptr().cast())
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn store(out: &mut [u32], vector: __m512i) {
    assert!(out.len() == PAIRS);
    // SAFETY: the slice has the vector's length, by the line above.
    #[allow(unsafe_code)]
    unsafe {
        _mm512_storeu_si512(out.as_mut_ptr().cast(), vector)
    }
}
