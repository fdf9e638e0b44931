//! Transposes 32-bit elements square by square.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::matrix::Matrix;
use crate::simd::vectorized;

pub(super) const SQUARE: usize = 16;

/// Writes a matrix that is contiguous along its columns in row-major order, with rows `stride` elements
/// apart.
pub(crate) fn to_row_major(matrix: Matrix<'_, f32>, out: &mut [f32], stride: usize) {
    assert!(matrix.row_stride == 1 && stride >= matrix.columns);
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the machine has the instructions.
        #[allow(unsafe_code)]
        return unsafe { by_vectors(matrix, out, stride) };
    }
    vectorized!(by_elements(matrix, out, stride));
}

#[inline(always)]
fn by_elements(matrix: Matrix<'_, f32>, out: &mut [f32], stride: usize) {
    let columns = matrix.transposed();
    for start in (0..matrix.columns).step_by(SQUARE) {
        let columns = columns.rows(start..matrix.columns.min(start + SQUARE));
        for first in (0..matrix.rows).step_by(SQUARE) {
            let rows = first..matrix.rows.min(first + SQUARE);
            for column in 0..columns.rows {
                let column_of_square = &columns.row(column)[rows.clone()];
                for (row, &element) in rows.clone().zip(column_of_square) {
                    out[row * stride + start + column] = element;
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn by_vectors(matrix: Matrix<'_, f32>, out: &mut [f32], stride: usize) {
    let columns = matrix.transposed();
    for start in (0..matrix.columns).step_by(SQUARE) {
        let columns = columns.rows(start..matrix.columns.min(start + SQUARE));
        for first in (0..matrix.rows).step_by(SQUARE) {
            let rows = first..matrix.rows.min(first + SQUARE);
            let mut square = [_mm512_setzero_si512(); SQUARE];
            for (column, vector) in square.iter_mut().enumerate().take(columns.rows) {
                let elements = &columns.row(column)[rows.clone()];
                // SAFETY: the mask covers only the slice's elements.
                #[allow(unsafe_code)]
                unsafe {
                    *vector =
                        _mm512_maskz_loadu_epi32(mask(elements.len()), elements.as_ptr().cast());
                }
            }
            for (row, vector) in rows.zip(square_of_u32(square)) {
                let elements = &mut out[row * stride + start..][..columns.rows];
                // SAFETY: the mask covers only the slice's elements.
                #[allow(unsafe_code)]
                unsafe {
                    let mask = mask(elements.len());
                    _mm512_mask_storeu_epi32(elements.as_mut_ptr().cast(), mask, vector);
                }
            }
        }
    }
}

/// Returns the mask of a vector's first `count` elements.
#[cfg(target_arch = "x86_64")]
fn mask(count: usize) -> u16 {
    if count < SQUARE { (1 << count) - 1 } else { u16::MAX }
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn square_of_u32(rows: [__m512i; SQUARE]) -> [__m512i; SQUARE] {
    let mut pairs = rows;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // fours[4 g + c] contains, in its quarter q, column 4 q + c of rows 4 g to 4 g + 3.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_and_partial_squares_are_transposed_with_and_without_vectors() {
        for (rows, columns) in [(1, 1), (16, 16), (33, 18), (5, 47), (0, 3)] {
            let elements: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
            let matrix = Matrix::new(&elements, columns, rows).transposed();
            let (mut out, mut plain) = (vec![0f32; rows * columns], vec![0f32; rows * columns]);
            to_row_major(matrix, &mut out, columns);
            by_elements(matrix, &mut plain, columns);
            let expected = (0..rows * columns).map(|i| (i % columns * rows + i / columns) as f32);
            assert!(out.iter().copied().eq(expected));
            assert_eq!(out, plain);
        }
    }
}
