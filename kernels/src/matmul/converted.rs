//! bf16 matmuls for machines without bf16 instructions: tiles are converted to f32 and multiplied
//! by the crate `gemm`.

use super::dot::widen;
use super::matrix::{Destination, Matrix, MatrixMut};
use super::single;
use crate::scalar::Element;
use crate::scratch::with_scratch;
use crate::simd::vectorized;

/// Rows and columns of an output tile.
const SIDE: usize = 256;
/// Terms of the sums that are converted at a time.
const DEPTH: usize = 512;

/// The most scratch, in elements, of a matmul of at most `most` rows, columns and terms; its tiles
/// are multiplied by [`single`], whose scratch is freed after each.
pub(super) fn most_scratch(most: usize) -> [usize; 3] {
    let (side, depth) = (most.min(SIDE), most.min(DEPTH));
    [side * depth, depth * side, side * side]
}

/// `out = scale * left right`, plus the destination's addend.
pub(super) fn multiply<O: Element, A: Element, B: Element>(
    mut out: MatrixMut<'_, O>,
    destination: Destination<'_, O>,
    scale: f32,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    let accumulate = destination.prepare(&mut out);
    let depth = left.columns.min(DEPTH);
    let (height, width) = (out.rows.min(SIDE), out.columns.min(SIDE));
    let lengths = [height * depth, depth * width, height * width];
    with_scratch(lengths, |[left_tile, right_tile, sums]| {
        for row in (0..out.rows).step_by(SIDE) {
            let rows = row..out.rows.min(row + SIDE);
            for column in (0..out.columns).step_by(SIDE) {
                let columns = column..out.columns.min(column + SIDE);
                let sums = &mut sums[..rows.len() * columns.len()];
                let left = left.rows(rows.clone());
                let right = right.columns(columns.clone());
                tile(sums, scale, left, right, left_tile, right_tile);
                for (row, sums) in rows.clone().zip(sums.chunks_exact(columns.len())) {
                    let out = &mut out.row_mut(row)[columns.clone()];
                    vectorized!(store(out, accumulate, sums));
                }
            }
        }
    });
}

/// An output tile in f32.
fn tile<A: Element, B: Element>(
    sums: &mut [f32],
    scale: f32,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
    left_tile: &mut [f32],
    right_tile: &mut [f32],
) {
    let mut sums = MatrixMut::new(sums, left.rows, right.columns);
    if left.columns == 0 {
        return (0..sums.rows).for_each(|row| sums.row_mut(row).fill(0.0));
    }
    for start in (0..left.columns).step_by(DEPTH) {
        let range = start..left.columns.min(start + DEPTH);
        let left = convert(left.columns(range.clone()), left_tile);
        let right = convert(right.rows(range), right_tile);
        single::gemm(&mut sums, start > 0, scale, left, right);
    }
}

/// The matrix in f32, contiguous along the same dimension.
fn convert<'a, T: Element>(matrix: Matrix<'_, T>, tile: &'a mut [f32]) -> Matrix<'a, f32> {
    let transposed = matrix.column_stride != 1;
    let source = if transposed { matrix.transposed() } else { matrix };
    for (row, slots) in tile.chunks_exact_mut(source.columns).take(source.rows).enumerate() {
        vectorized!(widen(source.row(row), slots));
    }
    let converted = Matrix::new(tile, source.rows, source.columns);
    if transposed { converted.transposed() } else { converted }
}

/// Rounds the sums into a row of the destination.
#[inline(always)]
fn store<O: Element>(out: &mut [O], accumulate: bool, sums: &[f32]) {
    if accumulate {
        for (slot, &sum) in out.iter_mut().zip(sums) {
            *slot = O::from_f32(slot.to_f32() + sum);
        }
    } else {
        for (slot, &sum) in out.iter_mut().zip(sums) {
            *slot = O::from_f32(sum);
        }
    }
}
