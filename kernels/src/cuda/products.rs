//! Matrix products by cuBLASLt, with a plan for each shape that is made once.
//!
//! cuBLASLt's matrices are column-major, ours row-major: it is given the transposes, which are the
//! same memory, in the other order.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUstream;

use super::device::{Gemm, Operand};
use crate::error::{Error, Result};
use crate::scalar::DType;

/// Device memory that products may use.
const WORKSPACE: usize = 64 << 20;

/// What a plan depends on: shapes, types, transposition, whether something is added, and whether
/// all addresses are multiples of 16, which the fast algorithms need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    operands: [Operand; 3],
    adds: bool,
    aligned: bool,
}

impl Key {
    fn new(gemm: &Gemm) -> Self {
        let operands = [gemm.out, gemm.left, gemm.right];
        let addresses = operands.iter().map(|operand| operand.address).chain(gemm.addend);
        Key {
            aligned: addresses.fold(0, |bits, address| bits | address).is_multiple_of(16),
            operands: operands.map(|operand| Operand { address: 0, ..operand }),
            adds: gemm.addend.is_some(),
        }
    }
}

struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    out: sys::cublasLtMatrixLayout_t,
    left: sys::cublasLtMatrixLayout_t,
    right: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt, its workspace, and the plans so far; they live as long as the program.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    plans: HashMap<Key, Plan>,
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
        Ok(Products { handle, workspace, plans: HashMap::new() })
    }

    /// Runs the product on `stream`.
    pub(super) fn run(
        &mut self,
        gemm: &Gemm,
        stream: CUstream,
    ) -> std::result::Result<(), CublasError> {
        let key = Key::new(gemm);
        let plan = match self.plans.entry(key) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(Plan::new(self.handle, &key)?)
            }
        };
        let (alpha, beta) = (1f32, if gemm.addend.is_some() { 1f32 } else { 0f32 });
        let pointer = |address: u64| address as *mut c_void;
        // SAFETY: the plan's handles are those of this shape, and operators make operands of views
        // that hold it.
        #[allow(unsafe_code)]
        unsafe {
            result::matmul(
                self.handle,
                plan.description,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                pointer(gemm.right.address),
                plan.right,
                pointer(gemm.left.address),
                plan.left,
                pointer(gemm.addend.unwrap_or(gemm.out.address)),
                plan.out,
                pointer(gemm.out.address),
                plan.out,
                &plan.algorithm,
                pointer(self.workspace),
                WORKSPACE,
                stream.cast(),
            )
        }
    }
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, key: &Key) -> std::result::Result<Self, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let [out, left, right] = key.operands;
        let description = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        )?;
        let transpositions = [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, right.transposed),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, left.transposed),
        ];
        for (attribute, transposed) in transpositions {
            let operation = i32::from(transposed);
            // SAFETY: the attribute is an i32, and the description is whole.
            #[allow(unsafe_code)]
            unsafe {
                let value = ptr::from_ref(&operation).cast();
                result::set_matmul_desc_attribute(description, attribute, value, size_of::<i32>())?;
            }
        }
        let (out, left, right) = (layout(&out)?, layout(&left)?, layout(&right)?);
        let preference = preference(if key.aligned { 16 } else { 2 })?;
        // SAFETY: all handles were made above.
        #[allow(unsafe_code)]
        let heuristic = unsafe {
            let found = result::get_matmul_algo_heuristic(
                handle,
                description,
                right,
                left,
                out,
                out,
                preference,
            );
            result::destroy_matmul_pref(preference)?;
            found?
        };
        Ok(Plan { description, out, left, right, algorithm: heuristic.algo })
    }
}

/// The operand's memory as a column-major matrix.
fn layout(operand: &Operand) -> std::result::Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let dtype = match operand.dtype {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        // The only other type that operators multiply.
        _ => sys::cudaDataType_t::CUDA_R_32F,
    };
    let (mut rows, mut columns) = (operand.rows, operand.columns);
    if operand.transposed {
        (rows, columns) = (columns, rows);
    }
    result::create_matrix_layout(dtype, columns as u64, rows as u64, columns as i64)
}

/// What algorithms may use: the workspace, and addresses that are multiples of `alignment`.
fn preference(alignment: u32) -> std::result::Result<sys::cublasLtMatmulPreference_t, CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let preference = result::create_matmul_pref()?;
    let alignments = [
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ];
    // SAFETY: the attributes are a size and four u32, and the preference is whole.
    #[allow(unsafe_code)]
    unsafe {
        let size = ptr::from_ref(&WORKSPACE).cast();
        let workspace = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        result::set_matmul_pref_attribute(preference, workspace, size, size_of::<usize>())?;
        for attribute in alignments {
            let value = ptr::from_ref(&alignment).cast();
            result::set_matmul_pref_attribute(preference, attribute, value, size_of::<u32>())?;
        }
    }
    Ok(preference)
}
