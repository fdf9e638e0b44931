//! Products of a few rows, as one generated token has: inner products that read the right matrix
//! once, in the order in which it lies in memory.

use super::matrix::{Destination, Matrix, MatrixMut};
use super::scratch;
use crate::scalar::Element;
use crate::simd::vectorized;

/// Rows of the left matrix at the most.
const MOST_ROWS: usize = 4;
/// Partial sums of an inner product.
const LANES: usize = 32;

/// Whether the product is one of few rows, with both matrices contiguous along k.
pub(super) fn applies<A, B>(left: &Matrix<'_, A>, right: &Matrix<'_, B>) -> bool {
    left.rows <= MOST_ROWS && left.column_stride == 1 && right.row_stride == 1
}

/// `out = scale * left right`, plus what the destination says.
pub(super) fn multiply<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    destination: Destination<'_, O>,
    scale: f32,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    let inner = left.columns;
    scratch::with(&scratch::LEFT, left.rows * inner, |values: &mut [f32]| {
        vectorized!({
            for (row, values) in values.chunks_exact_mut(inner.max(1)).enumerate() {
                for (slot, value) in values.iter_mut().zip(left.row(row)) {
                    *slot = value.to_f32();
                }
            }
        });
        match left.rows {
            1 => rows::<1, O, B>(out, destination, scale, values, right),
            2 => rows::<2, O, B>(out, destination, scale, values, right),
            3 => rows::<3, O, B>(out, destination, scale, values, right),
            _ => rows::<4, O, B>(out, destination, scale, values, right),
        }
    });
}

fn rows<const M: usize, O: Element, B: Element>(
    mut out: MatrixMut<'_, O>,
    destination: Destination<'_, O>,
    scale: f32,
    left: &[f32],
    right: Matrix<'_, B>,
) {
    let accumulate = destination.prepare(&mut out);
    let weight = right.transposed();
    let left: [&[f32]; M] = std::array::from_fn(|row| &left[row * right.rows..][..right.rows]);
    vectorized!({
        for column in 0..out.columns {
            let products = inner_products(left, weight.row(column));
            for (row, product) in products.into_iter().enumerate() {
                let slot = &mut out.row_mut(row)[column];
                let before = if accumulate { slot.to_f32() } else { 0.0 };
                *slot = O::from_f32(before + scale * product);
            }
        }
    });
}

/// Inner products of each row with the weight's row, in a fixed order that vectorises.
#[inline(always)]
fn inner_products<const M: usize, B: Element>(left: [&[f32]; M], weight: &[B]) -> [f32; M] {
    let (chunks, rest) = weight.as_chunks::<LANES>();
    let left_chunks = left.map(|row| row.as_chunks::<LANES>());
    let mut partial = [[0f32; LANES]; M];
    for (index, chunk) in chunks.iter().enumerate() {
        for row in 0..M {
            let values = &left_chunks[row].0[index];
            for lane in 0..LANES {
                partial[row][lane] += values[lane] * chunk[lane].to_f32();
            }
        }
    }
    for row in 0..M {
        for ((slot, &value), weight) in partial[row].iter_mut().zip(left_chunks[row].1).zip(rest) {
            *slot += value * weight.to_f32();
        }
    }
    partial.map(|mut lanes| {
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                lanes[lane] += lanes[lane + width];
            }
            width /= 2;
        }
        lanes[0]
    })
}
