//! What a matmul asks of the tile unit: the instructions, or in tests a model of them.

use super::operand::{Role, SIDE};
use crate::matmul::matrix::Matrix;
use crate::matmul::output::Output;
use crate::scalar::Element;

/// Sums of a block: row-major, [`SIDE`] x [`SIDE`].
pub(super) const SUMS: usize = SIDE * SIDE;

/// The tile unit of the calling thread.
pub(in crate::matmul) trait Unit: Sized {
    /// Packs an operand, `[rows or columns, terms]`, as [`super::operand`] describes.
    fn pack<T: Element>(operand: Matrix<'_, T>, role: Role, out: &mut [u32]);

    /// The thread's unit, with its tiles configured until it is dropped.
    fn configured() -> Self;

    /// Multiplies a panel of rows by a panel of `columns` columns, both packed, of the same terms. The
    /// sums begin at `sums` if `adds`, else at zero; columns beyond a tile's end are unspecified.
    fn multiply(&self, left: &[u32], right: &[u32], columns: usize, adds: bool, sums: &mut [f32]);

    /// Scales the sums of a block of this many rows and columns, adds the addend and stores them.
    ///
    /// # Safety
    /// The output's pointers are valid for these rows and columns, and no other thread accesses the
    /// elements that are written.
    #[allow(unsafe_code)]
    unsafe fn finish(sums: &[f32], rows: usize, columns: usize, output: &Output);
}
