//! Packing for the bf16 kernel: terms k and k + 1 of a row or column become one u32 (the even term
//! in the low half), which is what the instruction multiplies at a time; f32 is rounded on the way.
//!
//! Numbers beyond the matrix are zeros, so that an odd number of terms and a last panel that is
//! not full need no code of their own.

use std::arch::x86_64::*;

use super::matrix::Matrix;
use crate::scalar::{DType, Element};

/// Columns of the right matrix in a panel.
pub(super) const PANEL: usize = 32;
/// Rows of the left matrix in a tile.
pub(super) const TILE_ROWS: usize = 12;
/// Numbers that a vector of bf16 holds, and pairs.
const VECTOR: usize = 32;
const PAIRS: usize = 16;
/// Where the pairs of the two vectors' first halves, and of their last, come from.
const FIRST: [u16; VECTOR] = interleaved(0);
const LAST: [u16; VECTOR] = interleaved(16);

const fn interleaved(start: u16) -> [u16; VECTOR] {
    let mut order = [0; VECTOR];
    let mut i = 0;
    while i < VECTOR {
        order[i] = start + i as u16 / 2 + (i as u16 % 2) * VECTOR as u16;
        i += 1;
    }
    order
}

/// Pairs that `terms` terms make.
pub(super) const fn pairs(terms: usize) -> usize {
    terms.div_ceil(2)
}

/// Length of a packed right matrix of this shape.
pub(super) const fn right_len(terms: usize, columns: usize) -> usize {
    pairs(terms) * columns.next_multiple_of(PANEL)
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
            interleave_rows(panel, out);
        } else {
            transpose_columns(panel, out);
        }
    }
}

/// A panel of a matrix whose rows (terms) are contiguous.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn interleave_rows<T: Element>(panel: Matrix<'_, T>, out: &mut [u32]) {
    // SAFETY: the arrays are as long as a vector.
    #[allow(unsafe_code)]
    let (first, last) = unsafe {
        (_mm512_loadu_epi16(FIRST.as_ptr().cast()), _mm512_loadu_epi16(LAST.as_ptr().cast()))
    };
    for (pair, out) in out.chunks_exact_mut(PANEL).enumerate() {
        let even = load(panel.row(2 * pair));
        let odd = if 2 * pair + 1 < panel.rows {
            load(panel.row(2 * pair + 1))
        } else {
            _mm512_setzero_si512()
        };
        store(&mut out[..PAIRS], _mm512_permutex2var_epi16(even, first, odd));
        store(&mut out[PAIRS..], _mm512_permutex2var_epi16(even, last, odd));
    }
}

/// A panel of a matrix whose columns are contiguous.
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
            let square = transpose(square);
            for (out, vector) in out.chunks_exact_mut(PANEL).zip(square) {
                store(&mut out[half * PAIRS..][..PAIRS], vector);
            }
        }
    }
}

/// Length of packed tiles of a left matrix of this shape; a store reaches beyond the last.
pub(super) const fn left_tiles_len(rows: usize, terms: usize) -> usize {
    rows.next_multiple_of(TILE_ROWS) * pairs(terms) + PAIRS - TILE_ROWS
}

/// Packs a left matrix whose columns (terms) are contiguous into tiles of [`TILE_ROWS`] rows, each
/// `[pairs, TILE_ROWS]`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn left_tiles<T: Element>(matrix: Matrix<'_, T>, out: &mut [u32]) {
    let pairs = pairs(matrix.columns);
    for row in (0..matrix.rows).step_by(TILE_ROWS) {
        let terms = matrix.rows(row..matrix.rows.min(row + TILE_ROWS)).transposed();
        for pair in 0..pairs {
            let even = load_half(terms.row(2 * pair));
            let odd = if 2 * pair + 1 < terms.rows {
                load_half(terms.row(2 * pair + 1))
            } else {
                _mm512_setzero_si512()
            };
            let packed = _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd));
            // The vector's last numbers are overwritten by the next pair.
            store(&mut out[row * pairs + pair * TILE_ROWS..][..PAIRS], packed);
        }
    }
}

/// Distance between packed rows of this many terms, which spreads them over the cache's sets.
pub(super) const fn left_stride(terms: usize) -> usize {
    terms.next_multiple_of(VECTOR) / 2 + PAIRS
}

/// Copies a left matrix whose rows are contiguous to rows of [`left_stride`] pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn left_rows<T: Element>(matrix: Matrix<'_, T>, out: &mut [u32]) {
    let stride = left_stride(matrix.columns);
    for (row, out) in out.chunks_exact_mut(stride).take(matrix.rows).enumerate() {
        for (terms, out) in matrix.row(row).chunks(VECTOR).zip(out.chunks_exact_mut(PAIRS)) {
            store(out, load(terms));
        }
    }
}

/// Up to [`VECTOR`] numbers as bf16, followed by zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn load<T: Element>(numbers: &[T]) -> __m512i {
    debug_assert!(numbers.len() <= VECTOR);
    let mask = if numbers.len() < VECTOR { (1u32 << numbers.len()) - 1 } else { u32::MAX };
    // SAFETY: the masks cover the slice's numbers alone, of the type that `DTYPE` names (f32 or
    // bf16, the two implementors), and both vector types are 64 bytes without a forbidden value.
    #[allow(unsafe_code)]
    unsafe {
        if T::DTYPE == DType::F32 {
            let start = numbers.as_ptr().cast::<f32>();
            let low = _mm512_maskz_loadu_ps(mask as u16, start);
            let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, start.wrapping_add(16));
            std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
        } else {
            _mm512_maskz_loadu_epi16(mask, numbers.as_ptr().cast())
        }
    }
}

/// Up to [`PAIRS`] numbers as bf16 in the low halves of 32 bits, followed by zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn load_half<T: Element>(numbers: &[T]) -> __m512i {
    debug_assert!(numbers.len() <= PAIRS);
    let mask = ((1u32 << numbers.len()) - 1) as u16;
    // SAFETY: as in `load`.
    #[allow(unsafe_code)]
    unsafe {
        if T::DTYPE == DType::F32 {
            let numbers = _mm512_maskz_loadu_ps(mask, numbers.as_ptr().cast());
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(numbers));
            _mm512_cvtepu16_epi32(rounded)
        } else {
            // A masked load of 16 bits a number in 512 bits: the 256-bit form needs AVX512VL.
            let numbers = _mm512_maskz_loadu_epi16(u32::from(mask), numbers.as_ptr().cast());
            _mm512_cvtepu16_epi32(_mm512_castsi512_si256(numbers))
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn store(out: &mut [u32], vector: __m512i) {
    assert!(out.len() == PAIRS);
    // SAFETY: the slice is as long as the vector, by the line above.
    #[allow(unsafe_code)]
    unsafe {
        _mm512_storeu_si512(out.as_mut_ptr().cast(), vector)
    }
}

/// Transposes a square of u32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn transpose(rows: [__m512i; PAIRS]) -> [__m512i; PAIRS] {
    let mut pairs = rows;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // fours[4 g + c] holds, in its quarter q, column 4 q + c of rows 4 g to 4 g + 3.
    let mut fours = pairs;
    for g in 0..4 {
        for c in 0..2 {
            let (low, high) = (pairs[4 * g + c], pairs[4 * g + 2 + c]);
            fours[4 * g + 2 * c] = _mm512_unpacklo_epi64(low, high);
            fours[4 * g + 2 * c + 1] = _mm512_unpackhi_epi64(low, high);
        }
    }
    let mut columns = fours;
    for c in 0..4 {
        let first = _mm512_shuffle_i32x4::<0x88>(fours[c], fours[4 + c]);
        let second = _mm512_shuffle_i32x4::<0xdd>(fours[c], fours[4 + c]);
        let third = _mm512_shuffle_i32x4::<0x88>(fours[8 + c], fours[12 + c]);
        let fourth = _mm512_shuffle_i32x4::<0xdd>(fours[8 + c], fours[12 + c]);
        columns[c] = _mm512_shuffle_i32x4::<0x88>(first, third);
        columns[8 + c] = _mm512_shuffle_i32x4::<0xdd>(first, third);
        columns[4 + c] = _mm512_shuffle_i32x4::<0x88>(second, fourth);
        columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(second, fourth);
    }
    columns
}
