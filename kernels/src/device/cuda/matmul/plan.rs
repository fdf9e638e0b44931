//! A plan: how cuBLASLt computes matmuls of one shape.

use std::ptr;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::{Key, WORKSPACE};
use crate::cuda::device::{Algorithms, Operand};
use crate::scalar::DType;

/// The descriptors of a matmul and its matrices, and its algorithms. The first algorithm is used.
pub(super) struct Plan {
    pub(super) description: sys::cublasLtMatmulDesc_t,
    pub(super) out: sys::cublasLtMatrixLayout_t,
    pub(super) left: sys::cublasLtMatrixLayout_t,
    pub(super) right: sys::cublasLtMatrixLayout_t,
    pub(super) algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
}

impl Plan {
    /// Creates a plan with one to `candidates` algorithms, in cuBLASLt's order.
    pub(super) fn new(
        handle: sys::cublasLtHandle_t,
        key: &Key,
        candidates: usize,
    ) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let [_, left, right] = key.operands;
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
            // SAFETY: the attribute is an i32, and the descriptor is valid.
            #[allow(unsafe_code)]
            unsafe {
                let value = ptr::from_ref(&operation).cast();
                result::set_matmul_desc_attribute(description, attribute, value, size_of::<i32>())?;
            }
        }
        let plan = |operands: &[Operand; 3], algorithms| -> Result<Plan, CublasError> {
            let [out, left, right] = operands;
            let (out, left, right) = (layout(out)?, layout(left)?, layout(right)?);
            Ok(Plan { description, out, left, right, algorithms })
        };
        let preference = preference(key)?;
        let chosen = plan(&key.chosen_for(), Vec::new())?;
        let found = chosen.find_algorithms(handle, preference, candidates);
        chosen.destroy_layouts();
        // SAFETY: the preference was created above and is no longer used.
        #[allow(unsafe_code)]
        unsafe {
            result::destroy_matmul_pref(preference)?;
        }
        plan(&key.operands, found?)
    }

    pub(super) fn destroy(self) {
        // SAFETY: `new` created them, and no matmul uses them any more. A destructor cannot report
        // errors.
        #[allow(unsafe_code)]
        unsafe {
            let _ = result::destroy_matmul_desc(self.description);
        }
        self.destroy_layouts();
    }

    fn destroy_layouts(self) {
        // SAFETY: as in `destroy`.
        #[allow(unsafe_code)]
        unsafe {
            for layout in [self.out, self.left, self.right] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }

    fn find_algorithms(
        &self,
        handle: sys::cublasLtHandle_t,
        preference: sys::cublasLtMatmulPreference_t,
        candidates: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let none = sys::cublasLtMatmulHeuristicResult_t {
            algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let (mut found, mut count) = (vec![none; candidates], 0);
        // SAFETY: the handles are valid, and the array has room for the requested number of
        // results.
        #[allow(unsafe_code)]
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.description,
                self.right,
                self.left,
                self.out,
                self.out,
                preference,
                candidates as i32,
                found.as_mut_ptr(),
                &mut count,
            )
            .result()?;
        }
        let works = |found: &sys::cublasLtMatmulHeuristicResult_t| found.state.result().is_ok();
        found.truncate(count.max(0) as usize);
        let algorithms: Vec<_> = found.into_iter().filter(works).map(|found| found.algo).collect();
        match algorithms.is_empty() {
            true => Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)),
            false => Ok(algorithms),
        }
    }
}

/// Returns the operand's memory as a column-major matrix.
fn layout(operand: &Operand) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let dtype = match operand.dtype {
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        // Operators do not multiply other types.
        DType::F16 | DType::F64 | DType::U32 | DType::I16 | DType::U8 => {
            return Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
        }
    };
    let (mut rows, mut columns) = (operand.rows, operand.columns);
    if operand.transposed {
        (rows, columns) = (columns, rows);
    }
    result::create_matrix_layout(dtype, columns as u64, rows as u64, columns as i64)
}

/// Returns the constraints on the algorithms: the workspace and the alignment of addresses. [`Algorithms::OfAnyRows`]
/// also excludes algorithms that divide the terms of a sum: these need a workspace that grows with the rows.
fn preference(key: &Key) -> Result<sys::cublasLtMatmulPreference_t, CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    const NO_REDUCTION: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
    let preference = result::create_matmul_pref()?;
    let of_any_rows = key.algorithms == Algorithms::OfAnyRows;
    let (workspace, alignment) = (if of_any_rows { 0 } else { WORKSPACE }, key.alignment);
    let reductions = of_any_rows
        .then_some((Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, NO_REDUCTION));
    let alignments = [
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment),
    ];
    // SAFETY: the attributes are a size and several u32, and the preference is valid.
    #[allow(unsafe_code)]
    unsafe {
        let size = ptr::from_ref(&workspace).cast();
        let attribute = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        result::set_matmul_pref_attribute(preference, attribute, size, size_of::<usize>())?;
        for (attribute, value) in alignments.into_iter().chain(reductions) {
            let value = ptr::from_ref(&value).cast();
            result::set_matmul_pref_attribute(preference, attribute, value, size_of::<u32>())?;
        }
    }
    Ok(preference)
}
