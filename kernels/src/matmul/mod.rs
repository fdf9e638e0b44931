//! The CPU's matmuls, behind bounds-checked views.
//!
//! [`matmul`] runs on the calling thread, [`parallel`](matmul_parallel) on rayon's. The
//! implementation depends only on types and shape. Inner products (`dot`) multiply a few rows by a
//! matrix that is contiguous along k. f32 uses the crate `gemm` (`single`). bf16 uses what [`Bf16Path`]
//! chooses: this crate's own kernels for AMX (`amx`) or AVX512-BF16 (`packed`), in blocks that the
//! threads share (`blocked`), or `gemm` on converted tiles (`converted`). All of them sum in f32 and round once, when the result is stored.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod blocked;
mod converted;
mod dot;
mod matrix;
#[cfg(target_arch = "x86_64")]
mod pack;
#[cfg(target_arch = "x86_64")]
mod packed;
mod parallel;
mod path;
mod single;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tile;
mod transpose;

pub(crate) use matrix::{Destination, Matrix, MatrixMut};
#[cfg(target_arch = "x86_64")]
pub(crate) use pack::interleaved;
pub(crate) use parallel::matmul_parallel;
pub use path::Bf16Path;

use crate::scalar::{DType, Element};
use crate::scratch::{self, ScratchBytes};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use amx::Amx;
#[cfg(target_arch = "x86_64")]
use packed::Avx512;

/// `out = scale * left right`, plus the destination's addend, on the calling thread.
///
/// If one operand is bf16 and the other f32, the latter is rounded to bf16 on machines whose bf16
/// instructions are used.
pub(crate) fn matmul<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    destination: Destination<'_, O>,
    scale: f32,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    check(&out, &destination, &left, &right);
    if out.rows == 0 || out.columns == 0 {
        return;
    }
    if dot::applies(&left, &right) {
        return dot::multiply(out, destination, scale, left, right);
    }
    if let (Some(left), Some(right)) = (left.as_f32(), right.as_f32()) {
        return match out.into_f32() {
            Ok(out) => single::multiply(out, Destination::of_f32(destination), scale, left, right),
            Err(out) => converted::multiply(out, destination, scale, left, right),
        };
    }
    multiply_bf16(out, destination, scale, left, right, 1);
}

/// A matmul with a bf16 operand, on `threads` of rayon's threads if it is not converted.
fn multiply_bf16<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    destination: Destination<'_, O>,
    scale: f32,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
    threads: usize,
) {
    match Bf16Path::in_use() {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Bf16Path::Amx => {
            blocked::multiply::<Amx, _, _, _>(out, destination, scale, left, right, threads);
        }
        #[cfg(target_arch = "x86_64")]
        Bf16Path::Avx512 => {
            blocked::multiply::<Avx512, _, _, _>(out, destination, scale, left, right, threads);
        }
        _ => converted::multiply(out, destination, scale, left, right),
    }
}

/// The most bytes of a thread's scratch in matmuls of matrices of `T`, of at most `most` rows,
/// columns and terms.
pub(crate) fn most_scratch_bytes<T: Element>(most: usize) -> ScratchBytes {
    let few_rows: ScratchBytes = scratch::bytes(&dot::most_scratch(most)).into();
    if T::DTYPE == DType::F32 {
        return few_rows.max(scratch::bytes(&single::most_scratch(most)).into());
    }
    let bf16: ScratchBytes = match Bf16Path::in_use() {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Bf16Path::Amx => ScratchBytes {
            own: scratch::bytes(&amx::most_scratch(most)),
            shared: scratch::bytes(&blocked::most_shared_scratch::<Amx>(most)),
        },
        #[cfg(target_arch = "x86_64")]
        Bf16Path::Avx512 => ScratchBytes {
            own: scratch::bytes(&packed::most_scratch(most)),
            shared: scratch::bytes(&blocked::most_shared_scratch::<Avx512>(most)),
        },
        _ => scratch::bytes(&converted::most_scratch(most)).into(),
    };
    few_rows.max(bf16)
}

/// Panics if the shapes do not match.
fn check<O: Element, A: Element, B: Element>(
    out: &MatrixMut<'_, O>,
    destination: &Destination<'_, O>,
    left: &Matrix<'_, A>,
    right: &Matrix<'_, B>,
) {
    assert_eq!(left.columns, right.rows, "the inner dimensions differ");
    assert_eq!(
        (out.rows, out.columns),
        (left.rows, right.columns),
        "the output has the wrong shape"
    );
    if let Destination::AddTo(addend) = destination {
        assert_eq!(
            (addend.rows, addend.columns),
            (out.rows, out.columns),
            "the addend has the wrong shape"
        );
        assert_eq!(addend.column_stride, 1, "the addend is not row-major");
    }
}
