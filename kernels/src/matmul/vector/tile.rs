//! The innermost loop of f32 matmuls: a tile of sums stays in the registers while a panel's vectors
//! are multiplied by the elements of some rows.
//!
//! An element's sum has the same order in every tile, of any size and position.

use pulp::Simd;

use super::pack::Left;
use crate::matmul::blocked::PANEL;
use crate::matmul::output::Output;

pub(super) const TILE_ROWS: usize = 12;
/// Vectors of columns of a tile.
const VECTORS: usize = 2;

/// Returns the rows and columns of a tile: with its operands it fills the registers.
#[inline(always)]
pub(super) fn shape<S: Simd>() -> (usize, usize) {
    let rows = if S::REGISTER_COUNT >= 32 { TILE_ROWS } else { TILE_ROWS / 2 };
    (rows, VECTORS * S::F32_LANES)
}

#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) terms: usize,
    pub(super) left: Left,
    /// The tile's columns of a packed panel.
    pub(super) right: *const f32,
}

/// Computes a tile of `rows` x `columns` elements.
///
/// # Safety
/// The operands' pointers are valid for these rows, whole vectors of columns, and their terms. The
/// output's pointers are valid for `rows` x `columns` elements at their strides, and no other thread accesses the
/// written elements.
#[allow(unsafe_code)]
#[inline(always)]
pub(super) unsafe fn tile<S: Simd>(
    simd: S,
    (rows, columns): (usize, usize),
    operands: Operands,
    output: &Output,
) {
    macro_rules! of_rows {
        ($($rows:literal)*) => {
            match (rows, columns > S::F32_LANES) {
                $(
                    ($rows, true) => of::<S, $rows, VECTORS>(simd, columns, operands, output),
                    ($rows, false) => of::<S, $rows, 1>(simd, columns, operands, output),
                )*
                _ => unreachable!("a tile has 1 to {TILE_ROWS} rows"),
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        if S::REGISTER_COUNT >= 32 {
            of_rows!(1 2 3 4 5 6 7 8 9 10 11 12);
        } else {
            of_rows!(1 2 3 4 5 6);
        }
    }
}

/// # Safety
/// See [`tile`].
#[allow(unsafe_code)]
#[inline(always)]
unsafe fn of<S: Simd, const M: usize, const V: usize>(
    simd: S,
    columns: usize,
    operands: Operands,
    output: &Output,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let sums = sums::<S, M, V>(simd, operands);
        for (row, sums) in sums.iter().enumerate() {
            output.store_row(simd, sums, row, columns);
        }
    }
}

/// Returns the sums of M rows and V vectors of columns.
///
/// # Safety
/// See [`tile`].
#[allow(unsafe_code)]
#[inline(always)]
unsafe fn sums<S: Simd, const M: usize, const V: usize>(
    simd: S,
    Operands { terms, left, right }: Operands,
) -> [[S::f32s; V]; M] {
    let (mut element, mut vector) = (left.start(), right);
    let mut sums = [[simd.splat_f32s(0.0); V]; M];
    for _ in 0..terms {
        let mut panel = [simd.splat_f32s(0.0); V];
        for (v, panel) in panel.iter_mut().enumerate() {
            // SAFETY: this term's vectors are within the panel.
            *panel = unsafe { vector.add(v * S::F32_LANES).cast::<S::f32s>().read_unaligned() };
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the pointer is to this term of one of the rows.
            let element = simd.splat_f32s(unsafe { *element.add(row * left.row_stride) });
            for (sum, &vector) in sums.iter_mut().zip(&panel) {
                *sum = simd.mul_add_e_f32s(element, vector, *sum);
            }
        }
        element = element.wrapping_add(left.term_stride);
        vector = vector.wrapping_add(PANEL);
    }
    sums
}
