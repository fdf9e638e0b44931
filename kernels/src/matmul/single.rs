//! f32 products by the crate `gemm`.

use super::matrix::{Destination, Matrix, MatrixMut};
use super::scratch;

/// Columns of the left matrix that are transposed at a time.
const DEPTH: usize = 1024;
/// Side of the squares that are transposed.
const SQUARE: usize = 16;

/// `out = scale * left right`, plus what the destination says.
pub(super) fn multiply(
    mut out: MatrixMut<'_, f32>,
    destination: Destination<'_, f32>,
    scale: f32,
    left: Matrix<'_, f32>,
    right: Matrix<'_, f32>,
) {
    let mut accumulate = destination.prepare(&mut out);
    if left.column_stride == 1 || left.rows < SQUARE || left.columns < SQUARE {
        return product(&mut out, accumulate, scale, left, right);
    }
    // gemm packs a left matrix that is contiguous along m by single numbers, which costs up to
    // half its speed; transposed by squares first it is as fast as any.
    let deepest = left.columns.min(DEPTH);
    scratch::with(&scratch::LEFT, left.rows * deepest, |transposed: &mut [f32]| {
        for start in (0..left.columns).step_by(DEPTH) {
            let range = start..left.columns.min(start + DEPTH);
            let depth = range.len();
            transpose(left.columns(range.clone()), transposed);
            let part = Matrix::new(transposed, left.rows, depth);
            product(&mut out, accumulate, scale, part, right.rows(range));
            accumulate = true;
        }
    });
}

/// Writes a matrix that is contiguous along its rows' dimension to row-major order.
fn transpose(matrix: Matrix<'_, f32>, out: &mut [f32]) {
    crate::simd::vectorized!({
        for row in (0..matrix.rows).step_by(SQUARE) {
            for column in (0..matrix.columns).step_by(SQUARE) {
                transpose_square(&matrix, row, column, out);
            }
        }
    });
}

#[inline(always)]
fn transpose_square(matrix: &Matrix<'_, f32>, row: usize, column: usize, out: &mut [f32]) {
    let (rows, columns) = (SQUARE.min(matrix.rows - row), SQUARE.min(matrix.columns - column));
    let mut square = [[0f32; SQUARE]; SQUARE];
    for (i, square) in square[..columns].iter_mut().enumerate() {
        let start = (column + i) * matrix.column_stride + row;
        square[..rows].copy_from_slice(&matrix.data[start..start + rows]);
    }
    for i in 0..rows {
        let out = &mut out[(row + i) * matrix.columns + column..][..columns];
        for (slot, square) in out.iter_mut().zip(&square) {
            *slot = square[i];
        }
    }
}

/// The product, added to what `out` holds where asked for.
pub(super) fn product(
    out: &mut MatrixMut<'_, f32>,
    accumulate: bool,
    scale: f32,
    left: Matrix<'_, f32>,
    right: Matrix<'_, f32>,
) {
    assert_eq!((out.rows, out.columns), (left.rows, right.columns));
    assert_eq!(left.columns, right.rows);
    // SAFETY: each matrix holds rows x columns numbers at its strides (the views' invariant), out
    // has the product's shape and the inner dimensions agree (checked above), and out cannot
    // overlap the inputs, being the only view of its numbers.
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
