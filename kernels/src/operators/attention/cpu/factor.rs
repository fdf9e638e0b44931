//! The operands of attention's matmuls: f32 elements, or pairs of bf16 if the machine has an
//! instruction that multiplies them.

use bytemuck::Pod;
use pulp::{Arch, Simd, WithSimd};

use crate::scalar::Element;

/// Columns of the gradients of heads with at most this many elements, for any length of vectors.
pub(super) const NARROW: usize = 8;

/// The 32 bits in a lane of a matmul's operand: one or several terms of its sum.
pub(super) trait Factor: Pod {
    const TERMS: usize;

    /// Returns whether the machine can multiply elements of this type as these factors.
    fn multiplies<T: Element>(arch: Arch) -> bool;

    /// Returns the factor with the terms `term(0)..term(TERMS - 1)`.
    fn of<T: Element>(term: impl Fn(usize) -> T) -> Self;

    /// Runs vector code that multiplies these factors.
    fn dispatch<W: WithSimd>(arch: Arch, work: W) -> W::Output;

    /// Returns `sum` plus the products of this factor's terms with the terms of the vector's factors. Only within
    /// [`dispatch`](Self::dispatch).
    fn multiply_add<S: Simd>(self, simd: S, vector: S::f32s, sum: S::f32s) -> S::f32s;

    /// Computes the same for a vector of [`NARROW`] factors, on a machine with longer vectors.
    fn multiply_add_narrow(self, vector: [Self; NARROW], sum: [f32; NARROW]) -> [f32; NARROW];

    /// Writes the elements of two keys of a block, two vectors each, to the block's pair of keys with
    /// index `two`.
    fn store<S: Simd>(simd: S, block: &mut Block<'_, Self>, two: usize, keys: [[S::f32s; 2]; 2]);

    /// Returns the operand of a matmul: the elements themselves, or the factors stored for them.
    fn choose<'a>(elements: &'a [f32], stored: &'a [Self]) -> &'a [Self];
}

/// Elements of a block of keys and a tile's rows, `[keys, rows]`, and the same elements as factors. The
/// buffers of factors are empty if a factor has one term or if no matmul reads them.
pub(super) struct Block<'a, F> {
    /// The elements; if a factor has one term, they are also the factors.
    pub elements: &'a mut [f32],
    /// Empty, or `[keys / TERMS, rows]`.
    pub along_keys: &'a mut [F],
    /// Empty, or `[keys, rows / TERMS]`.
    pub along_rows: &'a mut [F],
}

impl<F: Factor> Block<'_, F> {
    /// Returns the block as factors with terms along its keys, `[keys / TERMS, rows]`.
    #[inline(always)]
    pub(super) fn factors_along_keys(&self) -> &[F] {
        F::choose(self.elements, self.along_keys)
    }

    /// Returns the block as factors with terms along its rows, `[keys, rows / TERMS]`.
    #[inline(always)]
    pub(super) fn factors_along_rows(&self) -> &[F] {
        F::choose(self.elements, self.along_rows)
    }
}

impl Factor for f32 {
    const TERMS: usize = 1;

    fn multiplies<T: Element>(_: Arch) -> bool {
        true
    }

    #[inline(always)]
    fn of<T: Element>(term: impl Fn(usize) -> T) -> f32 {
        term(0).to_f32()
    }

    fn dispatch<W: WithSimd>(arch: Arch, work: W) -> W::Output {
        arch.dispatch(work)
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(self, simd: S, vector: S::f32s, sum: S::f32s) -> S::f32s {
        simd.mul_add_e_f32s(simd.splat_f32s(self), vector, sum)
    }

    #[inline(always)]
    fn multiply_add_narrow(self, vector: [f32; NARROW], mut sum: [f32; NARROW]) -> [f32; NARROW] {
        // All machines with longer vectors fuse multiplication and addition.
        for (sum, element) in sum.iter_mut().zip(vector) {
            *sum = self.mul_add(element, *sum);
        }
        sum
    }

    #[inline(always)]
    fn store<S: Simd>(_: S, block: &mut Block<'_, f32>, two: usize, keys: [[S::f32s; 2]; 2]) {
        let vectors = &mut S::as_mut_simd_f32s(block.elements).0[4 * two..][..4];
        vectors[..2].copy_from_slice(&keys[0]);
        vectors[2..].copy_from_slice(&keys[1]);
    }

    #[inline(always)]
    fn choose<'a>(elements: &'a [f32], _: &'a [f32]) -> &'a [f32] {
        elements
    }
}
