//! Matmuls by a right matrix that was packed before: in generation, a layer multiplies a few rows
//! by the same matrix again and again.
//!
//! The bits of a row of the result depend only on that row of the left matrix and on the right matrix.
//! The row has the same bits as in [`super::multiply`], which computes no inner products.

#[cfg(target_arch = "x86_64")]
use super::avx512::Avx512;
use super::blocked::{BlockPosition, Kernel, PANEL, depth};
use super::check;
use super::matrix::{Matrix, MatrixMut};
use super::path::Bf16Path;
use super::vector::Vector;
use crate::scalar::{DType, Element};
use crate::scratch::with_scratch;

/// Multiply-adds of a part of the columns below which threads cost more than they save.
const SMALL: usize = 1 << 16;
const PARTS_PER_THREAD: usize = 2;
/// Rows that are multiplied at a time; scratch has partial sums of this many rows.
const ROWS: usize = 192;

/// A right matrix as packed panels: each block of terms has the panels of all columns.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a> {
    data: &'a [u32],
    /// The terms, which are the rows of the matrix.
    terms: usize,
    columns: usize,
}

impl<'a> Packed<'a> {
    /// Creates a matrix of elements `T` from the output of [`pack`].
    pub(crate) fn new<T: Element>(data: &'a [u32], terms: usize, columns: usize) -> Self {
        assert_eq!(data.len(), packed_len::<T>(terms, columns), "another matrix was packed");
        Packed { data, terms, columns }
    }
}

/// Evaluates an expression with `$kernel` as the instructions that multiply packed matrices of `$element`. If these
/// matrices are not packed, evaluates another expression. Without bf16 instructions, bf16 is not packed: it would
/// become f32, which takes twice as long to read.
macro_rules! with_kernel {
    ($kernel:ident, $element:ty, $body:expr, $otherwise:expr) => {
        match Bf16Path::in_use() {
            _ if <$element>::DTYPE == DType::F32 => {
                type $kernel = Vector;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Bf16Path::Avx512 => {
                type $kernel = Avx512;
                $body
            }
            _ => $otherwise,
        }
    };
}

/// Returns the elements of a packed matrix; 0 if matrices of `T` are not packed on this machine.
pub(crate) fn packed_len<T: Element>(terms: usize, columns: usize) -> usize {
    with_kernel!(K, T, blocks::<K>(terms).map(|block| len::<K>(columns, block.len())).sum(), 0)
}

pub(crate) fn pack<T: Element>(right: Matrix<'_, T>, out: &mut [u32]) {
    assert_eq!(out.len(), packed_len::<T>(right.rows, right.columns), "no room for the matrix");
    with_kernel!(K, T, pack_by::<K, T>(right, out), ());
}

fn pack_by<K: Kernel, T: Element>(right: Matrix<'_, T>, mut out: &mut [u32]) {
    for block in blocks::<K>(right.rows) {
        let (part, rest) = out.split_at_mut(len::<K>(right.columns, block.len()));
        K::pack_right(right.rows(block), part);
        out = rest;
    }
}

/// Computes `out = left right`, according to the destination, on rayon's threads.
pub(crate) fn matmul_packed<O: Element, A: Element>(
    out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Packed<'_>,
) {
    check(&out, left.shape(), [right.terms, right.columns]);
    let operations = out.rows * out.columns * left.columns.max(1);
    let part = (operations / (PARTS_PER_THREAD * rayon::current_num_threads())).max(SMALL);
    let most = part / (out.rows.max(1) * left.columns.max(1));
    let product = Product { left, right, first: 0 };
    with_kernel!(K, A, product.in_parts::<K, O>(out, most), unreachable!("no packed matrix"));
}

fn blocks<K: Kernel>(terms: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let depth = depth::<K>(terms).max(1);
    // Without terms the addend must still be stored.
    (0..terms.max(1)).step_by(depth).map(move |start| start..terms.min(start + depth))
}

fn len<K: Kernel>(columns: usize, terms: usize) -> usize {
    super::blocked::packed_len::<K>(columns, terms)
}

/// A matmul of some columns, starting at `first`.
#[derive(Clone, Copy)]
struct Product<'a, A> {
    left: Matrix<'a, A>,
    right: Packed<'a>,
    first: usize,
}

impl<A: Element> Product<'_, A> {
    /// Multiplies in parts of about `most` columns, whole panels.
    fn in_parts<K: Kernel, O: Element>(self, out: MatrixMut<'_, O>, most: usize) {
        let columns = out.columns;
        if columns <= most + most / 4 || columns < 2 * PANEL {
            return self.multiply::<K, O>(out);
        }
        let at = columns / 2 / PANEL * PANEL;
        let (first, second) = out.split_columns(at);
        rayon::join(
            || self.in_parts::<K, O>(first, most),
            || Product { first: self.first + at, ..self }.in_parts::<K, O>(second, most),
        );
    }

    /// Multiplies on the calling thread.
    fn multiply<K: Kernel, O: Element>(self, mut out: MatrixMut<'_, O>) {
        let (terms, columns) = (self.right.terms, out.columns);
        if out.rows == 0 || columns == 0 {
            return;
        }
        let is_partial = O::DTYPE != DType::F32 && terms > depth::<K>(terms);
        let partial = if is_partial { ROWS.min(out.rows) * columns } else { 0 };
        with_scratch([partial], |[partial]| {
            for row in (0..out.rows).step_by(ROWS) {
                let part = row..out.rows.min(row + ROWS);
                let mut start = 0;
                for block in blocks::<K>(terms) {
                    let position = BlockPosition {
                        row,
                        column: 0,
                        first: block.start == 0,
                        last: block.end == terms,
                    };
                    let output = position.output(&mut out, partial, columns);
                    let panel = K::panel_len(block.len());
                    let panels = &self.right.data[start + self.first / PANEL * panel..]
                        [..columns.div_ceil(PANEL) * panel];
                    let left = self.left.columns(block.clone()).rows(part.clone());
                    // SAFETY: the output has these rows and columns, and only this call accesses it.
                    #[allow(unsafe_code)]
                    unsafe {
                        K::multiply_rows(left, panels, columns, output);
                    }
                    start += len::<K>(self.right.columns, block.len());
                }
            }
        });
    }
}
