//! f32 matmuls by the crate `gemm`.

use super::matrix::{Destination, Matrix, MatrixMut};
use super::transpose::to_row_major;
use crate::scratch::with_scratch;

/// Terms, rows and columns of transposed blocks.
const DEPTH: usize = 512;
const ROWS: usize = 512;
const COLUMNS: usize = 512;
/// Minimum rows and columns of the output for which transposing pays off.
const FEW: usize = 8;

/// The most scratch, in elements, of a matmul of at most `most` rows, columns and terms.
pub(super) fn most_scratch(most: usize) -> [usize; 2] {
    [most.min(ROWS) * most.min(DEPTH), most.min(DEPTH) * most.min(COLUMNS)]
}

/// `out = scale * left right`, plus the destination's addend.
///
/// gemm reads operands that are contiguous along the output's columns (a left one along its terms)
/// at full speed, and packs others element by element, which costs up to half of it for large ones:
/// those are transposed first, in blocks.
pub(super) fn multiply(
    mut out: MatrixMut<'_, f32>,
    destination: Destination<'_, f32>,
    scale: f32,
    left: Matrix<'_, f32>,
    right: Matrix<'_, f32>,
) {
    let mut accumulate = destination.prepare(&mut out);
    let terms = left.columns;
    let transpose_left = left.column_stride != 1 && out.columns >= FEW;
    let transpose_right = right.column_stride != 1 && out.rows >= FEW;
    if terms == 0 || !(transpose_left || transpose_right) {
        return gemm(&mut out, accumulate, scale, left, right);
    }
    let rows = if transpose_left { out.rows.min(ROWS) } else { out.rows };
    let columns = if transpose_right { out.columns.min(COLUMNS) } else { out.columns };
    let depth = terms.min(DEPTH);
    let left_len = if transpose_left { rows * depth } else { 0 };
    let right_len = if transpose_right { depth * columns } else { 0 };
    with_scratch([left_len, right_len], |[left_block, right_block]| {
        for start in (0..terms).step_by(DEPTH) {
            let range = start..terms.min(start + DEPTH);
            let (left, right) = (left.columns(range.clone()), right.rows(range));
            for column in (0..out.columns).step_by(columns) {
                let right = right.columns(column..out.columns.min(column + columns));
                let right = row_major(transpose_right, right, right_block);
                for row in (0..out.rows).step_by(rows) {
                    let left = left.rows(row..out.rows.min(row + rows));
                    let left = row_major(transpose_left, left, left_block);
                    let mut out = out.block(row, column, left.rows, right.columns);
                    gemm(&mut out, accumulate, scale, left, right);
                }
            }
            accumulate = true;
        }
    });
}

/// The matrix in row-major order, transposed into the block if requested.
fn row_major<'a>(
    transpose: bool,
    matrix: Matrix<'a, f32>,
    block: &'a mut [f32],
) -> Matrix<'a, f32> {
    if !transpose {
        return matrix;
    }
    to_row_major(matrix, block);
    Matrix::new(block, matrix.rows, matrix.columns)
}

/// The result, accumulated into `out` if requested.
pub(super) fn gemm(
    out: &mut MatrixMut<'_, f32>,
    accumulate: bool,
    scale: f32,
    left: Matrix<'_, f32>,
    right: Matrix<'_, f32>,
) {
    assert_eq!((out.rows, out.columns), (left.rows, right.columns));
    assert_eq!(left.columns, right.rows);
    // SAFETY: each matrix contains rows x columns elements at its strides (the views' invariant),
    // out has the output's shape and the inner dimensions agree (checked above), and out cannot
    // overlap the inputs, since it is the only view of its elements.
    #[allow(unsafe_code)]
    unsafe {
        gemm::gemm(
            out.rows,
            out.columns,
            left.columns,
            out.start,
            1,
            out.row_stride as isize,
            accumulate,
            left.data.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.data.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
