//! Products on rayon's threads: the output is halved until its parts are small enough.

use super::matrix::{Destination, Matrix, MatrixMut};
use super::{check, dot, matmul};
use crate::scalar::Element;

/// Multiplications and additions below which threads cost more than they give.
const SMALL: usize = 1 << 16;
/// Parts that a large product of f32 is divided into; a number of the shape alone, because the
/// order of gemm's sums depends on a part's shape.
const PARTS: usize = 16;
/// Parts for each thread of a product whose sums do not depend on the division.
const PARTS_PER_THREAD: usize = 2;
/// Multiplications and additions of the smallest part of a large product.
const SMALLEST: usize = 1 << 19;
/// What rows and columns are divided by where they can be, from a tile's and a panel's sizes. No
/// part has fewer rows, so that none becomes one of a few rows, whose sums have another order.
const ROW_STEP: usize = 24;
const COLUMN_STEP: usize = 64;

/// `out = scale * left right`, plus what the destination says, on rayon's threads; with the same
/// bits whatever their number.
pub(crate) fn matmul_parallel<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    destination: Destination<'_, O>,
    scale: f32,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    check(&out, &destination, &left, &right);
    let operations = out.rows * out.columns * left.columns.max(1);
    if operations < SMALL {
        return matmul(out, destination, scale, left, right);
    }
    let any = dot::applies(&left, &right);
    let fixed = left.as_f32().is_some() && right.as_f32().is_some() && !any;
    let parts = if fixed { PARTS } else { PARTS_PER_THREAD * rayon::current_num_threads() };
    let smallest = if any { SMALL } else { SMALLEST };
    let division = Division { leaf: (operations / parts).max(smallest), by_rows: !any };
    division.run(out, destination, scale, left, right);
}

#[derive(Clone, Copy)]
struct Division {
    /// Multiplications and additions of a part that is not divided further.
    leaf: usize,
    /// Whether rows may be divided.
    by_rows: bool,
}

impl Division {
    fn run<O: Element, A: Element, B: Element>(
        self,
        out: MatrixMut<'_, O>,
        destination: Destination<'_, O>,
        scale: f32,
        left: Matrix<'_, A>,
        right: Matrix<'_, B>,
    ) {
        let (rows, columns) = (out.rows, out.columns);
        let by_rows = self.by_rows && rows >= 2 * ROW_STEP;
        let by_columns = columns >= 2 * COLUMN_STEP;
        if rows * columns * left.columns.max(1) <= self.leaf + self.leaf / 4
            || !(by_rows || by_columns)
        {
            return matmul(out, destination, scale, left, right);
        }
        if by_rows && (rows >= columns || !by_columns) {
            let at = half(rows, ROW_STEP);
            let (first, second) = out.split_rows(at);
            rayon::join(
                || self.run(first, destination.rows(0..at), scale, left.rows(0..at), right),
                || {
                    let rest = at..rows;
                    let destination = destination.rows(rest.clone());
                    self.run(second, destination, scale, left.rows(rest), right)
                },
            );
        } else {
            let at = half(columns, COLUMN_STEP);
            let (first, second) = out.split_columns(at);
            rayon::join(
                || self.run(first, destination.columns(0..at), scale, left, right.columns(0..at)),
                || {
                    let rest = at..columns;
                    let destination = destination.columns(rest.clone());
                    self.run(second, destination, scale, left, right.columns(rest))
                },
            );
        }
    }
}

/// About half of `count`, whole steps.
fn half(count: usize, step: usize) -> usize {
    count / 2 / step * step
}
