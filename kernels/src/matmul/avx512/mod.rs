//! bf16 matmuls on machines with AVX512-BF16: rows of packed blocks that fit the caches, divided
//! into tiles. If one operand is bf16 and the other f32, the f32 operand is rounded.

pub(super) mod pack;
mod tile;

use half::bf16;

use super::blocked::{Kernel, PANEL};
use super::matrix::Matrix;
use super::output::Output;
use crate::scalar::{Element, Scalar};
use crate::scratch::with_scratch;
use pack::TILE_ROWS;
use tile::{Terms, tile};

/// Terms per block. Most layers have fewer terms, so their sums are stored once.
const DEPTH: usize = 2048;
/// Rows of a left block, which stays in the second-level cache.
const ROWS: usize = 8 * TILE_ROWS;
/// Elements of a right block, which stays in the last-level cache.
const RIGHT: usize = 1 << 21;
/// Bytes of a pair of terms.
const PAIR: usize = size_of::<u32>();

pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// Returns the maximum scratch, in elements, of a thread in a matmul of at most `most` rows, columns and terms.
pub(super) fn most_scratch(most: usize) -> [usize; 1] {
    let (depth, rows) = (most.min(DEPTH).next_multiple_of(32), most.min(ROWS));
    [left_len(rows, depth, true).max(left_len(rows, depth, false))]
}

/// The instruction `vdpbf16ps`; only if [`available`].
///
/// Right panels larger than the first-level cache had no measurable cost.
pub(super) struct Avx512;

impl Kernel for Avx512 {
    const ROWS: usize = TILE_ROWS;
    const DEPTH: usize = DEPTH;
    const RIGHT: usize = RIGHT;

    fn panel_len(terms: usize) -> usize {
        pack::pairs(terms) * PANEL
    }

    fn pack_right<T: Element>(right: Matrix<'_, T>, out: &mut [u32]) {
        assert!(available());
        // SAFETY: the machine has the instructions.
        #[allow(unsafe_code)]
        unsafe {
            pack::right(right, out);
        }
    }

    #[allow(unsafe_code)]
    unsafe fn multiply_rows<T: Element>(
        left: Matrix<'_, T>,
        right: &[u32],
        columns: usize,
        output: Output,
    ) {
        assert!(available());
        let len = left_len(left.rows.min(ROWS), left.columns, left.column_stride == 1);
        with_scratch([len], |[packed]| {
            let packed = bytemuck::cast_slice_mut(packed);
            // SAFETY: the machine has the instructions. The caller promises the rest.
            unsafe { block(left, packed, right, columns, output) }
        });
    }
}

/// Returns the scratch elements of a left block, with contiguous rows or columns.
fn left_len(rows: usize, terms: usize, by_rows: bool) -> usize {
    if by_rows {
        rows * pack::left_stride(terms)
    } else {
        pack::pairs(terms) * pack::left_width(rows)
    }
}

/// Multiplies a range of rows and terms of the left matrix by a packed right block.
///
/// # Safety
/// The machine has the instructions, `packed` contains the block's panels, and the output's
/// pointers are valid for the left matrix's rows and `columns` columns.
#[allow(unsafe_code)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn block<A: Element>(
    left: Matrix<'_, A>,
    scratch: &mut [u32],
    packed: &[u32],
    columns: usize,
    output: Output,
) {
    let pairs = pack::pairs(left.columns);
    for row in (0..left.rows).step_by(ROWS) {
        let part = left.rows(row..left.rows.min(row + ROWS));
        let by_rows = left.column_stride == 1;
        let (start, row_stride, pair_stride) = if !by_rows {
            pack::left_columns(part, scratch);
            (scratch.as_ptr(), PAIR, PAIR * pack::left_width(part.rows))
        } else if A::DTYPE == bf16::DTYPE && part.columns.is_multiple_of(2) {
            // The pairs are in the kernel's layout.
            (part.data.as_ptr().cast(), size_of::<bf16>() * part.row_stride, PAIR)
        } else {
            pack::left_rows(part, scratch);
            (scratch.as_ptr(), PAIR * pack::left_stride(part.columns), PAIR)
        };
        for column in (0..columns).step_by(PANEL) {
            let right = packed[pairs * column..][..pairs * PANEL].as_ptr();
            for first in (0..part.rows).step_by(TILE_ROWS) {
                let left = start.wrapping_byte_add(row_stride * first);
                let terms = Terms { pairs, left, row_stride, pair_stride, right };
                let size = (TILE_ROWS.min(part.rows - first), PANEL.min(columns - column));
                // SAFETY: the tile is within the packed rows or the left matrix itself, within the
                // panel, and within the output by the caller's promise.
                unsafe { tile(size.0, size.1, terms, &output.at(row + first, column)) };
            }
        }
    }
}
