//! Matrix products by cuBLASLt, with a plan for each shape that is made once.
//!
//! cuBLASLt's matrices are column-major, ours row-major: it is given the transposes, which are the
//! same memory, in the other order.

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

use super::device::{Gemm, Operand};
use crate::error::{Error, Result};
use plan::Plan;

/// Device memory that products may use.
const WORKSPACE: usize = crate::gpu_workspace::PRODUCTS;
/// Algorithms among which the fastest is looked for.
const CANDIDATES: usize = 8;
/// Multiply-adds of a product for which that is worth its time: some 30 microseconds of a large GPU.
const WORTH_TIMING: u128 = 10_000_000_000;

/// What addresses of whole buffers are multiples of, and most of those within: cuBLASLt has more
/// algorithms to choose from.
const ALIGNMENT: u32 = 256;

/// What a plan depends on: shapes, types, transposition, whether something is added, the power of two
/// that all addresses are multiples of, and whether algorithms are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    operands: [Operand; 3],
    adds: bool,
    alignment: u32,
    timed: bool,
}

impl Key {
    fn new(gemm: &Gemm, deterministic: bool) -> Self {
        let operands = [gemm.out, gemm.left, gemm.right];
        let addresses = operands.iter().map(|operand| operand.address).chain(gemm.addend);
        let [rows, columns, terms] = [gemm.out.rows, gemm.out.columns, gemm.left.columns];
        let products = rows as u128 * columns as u128 * terms as u128;
        Key {
            alignment: alignment(addresses),
            operands: operands.map(|operand| Operand { address: 0, ..operand }),
            adds: gemm.addend.is_some(),
            timed: !deterministic && products >= WORTH_TIMING,
        }
    }
}

/// The largest of the alignments that plans tell apart which all addresses have, in bytes.
fn alignment(addresses: impl Iterator<Item = u64>) -> u32 {
    let bits = addresses.fold(0, |bits, address| bits | address);
    let has = |alignment: &u32| bits.is_multiple_of(u64::from(*alignment));
    // Numbers themselves are aligned.
    [ALIGNMENT, 16, 4].into_iter().find(has).unwrap_or(2)
}

/// cuBLASLt, its workspace, and the plans so far.
pub(super) struct Products {
    library: Library,
    plans: HashMap<Key, Plan>,
}

/// What every call of cuBLASLt takes.
struct Library {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
}

impl Products {
    /// For the GPU that is bound to this thread.
    pub(super) fn new(device: &str) -> Result<Self> {
        let failed = |reason: String| Error::Device {
            device: device.into(),
            operation: "starting cuBLASLt",
            reason,
        };
        let handle = result::create_handle().map_err(|error| failed(error.to_string()))?;
        // SAFETY: the size is not 0.
        #[allow(unsafe_code)]
        let workspace = unsafe { cudarc::driver::result::malloc_sync(WORKSPACE) };
        let workspace = workspace.map_err(|error| failed(error.to_string()))?;
        Ok(Products { library: Library { handle, workspace }, plans: HashMap::new() })
    }

    /// Gives everything back.
    ///
    /// # Safety
    /// The GPU is bound to this thread, its work is done, and no product follows.
    #[allow(unsafe_code)]
    pub(super) unsafe fn destroy(&mut self) -> std::result::Result<(), DriverError> {
        for (_, plan) in self.plans.drain() {
            plan.destroy();
        }
        // SAFETY: the caller's promise; `new` made both. Nobody is there to hear of a failure of the
        // library's.
        unsafe {
            let _ = result::destroy_handle(self.library.handle);
            cudarc::driver::result::free_sync(self.library.workspace)
        }
    }

    /// Runs the product on `stream`.
    ///
    /// The algorithm is the one that cuBLASLt puts first, which is the same in every run, or where the
    /// product need not be deterministic, and is large, the fastest of several, timed on the operands
    /// of the first product of its shape.
    pub(super) fn run(
        &mut self,
        gemm: &Gemm,
        deterministic: bool,
        stream: CUstream,
    ) -> std::result::Result<(), CublasError> {
        let (library, key) = (&self.library, Key::new(gemm, deterministic));
        let plan = match self.plans.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let candidates = if key.timed { CANDIDATES } else { 1 };
                let mut plan = Plan::new(library.handle, &key, candidates)?;
                if plan.algorithms.len() > 1 {
                    plan.put_first_the_fastest(library, gemm, stream);
                }
                entry.insert(plan)
            }
        };
        library.multiply(plan, &plan.algorithms[0], gemm, 1.0, stream)
    }
}

impl Library {
    /// Starts `out = scale * left right`, plus the addend where there is one.
    fn multiply(
        &self,
        plan: &Plan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        gemm: &Gemm,
        scale: f32,
        stream: CUstream,
    ) -> std::result::Result<(), CublasError> {
        let beta = if gemm.addend.is_some() { 1f32 } else { 0f32 };
        let pointer = |address: u64| address as *mut c_void;
        // SAFETY: the plan's handles are those of this shape, and operators make operands of views
        // that hold it.
        #[allow(unsafe_code)]
        unsafe {
            result::matmul(
                self.handle,
                plan.description,
                ptr::from_ref(&scale).cast(),
                ptr::from_ref(&beta).cast(),
                pointer(gemm.right.address),
                plan.right,
                pointer(gemm.left.address),
                plan.left,
                pointer(gemm.addend.unwrap_or(gemm.out.address)),
                plan.out,
                pointer(gemm.out.address),
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
