//! The CPU's matmuls, behind bounds-checked views.
//!
//! [`matmul`] runs on the calling thread, [`parallel`](matmul_parallel) on rayon's. The
//! implementation depends only on types and shape:
//!
//! - Inner products ([`dot`]) multiply by a matrix that is contiguous along k. They multiply a few rows, or any
//!   number of rows that must not depend on each other ([`matmul_of_rows`]).
//! - [`packed`] multiplies by a matrix that was packed before, such as a layer's weight in generation.
//! - All other matmuls are divided into packed blocks that the threads share ([`blocked`]). f32 vectors
//!   multiply f32 blocks ([`vector`]). For bf16, [`Bf16Path`] chooses AVX512-BF16 ([`avx512`]) or f32 vectors.
//!
//! All implementations sum in f32 and round once, when the result is stored.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocked;
mod dot;
mod matrix;
mod output;
mod packed;
mod parallel;
mod path;
#[cfg(test)]
mod tests;
mod transpose;
mod vector;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::pack::interleaved;
pub(crate) use dot::{join, prefetch, products, separate, vector_of_two};
pub use matrix::Accumulation;
pub(crate) use matrix::{Destination, Matrix, MatrixMut};
pub(crate) use packed::{Packed, matmul_packed, pack, packed_len};
pub(crate) use parallel::{matmul_of_rows, matmul_parallel};
pub use path::Bf16Path;
pub(crate) use transpose::to_row_major;

use crate::scalar::{DType, Element};
use crate::scratch::{self, ScratchBytes};
#[cfg(target_arch = "x86_64")]
use avx512::Avx512;
use blocked::Kernel;
use vector::Vector;

/// Computes `out = left right`, according to the destination, on the calling thread.
///
/// If one operand is bf16 and the other f32, the f32 operand is rounded to bf16 on machines that use bf16
/// instructions.
pub(crate) fn matmul<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    check(&out, left.shape(), right.shape());
    if dot::applies(&left, &right) {
        return dot::multiply(out, left, right);
    }
    multiply(out, left, right, 1);
}

/// Multiplies in packed blocks on `threads` of rayon's threads.
fn multiply<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
    threads: usize,
) {
    let has_bf16 = A::DTYPE != DType::F32 || B::DTYPE != DType::F32;
    match Bf16Path::in_use() {
        #[cfg(target_arch = "x86_64")]
        Bf16Path::Avx512 if has_bf16 => {
            blocked::multiply::<Avx512, _, _, _>(out, left, right, threads);
        }
        _ => blocked::multiply::<Vector, _, _, _>(out, left, right, threads),
    }
}

/// Returns the maximum bytes of a thread's scratch in matmuls of matrices of `T`, of at most `most` rows,
/// columns and terms.
pub(crate) fn most_scratch_bytes<T: Element>(most: usize) -> ScratchBytes {
    fn of<K: Kernel>(own: &[usize], most: usize) -> ScratchBytes {
        let shared = scratch::bytes(&blocked::most_shared_scratch::<K>(most));
        ScratchBytes { own: scratch::bytes(own), shared }
    }
    let few_rows: ScratchBytes = scratch::bytes(&dot::most_scratch(most)).into();
    let blocks = match Bf16Path::in_use() {
        #[cfg(target_arch = "x86_64")]
        Bf16Path::Avx512 if T::DTYPE != DType::F32 => {
            of::<Avx512>(&avx512::most_scratch(most), most)
        }
        _ => of::<Vector>(&vector::most_scratch(most), most),
    };
    few_rows.max(blocks)
}

/// Panics if the shapes do not match.
fn check<O: Element>(
    out: &MatrixMut<'_, O>,
    [rows, left_columns]: [usize; 2],
    [right_rows, columns]: [usize; 2],
) {
    assert_eq!(left_columns, right_rows, "the inner dimensions differ");
    assert_eq!((out.rows, out.columns), (rows, columns), "the output has the wrong shape");
    if let Destination::AddTo(addend) = &out.destination {
        assert_eq!(addend.shape(), [rows, columns], "the addend has the wrong shape");
        assert_eq!(addend.column_stride, 1, "the addend is not row-major");
    }
}
