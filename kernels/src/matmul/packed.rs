//! bf16 matmuls on machines with AVX512-BF16: packed blocks that fit the caches, divided into
//! tiles. An f32 operand beside a bf16 one is rounded.

use half::bf16;

use super::matrix::{Destination, Matrix, MatrixMut};
use super::pack::{self, PANEL, TILE_ROWS};
use super::tile::{Addend, Output, Target, Terms, tile};
use crate::scalar::{DType, Element, Scalar};
use crate::scratch::with_scratch;

/// Terms per block. Most layers have fewer, so their sums leave the registers once; the cost of a
/// right panel beyond the first-level cache was not measurable.
const DEPTH: usize = 2048;
/// Rows of a left block, which stays in the second-level cache.
const ROWS: usize = 8 * TILE_ROWS;
/// Columns of a right block, which stays in the last-level cache.
const COLUMNS: usize = 1024;
/// Rows that share a right block while sums stay in scratch between blocks.
const PARTIAL_ROWS: usize = 2048;

/// Bytes of a pair of terms.
const PAIR: usize = size_of::<u32>();

/// Whether this machine has bf16 instructions.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// The most scratch, in elements, of a matmul of at most `most` rows, columns and terms.
pub(super) fn most_scratch(most: usize) -> [usize; 3] {
    let (depth, columns) = (most.min(DEPTH).next_multiple_of(32), most.min(COLUMNS));
    let rows = most.min(ROWS);
    let left = left_len(rows, depth, true).max(left_len(rows, depth, false));
    let partial = if most > DEPTH { PARTIAL_ROWS * columns } else { 0 };
    [partial, pack::right_len(depth, columns), left]
}

/// `out = scale * left right`, plus the destination's addend; only if [`available`].
pub(super) fn multiply<O: Element, A: Element, B: Element>(
    mut out: MatrixMut<'_, O>,
    destination: Destination<'_, O>,
    scale: f32,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    assert!(available());
    let terms = left.columns;
    let blocks = terms.div_ceil(DEPTH).max(1);
    // A multiple of the vector, so that only the last block is partial.
    let depth = terms.div_ceil(blocks).next_multiple_of(32);
    // A bf16 result is rounded once: until the last block its sums are f32 in scratch.
    let rounded = O::DTYPE != f32::DTYPE && terms > depth;
    let outer = if rounded { out.rows.min(PARTIAL_ROWS) } else { out.rows };
    let partial_len = if rounded { outer * out.columns.min(COLUMNS) } else { 0 };
    let right_len = pack::right_len(depth, out.columns.min(COLUMNS));
    let left_len = left_len(left.rows.min(ROWS), depth, left.column_stride == 1);
    with_scratch([partial_len, right_len, left_len], |[partial, packed_right, packed_left]| {
        let packed_right = bytemuck::cast_slice_mut(packed_right);
        let packed_left = bytemuck::cast_slice_mut(packed_left);
        for column in (0..out.columns).step_by(COLUMNS) {
            let columns = column..out.columns.min(column + COLUMNS);
            for row in (0..out.rows).step_by(outer) {
                let rows = row..out.rows.min(row + outer);
                // Without terms the addend still has to be stored.
                for start in (0..terms.max(1)).step_by(depth.max(1)) {
                    let range = start..terms.min(start + depth);
                    let position =
                        BlockPosition { row, column, first: start == 0, last: range.end == terms };
                    let output =
                        position.output(&mut out, destination, scale, partial, columns.len());
                    let right = right.rows(range.clone()).columns(columns.clone());
                    let left = left.columns(range).rows(rows.clone());
                    // SAFETY: the machine has the instructions (asserted above), and the output has
                    // these rows and columns.
                    #[allow(unsafe_code)]
                    unsafe {
                        pack::right(right, packed_right);
                        block(left, packed_left, packed_right, columns.len(), output);
                    }
                }
            }
        }
    });
}

/// Scratch elements of a left block, with contiguous rows or columns.
fn left_len(rows: usize, terms: usize, by_rows: bool) -> usize {
    if by_rows {
        rows * pack::left_stride(terms)
    } else {
        pack::pairs(terms) * pack::left_width(rows)
    }
}

/// A block's position in the output and in the terms.
pub(super) struct BlockPosition {
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) first: bool,
    pub(super) last: bool,
}

impl BlockPosition {
    /// The destination of the block's sums.
    pub(super) fn output<O: Element>(
        &self,
        out: &mut MatrixMut<'_, O>,
        destination: Destination<'_, O>,
        scale: f32,
        partial: &mut [f32],
        partial_stride: usize,
    ) -> Output {
        let &BlockPosition { row, column, first, last } = self;
        let start = out.start.wrapping_add(row * out.row_stride + column);
        let f32_out = O::DTYPE == DType::F32;
        let addend = match destination {
            _ if !first && f32_out => Addend::F32(start.cast_const().cast(), out.row_stride),
            _ if !first => Addend::F32(partial.as_ptr(), partial_stride),
            Destination::Overwrite => Addend::Nothing,
            Destination::Accumulate => addend(start.cast_const(), out.row_stride),
            Destination::AddTo(Matrix { data, row_stride, .. }) => {
                addend(data[row * row_stride + column..].as_ptr(), row_stride)
            }
        };
        let target = if f32_out {
            Target::F32(start.cast(), out.row_stride)
        } else if last {
            Target::Bf16(start.cast(), out.row_stride)
        } else {
            Target::F32(partial.as_mut_ptr(), partial_stride)
        };
        Output { scale, addend, target }
    }
}

/// Elements of the output's type as an addend.
fn addend<O: Element>(start: *const O, stride: usize) -> Addend {
    if O::DTYPE == DType::F32 {
        Addend::F32(start.cast(), stride)
    } else {
        Addend::Bf16(start.cast(), stride)
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
