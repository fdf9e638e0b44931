//! Matmuls of a few rows, as in generation: inner products that read the right matrix once, in
//! memory order.

use pulp::{Arch, Simd, WithSimd};

use super::matrix::{Destination, Matrix, MatrixMut};
use crate::scalar::{DType, Element};
use crate::scratch::with_scratch;

/// Maximum rows of the left matrix: the other implementations copy the right matrix, which costs
/// more than reading it once per row. f32 gains less from a copy than bf16.
const MAX_ROWS: usize = 4;
const MAX_ROWS_F32: usize = 7;
/// Vectors of partial sums per inner product.
const ACCUMULATORS: usize = 4;

/// Whether the left matrix has few rows and both matrices are contiguous along k.
pub(super) fn applies<A, B: Element>(left: &Matrix<'_, A>, right: &Matrix<'_, B>) -> bool {
    let most = if B::DTYPE == DType::F32 { MAX_ROWS_F32 } else { MAX_ROWS };
    left.rows <= most && left.column_stride == 1 && right.row_stride == 1
}

/// The most scratch, in elements, of a matmul of at most `most` terms.
pub(super) fn most_scratch(most: usize) -> [usize; 1] {
    [MAX_ROWS_F32.saturating_mul(most)]
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
    with_scratch([left.rows * left.columns], |[values]| {
        let weight = right.transposed();
        Arch::new().dispatch(Products { out, accumulate, scale, left, weight, values });
    });
}

struct Products<'a, 'b, O, A, B> {
    out: MatrixMut<'a, O>,
    accumulate: bool,
    scale: f32,
    left: Matrix<'a, A>,
    weight: Matrix<'a, B>,
    /// The left matrix in f32.
    values: &'b mut [f32],
}

impl<O: Element, A: Element, B: Element> WithSimd for Products<'_, '_, O, A, B> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Products { mut out, accumulate, scale, left, weight, values } = self;
        let inner = left.columns;
        for row in 0..left.rows {
            let values = &mut values[row * inner..][..inner];
            widen(left.row(row), values);
            if B::DTYPE == DType::BF16 {
                separate::<S>(left.row(row), values);
            }
        }
        for column in 0..out.columns {
            let weight = weight.row(column);
            // Only the first inner product reads the weight's row from memory.
            for row in 0..out.rows {
                let product = inner_product(simd, &values[row * inner..][..inner], weight);
                let slot = &mut out.row_mut(row)[column];
                let before = if accumulate { slot.to_f32() } else { 0.0 };
                *slot = O::from_f32(before + scale * product);
            }
        }
    }
}

/// Converts elements to f32.
#[inline(always)]
pub(super) fn widen<T: Element>(elements: &[T], out: &mut [f32]) {
    for (slot, element) in out.iter_mut().zip(elements) {
        *slot = element.to_f32();
    }
}

/// Writes the elements at even indices of each two vectors to the first, and those at odd indices
/// to the second: a bf16 vector read as u32 separates in this way.
#[inline(always)]
fn separate<S: Simd>(elements: &[impl Element], out: &mut [f32]) {
    let chunks =
        out.chunks_exact_mut(2 * S::F32_LANES).zip(elements.chunks_exact(2 * S::F32_LANES));
    for (out, elements) in chunks {
        let (even, odd) = out.split_at_mut(S::F32_LANES);
        for ((even, odd), pair) in even.iter_mut().zip(odd).zip(elements.chunks_exact(2)) {
            (*even, *odd) = (pair[0].to_f32(), pair[1].to_f32());
        }
    }
}

/// An inner product in an order that depends on its length and on the machine's vectors.
#[inline(always)]
fn inner_product<S: Simd, B: Element>(simd: S, left: &[f32], weight: &[B]) -> f32 {
    let mut sums = [simd.splat_f32s(0.0); ACCUMULATORS];
    let chunk = 2 * S::F32_LANES;
    let (mut left_chunks, mut weight_chunks) =
        (left.chunks_exact(2 * chunk), weight.chunks_exact(2 * chunk));
    for (left, weight) in left_chunks.by_ref().zip(weight_chunks.by_ref()) {
        for half in 0..2 {
            let [first, second] = two_vectors(simd, &weight[half * chunk..][..chunk]);
            let left = &left[half * chunk..][..chunk];
            let (left_first, left_second) = left.split_at(S::F32_LANES);
            let (sum, place) = (sums[2 * half], vector::<S>(left_first));
            sums[2 * half] = simd.mul_add_e_f32s(first, place, sum);
            let (sum, place) = (sums[2 * half + 1], vector::<S>(left_second));
            sums[2 * half + 1] = simd.mul_add_e_f32s(second, place, sum);
        }
    }
    let (left, weight) = (left_chunks.remainder(), weight_chunks.remainder());
    let (mut left_chunks, mut weight_chunks) =
        (left.chunks_exact(chunk), weight.chunks_exact(chunk));
    for (left, weight) in left_chunks.by_ref().zip(weight_chunks.by_ref()) {
        let [first, second] = two_vectors(simd, weight);
        let (left_first, left_second) = left.split_at(S::F32_LANES);
        sums[0] = simd.mul_add_e_f32s(first, vector::<S>(left_first), sums[0]);
        sums[1] = simd.mul_add_e_f32s(second, vector::<S>(left_second), sums[1]);
    }
    let rest = left_chunks.remainder().iter().zip(weight_chunks.remainder());
    let rest: f32 = rest.map(|(left, weight)| left * weight.to_f32()).sum();
    let first = simd.add_f32s(sums[0], sums[1]);
    let second = simd.add_f32s(sums[2], sums[3]);
    rest + simd.reduce_sum_f32s(simd.add_f32s(first, second))
}

/// The elements of two vectors: in order if they are f32, [separated](separate) if bf16.
#[inline(always)]
fn two_vectors<S: Simd, B: Element>(simd: S, elements: &[B]) -> [S::f32s; 2] {
    if B::DTYPE == DType::F32 {
        let (first, second) = elements.split_at(S::F32_LANES);
        return [first, second]
            .map(|half| bytemuck::pod_read_unaligned(bytemuck::cast_slice(half)));
    }
    let pairs: S::u32s = bytemuck::pod_read_unaligned(bytemuck::cast_slice(elements));
    // bf16 is the upper half of f32.
    let even = simd.wrapping_dyn_shl_u32s(pairs, simd.splat_u32s(16));
    let odd = simd.and_u32s(pairs, simd.splat_u32s(0xffff_0000));
    [even, odd].map(|bits| simd.transmute_f32s_u32s(bits))
}

#[inline(always)]
fn vector<S: Simd>(elements: &[f32]) -> S::f32s {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(elements))
}
