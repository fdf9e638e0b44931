//! bf16 products on machines with AVX512-BF16: the blocks that fit the caches, packed, and the
//! tiles that they are made of. f32 matrices that are multiplied by bf16 ones are rounded.

use std::ptr::{null, null_mut};

use half::bf16;

use super::matrix::{Destination, Matrix, MatrixMut};
use super::pack::{self, PANEL, TILE_ROWS};
use super::scratch;
use super::tile::{Output, Terms, tile};
use crate::scalar::{DType, Element, Scalar};

/// Terms of a block: a panel of the right matrix and a tile of the left one share the first cache.
const DEPTH: usize = 512;
/// Rows of a block of the left matrix, which stays in the second cache.
const ROWS: usize = 16 * TILE_ROWS;
/// Columns of a block of the right matrix.
const COLUMNS: usize = 1024;
/// Rows that share a block of the right matrix where sums stay in scratch between blocks.
const PARTIAL_ROWS: usize = 2048;

/// Whether this machine has the instructions.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// `out = scale * left right`, plus what the destination says; only where [`available`].
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
    // A multiple of a vector's length, so that only the last block can have a rest.
    let depth = terms.div_ceil(blocks).next_multiple_of(32);
    // A result in bf16 is rounded once: until the last block its sums are f32 in scratch.
    let rounded = O::DTYPE != f32::DTYPE && terms > depth;
    let outer = if rounded { out.rows.min(PARTIAL_ROWS) } else { out.rows };
    let partial_len = if rounded { outer * out.columns.min(COLUMNS) } else { 0 };
    let right_len = pack::right_len(depth, out.columns.min(COLUMNS));
    scratch::with(&scratch::PARTIAL, partial_len, |partial: &mut [f32]| {
        scratch::with(&scratch::RIGHT, right_len, |packed: &mut [u32]| {
            for column in (0..out.columns).step_by(COLUMNS) {
                let columns = column..out.columns.min(column + COLUMNS);
                for row in (0..out.rows).step_by(outer) {
                    let rows = row..out.rows.min(row + outer);
                    let mut start = 0;
                    loop {
                        let range = start..terms.min(start + depth);
                        let place =
                            Place { row, column, first: start == 0, last: range.end == terms };
                        let output =
                            place.output(&mut out, destination, scale, partial, columns.len());
                        let right = right.rows(range.clone()).columns(columns.clone());
                        let left = left.columns(range.clone()).rows(rows.clone());
                        // SAFETY: the machine has the instructions (asserted above) and the output
                        // is that of these rows and columns.
                        #[allow(unsafe_code)]
                        unsafe {
                            pack::right(right, packed);
                            block(left, packed, columns.len(), output);
                        }
                        start = range.end;
                        if place.last {
                            break;
                        }
                    }
                }
            }
        });
    });
}

/// Which part of the product, and which of the terms, a block is.
struct Place {
    row: usize,
    column: usize,
    first: bool,
    last: bool,
}

impl Place {
    /// Where the block's sums go.
    fn output<O: Element>(
        &self,
        out: &mut MatrixMut<'_, O>,
        destination: Destination<'_, O>,
        scale: f32,
        partial: &mut [f32],
        partial_stride: usize,
    ) -> Output {
        let &Place { row, column, first, last } = self;
        let start = out.start.wrapping_add(row * out.row_stride + column);
        let (addend, addend_stride) = match destination {
            Destination::Overwrite => (null(), 0),
            Destination::Accumulate => (start.cast_const(), out.row_stride),
            Destination::AddTo(addend) => {
                let start = row * addend.row_stride + column;
                (addend.data[start..].as_ptr(), addend.row_stride)
            }
        };
        let mut output = Output {
            scale,
            add_f32: null(),
            add_bf16: null(),
            add_f32_stride: 0,
            add_bf16_stride: 0,
            f32: null_mut(),
            bf16: null_mut(),
            f32_stride: 0,
            bf16_stride: 0,
        };
        if O::DTYPE == DType::F32 {
            let start = start.cast::<f32>();
            (output.f32, output.f32_stride) = (start, out.row_stride);
            (output.add_f32, output.add_f32_stride) = if first {
                (addend.cast(), addend_stride)
            } else {
                (start.cast_const(), out.row_stride)
            };
            return output;
        }
        if !first {
            (output.add_f32, output.add_f32_stride) = (partial.as_ptr(), partial_stride);
        }
        if last {
            (output.add_bf16, output.add_bf16_stride) = (addend.cast(), addend_stride);
            (output.bf16, output.bf16_stride) = (start.cast::<bf16>(), out.row_stride);
        } else {
            (output.f32, output.f32_stride) = (partial.as_mut_ptr(), partial_stride);
        }
        output
    }
}

/// Multiplies some rows and terms of the left matrix by a packed block of the right one.
///
/// # Safety
/// The machine has the instructions, `packed` holds the block's panels, and the output's pointers
/// hold the left matrix's rows and `columns` columns.
#[allow(unsafe_code)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn block<A: Element>(left: Matrix<'_, A>, packed: &[u32], columns: usize, output: Output) {
    let pairs = pack::pairs(left.columns);
    let strided = left.column_stride == 1;
    let len = if strided {
        left.rows.min(ROWS) * pack::left_stride(left.columns)
    } else {
        pack::left_tiles_len(left.rows.min(ROWS), left.columns)
    };
    scratch::with(&scratch::LEFT, len, |scratch: &mut [u32]| {
        for row in (0..left.rows).step_by(ROWS) {
            let part = left.rows(row..left.rows.min(row + ROWS));
            let (start, stride) = if !strided {
                pack::left_tiles(part, scratch);
                (scratch.as_ptr(), None)
            } else if A::DTYPE == bf16::DTYPE && part.columns.is_multiple_of(2) {
                (part.data.as_ptr().cast(), Some(2 * part.row_stride))
            } else {
                pack::left_rows(part, scratch);
                (scratch.as_ptr(), Some(4 * pack::left_stride(part.columns)))
            };
            for column in (0..columns).step_by(PANEL) {
                let panel = packed[pairs * column..][..pairs * PANEL].as_ptr();
                for first in (0..part.rows).step_by(TILE_ROWS) {
                    // Packed tiles and rows of pairs follow each other.
                    let offset = stride.map_or(4 * pairs * first, |stride| stride * first);
                    let terms = Terms {
                        pairs,
                        left: start.wrapping_byte_add(offset),
                        left_stride: stride,
                        right: panel,
                    };
                    let size = (TILE_ROWS.min(part.rows - first), PANEL.min(columns - column));
                    // SAFETY: the tile lies in the packed rows or in the left matrix itself, in
                    // the panel, and in the output by the caller's promise.
                    unsafe { tile(size.0, size.1, terms, &output.at(row + first, column)) };
                }
            }
        }
    });
}
