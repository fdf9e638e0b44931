//! The operands of f32 matmuls: panels of the right matrix, `[terms, PANEL]`, and blocks of the left
//! matrix, which are read in place if their rows are contiguous.

use crate::matmul::blocked::PANEL;
use crate::matmul::dot::widen;
use crate::matmul::matrix::Matrix;
use crate::matmul::transpose::to_row_major;
use crate::scalar::{DType, Element};
use crate::scratch::with_scratch;
use crate::simd::vectorized;

/// Gap between packed rows, in elements, which spreads the rows over the cache sets.
const GAP: usize = 16;
/// A distance of rows in bytes. Multiples of it share few cache sets, so such rows are packed.
const SAME_SETS: usize = 4096;
/// Terms of a right panel that are converted at a time.
const CHUNK: usize = 128;

/// Returns the scratch elements that packing a right panel of this many terms needs.
pub(super) fn right_scratch(terms: usize) -> usize {
    terms.min(CHUNK) * PANEL
}

/// Packs whole panels; columns beyond the matrix are zeros.
pub(super) fn right<T: Element>(matrix: Matrix<'_, T>, out: &mut [f32]) {
    if matrix.rows == 0 {
        return;
    }
    for (panel, out) in out.chunks_exact_mut(matrix.rows * PANEL).enumerate() {
        let start = (panel * PANEL).min(matrix.columns);
        let panel = matrix.columns(start..matrix.columns.min(start + PANEL));
        if panel.columns < PANEL {
            out.fill(0.0);
        }
        match panel.as_f32() {
            _ if panel.column_stride == 1 => vectorized!(copy_rows(panel, out, PANEL)),
            Some(panel) => to_row_major(panel, out, PANEL),
            None => convert_columns(panel, out),
        }
    }
}

/// Copies or converts the rows of a matrix, `width` elements apart.
#[inline(always)]
fn copy_rows<T: Element>(matrix: Matrix<'_, T>, out: &mut [f32], width: usize) {
    for (row, out) in out.chunks_mut(width).enumerate().take(matrix.rows) {
        widen(matrix.row(row), out);
    }
}

/// Packs a panel of a matrix with contiguous columns, after converting them.
fn convert_columns<T: Element>(panel: Matrix<'_, T>, out: &mut [f32]) {
    with_scratch([right_scratch(panel.rows)], |[columns]| {
        for start in (0..panel.rows).step_by(CHUNK) {
            let part = panel.rows(start..panel.rows.min(start + CHUNK));
            vectorized!(copy_rows(part.transposed(), columns, part.rows));
            let columns = Matrix::new(columns, part.columns, part.rows);
            to_row_major(columns.transposed(), &mut out[start * PANEL..], PANEL);
        }
    });
}

/// A block of the left matrix.
#[derive(Clone, Copy)]
pub(super) struct Left {
    start: *const f32,
    /// Elements between rows, and between terms.
    pub(super) row_stride: usize,
    pub(super) term_stride: usize,
}

impl Left {
    /// Returns the block itself if its rows are contiguous f32, otherwise a copy in `packed`, which has
    /// [`left_len`] elements.
    pub(super) fn of<T: Element>(block: Matrix<'_, T>, packed: &mut [f32]) -> Left {
        if let (true, Some(block)) = (is_in_place(&block), block.as_f32()) {
            return Left {
                start: block.data.as_ptr(),
                row_stride: block.row_stride,
                term_stride: 1,
            };
        }
        let start = packed.as_ptr();
        if block.column_stride == 1 {
            let row_stride = block.columns + GAP;
            vectorized!(copy_rows(block, packed, row_stride));
            Left { start, row_stride, term_stride: 1 }
        } else {
            let term_stride = block.rows.next_multiple_of(GAP);
            vectorized!(copy_rows(block.transposed(), packed, term_stride));
            Left { start, row_stride: 1, term_stride }
        }
    }

    pub(super) fn row(self, row: usize) -> Left {
        Left { start: self.start.wrapping_add(row * self.row_stride), ..self }
    }

    /// Returns the first term of the first row.
    pub(super) fn start(&self) -> *const f32 {
        self.start
    }
}

/// Returns whether a block is read in place.
fn is_in_place<T: Element>(block: &Matrix<'_, T>) -> bool {
    let bytes = block.row_stride * size_of::<T>();
    T::DTYPE == DType::F32 && block.column_stride == 1 && !bytes.is_multiple_of(SAME_SETS)
}

/// Returns the scratch elements of a left block.
pub(super) fn left_len<T: Element>(block: Matrix<'_, T>) -> usize {
    if is_in_place(&block) { 0 } else { most_left_len(block.rows, block.columns) }
}

/// Returns the maximum scratch elements of a left block of this shape.
pub(super) fn most_left_len(rows: usize, terms: usize) -> usize {
    (rows * (terms + GAP)).max(terms * rows.next_multiple_of(GAP))
}
