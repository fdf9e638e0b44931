//! Matmuls by cuBLASLt, with one cached plan per shape.
//!
//! cuBLASLt's matrices are column-major, this crate's row-major. cuBLASLt multiplies the transposes, which
//! are the same memory, in reverse order.

mod fastest;
mod plan;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::ptr;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::DriverError;
use cudarc::driver::sys::CUstream;

use super::device::{Algorithms, Matmul, Operand};
use crate::error::{Error, Result};
use plan::Plan;

const WORKSPACE: usize = crate::gpu_sizes::MATMUL;
/// Number of timed algorithms.
const CANDIDATES: usize = 8;
/// Minimum multiply-adds of a timed matmul: about 30 microseconds on a large GPU.
const WORTH_TIMING: u128 = 10_000_000_000;

/// Alignment of whole buffers and of most addresses within them. cuBLASLt has more algorithms for larger
/// alignments.
const ALIGNMENT: u32 = 256;

/// Number of rows with which cuBLASLt chooses the algorithm of [`Algorithms::OfAnyRows`].
const FEW_ROWS: usize = 64;
/// Largest alignment in keys of [`Algorithms::OfAnyRows`], in bytes: part of a buffer's rows then gets the same
/// alignment as the whole buffer.
const ROW_ALIGNMENT: u32 = 16;

/// The key of a plan: shapes, types, transposition, presence of an addend, the common power-of-two
/// alignment of all addresses, and how the algorithm is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    operands: [Operand; 3],
    adds: bool,
    alignment: u32,
    algorithms: Algorithms,
}

impl Key {
    fn new(matmul: &Matmul, algorithms: Algorithms) -> Self {
        let operands = [matmul.out, matmul.left, matmul.right];
        let addresses = operands.iter().map(|operand| operand.address).chain(matmul.addend);
        let [rows, columns, terms] = [matmul.out.rows, matmul.out.columns, matmul.left.columns];
        let multiply_adds = rows as u128 * columns as u128 * terms as u128;
        // The rows of a transposed left operand are the terms of the sums.
        let has_rows = !matmul.left.transposed;
        let algorithms = match algorithms {
            Algorithms::Fastest if multiply_adds >= WORTH_TIMING => Algorithms::Fastest,
            Algorithms::OfAnyRows if has_rows => Algorithms::OfAnyRows,
            _ => Algorithms::OfShape,
        };
        let most = if algorithms == Algorithms::OfAnyRows { ROW_ALIGNMENT } else { ALIGNMENT };
        Key {
            alignment: alignment(addresses).min(most),
            operands: operands.map(|operand| Operand { address: 0, ..operand }),
            adds: matmul.addend.is_some(),
            algorithms,
        }
    }

    /// Returns the operands for which cuBLASLt chooses algorithms.
    fn chosen_for(&self) -> [Operand; 3] {
        let [out, left, right] = self.operands;
        let few = |operand: Operand| Operand { rows: FEW_ROWS, ..operand };
        match self.algorithms {
            Algorithms::OfAnyRows => [few(out), few(left), right],
            Algorithms::OfShape | Algorithms::Fastest => self.operands,
        }
    }
}

/// Returns the largest of the keys' alignments that all addresses have, in bytes.
fn alignment(addresses: impl Iterator<Item = u64>) -> u32 {
    let bits = addresses.fold(0, |bits, address| bits | address);
    let has = |alignment: &u32| bits.is_multiple_of(u64::from(*alignment));
    // Addresses are aligned at least to an element.
    [ALIGNMENT, 16, 4].into_iter().find(has).unwrap_or(2)
}

/// cuBLASLt, its workspace, and the cached plans.
pub(super) struct Matmuls {
    library: Library,
    plans: HashMap<Key, Plan>,
}

/// The arguments of every call of cuBLASLt.
struct Library {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
}

impl Matmuls {
    /// Initialises cuBLASLt for the GPU that is bound to this thread.
    pub(super) fn new(device: &str) -> Result<Self> {
        let failed = |reason: String| Error::device(device, "starting cuBLASLt", reason);
        let handle = result::create_handle().map_err(|error| failed(error.to_string()))?;
        // SAFETY: the size is not 0.
        #[allow(unsafe_code)]
        let workspace = unsafe { cudarc::driver::result::malloc_sync(WORKSPACE) };
        let workspace = workspace.map_err(|error| failed(error.to_string()))?;
        Ok(Matmuls { library: Library { handle, workspace }, plans: HashMap::new() })
    }

    /// Destroys the handles and frees the workspace.
    ///
    /// # Safety
    /// The GPU is bound to this thread, its work is done, and no matmul follows.
    #[allow(unsafe_code)]
    pub(super) unsafe fn destroy(&mut self) -> std::result::Result<(), DriverError> {
        for (_, plan) in self.plans.drain() {
            plan.destroy();
        }
        // SAFETY: the caller's promise; `new` created both. A destructor cannot report errors.
        unsafe {
            let _ = result::destroy_handle(self.library.handle);
            cudarc::driver::result::free_sync(self.library.workspace)
        }
    }

    /// Enqueues the matmul on `stream`.
    ///
    /// The algorithm is cuBLASLt's first for the shape, or with [`Algorithms::OfAnyRows`] for a few rows: the same in
    /// every run. For a large matmul with [`Algorithms::Fastest`] it is the fastest of several, timed on the operands
    /// of the first matmul with its shape.
    pub(super) fn run(
        &mut self,
        matmul: &Matmul,
        algorithms: Algorithms,
        stream: CUstream,
    ) -> std::result::Result<(), CublasError> {
        let (library, key) = (&self.library, Key::new(matmul, algorithms));
        let plan = match self.plans.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let is_timed = key.algorithms == Algorithms::Fastest;
                let candidates = if is_timed { CANDIDATES } else { 1 };
                let mut plan = Plan::new(library.handle, &key, candidates)?;
                if plan.algorithms.len() > 1 {
                    plan.put_first_the_fastest(library, matmul, stream);
                }
                entry.insert(plan)
            }
        };
        library.multiply(plan, &plan.algorithms[0], matmul, 1.0, stream)
    }
}

impl Library {
    /// Enqueues `out = scale * left right`, plus the addend if there is one.
    fn multiply(
        &self,
        plan: &Plan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        matmul: &Matmul,
        scale: f32,
        stream: CUstream,
    ) -> std::result::Result<(), CublasError> {
        let beta = if matmul.addend.is_some() { 1f32 } else { 0f32 };
        let pointer = |address: u64| address as *mut c_void;
        // SAFETY: the plan's handles are for this shape, and operators create operands from views
        // that contain it.
        #[allow(unsafe_code)]
        unsafe {
            result::matmul(
                self.handle,
                plan.description,
                ptr::from_ref(&scale).cast(),
                ptr::from_ref(&beta).cast(),
                pointer(matmul.right.address),
                plan.right,
                pointer(matmul.left.address),
                plan.left,
                pointer(matmul.addend.unwrap_or(matmul.out.address)),
                plan.out,
                pointer(matmul.out.address),
                plan.out,
                algorithm,
                pointer(self.workspace),
                WORKSPACE,
                stream.cast(),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::alignment;

    #[test]
    fn the_least_aligned_address_decides() {
        let of = |addresses: &[u64]| alignment(addresses.iter().copied());
        assert_eq!(of(&[4096, 256]), 256);
        assert_eq!(of(&[4096, 256 + 128]), 16);
        assert_eq!(of(&[256, 20]), 4);
        assert_eq!(of(&[256, 6]), 2);
    }
}
