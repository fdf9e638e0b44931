//! The innermost loop of bf16 matmuls: a tile of up to 12 x 32 sums stays in registers while
//! `vdpbf16ps` multiplies and accumulates pairs of terms.
//!
//! An element's sum has the same order in every tile, of any size and position.

use std::arch::x86_64::*;

use super::pack::TILE_ROWS;
use crate::matmul::blocked::PANEL;
use crate::matmul::output::{Addend, Output, Target};

/// Sums in a vector.
const LANES: usize = 16;

/// The memory layout of a tile's terms.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    pub(super) pairs: usize,
    /// The first pair of the first row.
    pub(super) left: *const u32,
    /// Bytes between rows, and between the pairs of a row.
    pub(super) row_stride: usize,
    pub(super) pair_stride: usize,
    /// A packed panel.
    pub(super) right: *const u32,
}

/// Computes a tile of `rows` x `columns` elements.
///
/// # Safety
/// The terms' pointers are valid for `rows` and a panel of pairs. The output's pointers are valid
/// for `rows` x `columns` elements at their strides, and no other thread accesses the written elements.
#[allow(unsafe_code)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn tile(rows: usize, columns: usize, terms: Terms, output: &Output) {
    macro_rules! of_rows {
        ($($rows:literal)*) => {
            match (rows, columns > LANES) {
                $(
                    ($rows, true) => finish(sums::<$rows, 2>(terms), columns, output),
                    ($rows, false) => finish(sums::<$rows, 1>(terms), columns, output),
                )*
                _ => unreachable!("a tile has 1 to {TILE_ROWS} rows"),
            }
        };
    }
    // SAFETY: the caller's promise covers `sums` and `finish`.
    unsafe { of_rows!(1 2 3 4 5 6 7 8 9 10 11 12) }
}

/// Returns the sums of `ROWS` x `VECTORS * LANES` elements.
#[allow(unsafe_code)]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn sums<const ROWS: usize, const VECTORS: usize>(terms: Terms) -> [[__m512; VECTORS]; ROWS] {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    let (mut left, mut right) = (terms.left.cast::<u8>(), terms.right);
    // SAFETY: the caller's promise: each iteration reads one pair of the rows and of the panel.
    unsafe {
        for _ in 0..terms.pairs {
            let mut panel = [_mm512_setzero_ps(); VECTORS];
            for (vector, panel) in panel.iter_mut().enumerate() {
                *panel = _mm512_loadu_ps(right.add(vector * LANES).cast());
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let pair = left.add(row * terms.row_stride).cast::<i32>().read_unaligned();
                let pair = _mm512_set1_epi32(pair);
                for (sums, panel) in sums.iter_mut().zip(panel) {
                    *sums = _mm512_dpbf16_ps(
                        *sums,
                        std::mem::transmute::<__m512i, __m512bh>(pair),
                        std::mem::transmute::<__m512, __m512bh>(panel),
                    );
                }
            }
            left = left.add(terms.pair_stride);
            right = right.add(PANEL);
        }
    }
    sums
}

/// Adds the addend to the sums and stores them.
#[allow(unsafe_code)]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn finish<const ROWS: usize, const VECTORS: usize>(
    sums: [[__m512; VECTORS]; ROWS],
    columns: usize,
    output: &Output,
) {
    let rest = columns - (VECTORS - 1) * LANES;
    for (row, sums) in sums.into_iter().enumerate() {
        for (vector, sums) in sums.into_iter().enumerate() {
            let column = vector * LANES;
            let is_partial = vector + 1 == VECTORS && rest < LANES;
            let mask = if is_partial { (1 << rest) - 1 } else { u16::MAX };
            // SAFETY: the mask covers only these columns, by the caller's promise.
            unsafe {
                let addend = output.addend.load_masked(row, column, mask);
                output.target.store_masked(row, column, mask, _mm512_add_ps(sums, addend));
            }
        }
    }
}

impl Addend {
    /// Loads a vector of elements.
    ///
    /// # Safety
    /// The masked elements, starting at this row and column, are valid.
    #[allow(unsafe_code)]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load_masked(self, row: usize, column: usize, mask: u16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Addend::Nothing => _mm512_setzero_ps(),
                Addend::F32(start, stride) => {
                    _mm512_maskz_loadu_ps(mask, start.add(row * stride + column))
                }
                Addend::Bf16(start, stride) => {
                    let start = start.add(row * stride + column);
                    let bits = _mm256_maskz_loadu_epi16(mask, start.cast());
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
                }
            }
        }
    }
}

impl Target {
    /// Stores a vector of elements.
    ///
    /// # Safety
    /// The masked elements, starting at this row and column, are valid, and nothing else accesses
    /// them.
    #[allow(unsafe_code)]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn store_masked(self, row: usize, column: usize, mask: u16, value: __m512) {
        // SAFETY: the caller's promise. Every bit pattern of both 32-byte types is valid.
        unsafe {
            match self {
                Target::F32(start, stride) => {
                    _mm512_mask_storeu_ps(start.add(row * stride + column), mask, value);
                }
                Target::Bf16(start, stride) => {
                    let start = start.add(row * stride + column);
                    let rounded = _mm512_cvtneps_pbh(value);
                    let rounded = std::mem::transmute::<__m256bh, __m256i>(rounded);
                    _mm256_mask_storeu_epi16(start.cast(), mask, rounded);
                }
            }
        }
    }
}
