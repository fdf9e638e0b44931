//! The innermost loop of bf16 products: a tile of up to 12 x 32 sums stays in registers while
//! pairs of terms are multiplied and added to it by `vdpbf16ps`.
//!
//! A number's sum has the same order in every tile, whatever the tile's size and place.

use std::arch::x86_64::*;

use half::bf16;

use super::pack::{PANEL, TILE_ROWS};

/// Sums in a vector.
const LANES: usize = 16;

/// Where a tile's terms lie.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    /// Pairs of terms.
    pub(super) pairs: usize,
    /// The first pair of the first row.
    pub(super) left: *const u32,
    /// Bytes between rows of the left matrix whose pairs follow each other; none for a packed
    /// tile, where the rows of a pair follow each other.
    pub(super) left_stride: Option<usize>,
    /// A packed panel.
    pub(super) right: *const u32,
}

/// What becomes of a tile's sums: they are scaled, the addends that are not null are added, and
/// the result is written to the output that is not null.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub(super) scale: f32,
    pub(super) add_f32: *const f32,
    pub(super) add_bf16: *const bf16,
    /// Numbers between rows, of each of the four.
    pub(super) add_f32_stride: usize,
    pub(super) add_bf16_stride: usize,
    pub(super) f32: *mut f32,
    pub(super) bf16: *mut bf16,
    pub(super) f32_stride: usize,
    pub(super) bf16_stride: usize,
}

impl Output {
    /// The same for a tile that starts at this row and column.
    pub(super) fn at(self, row: usize, column: usize) -> Output {
        // Wrapping: null pointers move too, but are only compared before they move (`has_*`).
        Output {
            add_f32: moved(self.add_f32, row * self.add_f32_stride + column),
            add_bf16: moved(self.add_bf16, row * self.add_bf16_stride + column),
            f32: moved(self.f32, row * self.f32_stride + column).cast_mut(),
            bf16: moved(self.bf16, row * self.bf16_stride + column).cast_mut(),
            ..self
        }
    }
}

/// The pointer some numbers further, null where it was.
fn moved<T>(pointer: *const T, numbers: usize) -> *const T {
    if pointer.is_null() { pointer } else { pointer.wrapping_add(numbers) }
}

/// Computes a tile of `rows` x `columns` numbers.
///
/// # Safety
/// The terms' pointers hold `rows` and a panel of pairs; the output's pointers that are not null
/// hold `rows` x `columns` numbers at their strides, and no other thread touches those written.
#[allow(unsafe_code)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn tile(rows: usize, columns: usize, terms: Terms, output: &Output) {
    macro_rules! of_rows {
        ($($rows:literal)*) => {
            match (rows, columns > LANES, terms.left_stride.is_some()) {
                $(
                    ($rows, true, true) => sums::<$rows, 2, true>(columns, terms, output),
                    ($rows, true, false) => sums::<$rows, 2, false>(columns, terms, output),
                    ($rows, false, true) => sums::<$rows, 1, true>(columns, terms, output),
                    ($rows, false, false) => sums::<$rows, 1, false>(columns, terms, output),
                )*
                _ => unreachable!("a tile has 1 to {TILE_ROWS} rows"),
            }
        };
    }
    // SAFETY: the caller's promise is that of `sums`.
    unsafe { of_rows!(1 2 3 4 5 6 7 8 9 10 11 12) }
}

/// A tile of `ROWS` x up to `VECTORS * LANES` numbers; `STRIDED` where the left rows are.
#[allow(unsafe_code)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn sums<const ROWS: usize, const VECTORS: usize, const STRIDED: bool>(
    columns: usize,
    terms: Terms,
    output: &Output,
) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    let stride = terms.left_stride.unwrap_or(0);
    let (mut left, mut right) = (terms.left.cast::<u8>(), terms.right);
    // SAFETY: the caller's promise: each iteration reads one pair of the rows and of the panel.
    unsafe {
        for _ in 0..terms.pairs {
            let mut panel = [_mm512_setzero_ps(); VECTORS];
            for (vector, panel) in panel.iter_mut().enumerate() {
                *panel = _mm512_loadu_ps(right.add(vector * LANES).cast());
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let pair = if STRIDED { left.add(row * stride) } else { left.add(row * 4) };
                let pair = _mm512_set1_epi32(pair.cast::<i32>().read_unaligned());
                for (sums, panel) in sums.iter_mut().zip(panel) {
                    *sums = _mm512_dpbf16_ps(
                        *sums,
                        std::mem::transmute::<__m512i, __m512bh>(pair),
                        std::mem::transmute::<__m512, __m512bh>(panel),
                    );
                }
            }
            left = left.add(if STRIDED { 4 } else { 4 * TILE_ROWS });
            right = right.add(PANEL);
        }
    }
    for (vector, start) in (0..columns).step_by(LANES).enumerate().take(VECTORS) {
        let mask = if columns - start < LANES { (1u16 << (columns - start)) - 1 } else { u16::MAX };
        let part = output.at(0, start);
        for (row, sums) in sums.iter().enumerate() {
            // SAFETY: the mask covers columns of the tile alone; the caller's promise.
            unsafe { finish(sums[vector], mask, part.at(row, 0)) };
        }
    }
}

/// Scales, adds and writes one vector of sums.
#[allow(unsafe_code)]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn finish(sums: __m512, mask: u16, output: Output) {
    let mut value = _mm512_mul_ps(sums, _mm512_set1_ps(output.scale));
    // SAFETY: the caller's promise: pointers that are not null hold the numbers of the mask.
    unsafe {
        if !output.add_f32.is_null() {
            value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, output.add_f32));
        }
        if !output.add_bf16.is_null() {
            let bits = _mm256_maskz_loadu_epi16(mask, output.add_bf16.cast());
            let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits));
            value = _mm512_add_ps(value, _mm512_castsi512_ps(wide));
        }
        if !output.f32.is_null() {
            _mm512_mask_storeu_ps(output.f32, mask, value);
        }
        if !output.bf16.is_null() {
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(value));
            _mm256_mask_storeu_epi16(output.bf16.cast(), mask, rounded);
        }
    }
}
