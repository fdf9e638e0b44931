//! Matmuls on rayon's threads. Packed matmuls share their blocks. The columns of inner products are halved
//! until a thread's part is small enough.

use super::matrix::{Matrix, MatrixMut};
use super::{check, dot, matmul, multiply};
use crate::scalar::Element;

/// Multiply-adds below which threads cost more than they save.
const SMALL: usize = 1 << 16;
const PARTS_PER_THREAD: usize = 2;
/// Granularity of the division of columns.
const COLUMN_STEP: usize = 64;

/// Computes `out = left right`, according to the destination, on rayon's threads. The bits do not
/// depend on the number of threads.
pub(crate) fn matmul_parallel<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    check(&out, left.shape(), right.shape());
    let operations = out.rows * out.columns * left.columns.max(1);
    if operations < SMALL {
        return matmul(out, left, right);
    }
    let threads = rayon::current_num_threads();
    if !dot::applies(&left, &right) {
        return multiply(out, left, right, threads);
    }
    inner_products_parallel(out, left, right);
}

/// Computes `out = left right` like `matmul_parallel`, with independent rows: the bits of a row of the result depend
/// only on that row of the left matrix and on the right matrix. Both matrices are contiguous along k.
pub(crate) fn matmul_of_rows<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    check(&out, left.shape(), right.shape());
    assert!(dot::along_k(&left, &right), "the matrices are not contiguous along k");
    inner_products_parallel(out, left, right);
}

fn inner_products_parallel<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    let operations = out.rows * out.columns * left.columns.max(1);
    let part = (operations / (PARTS_PER_THREAD * rayon::current_num_threads())).max(SMALL);
    let columns = part / (out.rows.max(1) * left.columns.max(1));
    inner_products(out, left, right, columns);
}

/// Computes inner products in parts of about `most` columns.
fn inner_products<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
    most: usize,
) {
    let columns = out.columns;
    if columns <= most + most / 4 || columns < 2 * COLUMN_STEP {
        return dot::multiply(out, left, right);
    }
    let at = columns / 2 / COLUMN_STEP * COLUMN_STEP;
    let (first, second) = out.split_columns(at);
    rayon::join(
        || inner_products(first, left, right.columns(0..at), most),
        || inner_products(second, left, right.columns(at..columns), most),
    );
}
