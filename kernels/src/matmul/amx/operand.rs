//! Packed operands of the tile unit.
//!
//! A tile is 16 rows of 16 pairs of terms. A row of a left tile has the pairs of one row of the left
//! matrix; a row of a right tile has one pair of 16 columns of the right matrix, so that one is the
//! transpose of the other. A packed operand is `[panel of 32][step of 32 terms][2 tiles]`, padded
//! with zeros.

use std::arch::x86_64::*;

use crate::matmul::avx512::pack::{FIRST, LAST, load, store};
use crate::matmul::matrix::Matrix;
use crate::matmul::transpose::square_of_u32;
use crate::scalar::Element;

/// Rows and columns of a block of sums, and of an operand's panel: two tiles.
pub(super) const SIDE: usize = 2 * ROWS;
/// Terms that one instruction multiplies.
pub(super) const STEP: usize = 32;
/// Pairs of two tiles, a panel's part of one step.
pub(super) const PAIR: usize = 2 * TILE;
/// Rows of a tile, and pairs of a row.
pub(super) const ROWS: usize = 16;
/// Pairs of a tile.
pub(super) const TILE: usize = ROWS * ROWS;

/// Which operand a matrix is packed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::matmul) enum Role {
    Left,
    Right,
}

/// Steps of this many terms.
pub(super) const fn steps(terms: usize) -> usize {
    terms.div_ceil(STEP)
}

/// Pairs of a packed operand of this many rows or columns.
pub(super) const fn packed_len(outer: usize, terms: usize) -> usize {
    outer.div_ceil(SIDE) * steps(terms) * PAIR
}

/// Packs an operand, `[rows or columns, terms]`, contiguous along either.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn pack<T: Element>(operand: Matrix<'_, T>, role: Role, out: &mut [u32]) {
    let by_terms = operand.column_stride == 1;
    // Contiguous terms are the rows of a left tile, a contiguous outer dimension those of a right one.
    let turns = by_terms == (role == Role::Right);
    let panels = out.chunks_exact_mut((steps(operand.columns) * PAIR).max(1));
    for (first, out) in (0..operand.rows).step_by(SIDE).zip(panels) {
        let panel = operand.rows(first..operand.rows.min(first + SIDE));
        for (term, out) in (0..panel.columns).step_by(STEP).zip(out.chunks_exact_mut(PAIR)) {
            let part = panel.columns(term..panel.columns.min(term + STEP));
            let tiles = if by_terms { rows_of_terms(part) } else { interleaved(part.transposed()) };
            for (tile, out) in tiles.into_iter().zip(out.chunks_exact_mut(TILE)) {
                let tile = if turns { square_of_u32(tile) } else { tile };
                for (row, out) in tile.into_iter().zip(out.chunks_exact_mut(ROWS)) {
                    store(out, row);
                }
            }
        }
    }
}

/// The terms of up to 32 rows or columns, contiguous.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn rows_of_terms<T: Element>(part: Matrix<'_, T>) -> [[__m512i; ROWS]; 2] {
    let mut tiles = [[_mm512_setzero_si512(); ROWS]; 2];
    for (row, slot) in tiles.as_flattened_mut().iter_mut().enumerate().take(part.rows) {
        *slot = load(part.row(row));
    }
    tiles
}

/// The pairs of up to 32 terms, each contiguous over rows or columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn interleaved<T: Element>(terms: Matrix<'_, T>) -> [[__m512i; ROWS]; 2] {
    // SAFETY: the arrays have a vector's length.
    #[allow(unsafe_code)]
    let (first, last) = unsafe {
        (_mm512_loadu_epi16(FIRST.as_ptr().cast()), _mm512_loadu_epi16(LAST.as_ptr().cast()))
    };
    let [mut tile, mut next] = [[_mm512_setzero_si512(); ROWS]; 2];
    let pairs = tile.iter_mut().zip(&mut next).zip((0..terms.rows).step_by(2));
    for ((tile, next), term) in pairs {
        let even = load(terms.row(term));
        let odd = load(if term + 1 < terms.rows { terms.row(term + 1) } else { &[] });
        *tile = _mm512_permutex2var_epi16(even, first, odd);
        *next = _mm512_permutex2var_epi16(even, last, odd);
    }
    [tile, next]
}
