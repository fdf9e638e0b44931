//! Matmuls on rayon's threads: packed ones share their blocks; the output of others is halved until
//! its blocks are small enough.

use super::matrix::{Destination, Matrix, MatrixMut};
use super::{Bf16Path, check, dot, matmul, multiply_bf16};
use crate::scalar::Element;

/// Multiply-adds below which threads cost more than they save.
const SMALL: usize = 1 << 16;
/// Blocks of a large f32 matmul; the number depends only on the shape, because the order of gemm's
/// sums depends on a block's shape.
const BLOCKS: usize = 16;
/// Blocks per thread of a matmul whose sums do not depend on the division.
const BLOCKS_PER_THREAD: usize = 2;
/// Multiply-adds of the smallest block of a large matmul.
const SMALLEST: usize = 1 << 19;
/// Granularity of the division of rows and columns, from the sizes of tiles and panels. No block
/// has fewer rows: a block of few rows would be summed in another order.
const ROW_STEP: usize = 24;
const COLUMN_STEP: usize = 64;

/// `out = scale * left right`, plus the destination's addend, on rayon's threads; the bits do not
/// depend on their number.
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
    let is_f32 = left.as_f32().is_some() && right.as_f32().is_some();
    if !any && !is_f32 && Bf16Path::in_use() != Bf16Path::F32 {
        let threads = rayon::current_num_threads();
        return multiply_bf16(out, destination, scale, left, right, threads);
    }
    let fixed = is_f32 && !any;
    let blocks = if fixed { BLOCKS } else { BLOCKS_PER_THREAD * rayon::current_num_threads() };
    let smallest = if any { SMALL } else { SMALLEST };
    let division = Division { leaf: (operations / blocks).max(smallest), by_rows: !any };
    division.run(out, destination, scale, left, right);
}

#[derive(Clone, Copy)]
struct Division {
    /// Multiply-adds of a block that is not divided further.
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

/// About half of `count`, in whole steps.
fn half(count: usize, step: usize) -> usize {
    count / 2 / step * step
}
