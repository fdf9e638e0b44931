//! The interface of a device under the operators. Addresses are the device's own. Kernels and
//! matmuls run in the order of their calls, asynchronously.

use super::parameters::TensorMap;
use crate::{DType, MemoryInfo, Result};

/// A device's memory, kernels and matmuls.
pub(crate) trait Device: Send + Sync {
    /// Returns a name for messages.
    fn name(&self) -> String;

    /// Returns the maximum shared memory of a block, in bytes.
    fn most_shared_bytes(&self) -> usize;

    /// Returns the number of multiprocessors; each runs one block of the largest kernels.
    fn multiprocessors(&self) -> usize;

    /// Returns whether kernels compiled only for sm_90a can run.
    fn runs_hopper(&self) -> bool;

    /// Returns the tensor map with which kernels for sm_90a copy a tensor to shared memory.
    fn tensor_map(&self, tensor: &BoxedTensor) -> Result<TensorMap>;

    /// Returns the memory in use; `None` if the device cannot report it.
    fn memory_info(&self) -> Option<MemoryInfo>;

    /// Returns the calls so far, if the device counts calls.
    #[cfg(feature = "cuda-emulator")]
    fn emulated_calls(&self) -> Option<super::EmulatedCalls> {
        None
    }

    /// Allocates memory filled with zeros, aligned to 256 bytes; returns its address.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Frees memory after the work so far is done.
    fn free(&self, address: u64, bytes: usize);

    /// Copies from pageable host memory; `source` may be reused when the call returns.
    fn upload(&self, source: &[u8], to: u64) -> Result<()>;

    /// Waits for the work so far and copies to the host.
    fn download(&self, from: u64, destination: &mut [u8]) -> Result<()>;

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;

    fn zero(&self, at: u64, bytes: usize) -> Result<()>;

    fn synchronize(&self) -> Result<()>;

    /// Returns the GPU's context and stream; `None` for an emulated device.
    #[cfg(feature = "cuda")]
    fn stream(&self) -> Option<super::CudaStream> {
        None
    }

    /// Launches a kernel with `threads` threads per block. The parameters are these structs, as bytes.
    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        parameters: &[&[u8]],
    ) -> Result<()>;

    fn matmul(&self, matmul: &Matmul, algorithms: Algorithms) -> Result<()>;
}

/// How the algorithm of a matmul is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Algorithms {
    /// The fastest of several algorithms: runs can differ.
    Fastest,
    /// One algorithm for each shape: the same operands give the same bits in every run.
    OfShape,
    /// One algorithm for any number of rows: the bits of a row do not depend on the other rows.
    OfAnyRows,
}

/// A bf16 tensor that the TMA unit reads box by box, with each box's rows swizzled over 128 bytes
/// and zeros outside the tensor. Dimensions start with the innermost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BoxedTensor {
    pub address: u64,
    pub dimensions: [u64; 3],
    /// Bytes from one row to the next, and from one matrix to the next.
    pub strides: [u64; 2],
    /// Sides of a box.
    pub sides: [u32; 3],
}

/// A row-major matrix in device memory, as an operand of a matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Operand {
    pub address: u64,
    pub dtype: DType,
    /// Rows and columns of the operand. If `transposed`, the matrix in memory has them swapped.
    pub rows: usize,
    pub columns: usize,
    /// Whether memory contains the transpose.
    pub transposed: bool,
}

impl Operand {
    /// Creates a matrix of `rows` x `columns` elements in memory.
    pub(crate) fn new(address: u64, dtype: DType, rows: usize, columns: usize) -> Self {
        Operand { address, dtype, rows, columns, transposed: false }
    }

    /// Returns the transpose, without moving elements.
    pub(crate) fn transposed(self) -> Self {
        Operand { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }
}

/// `out = left right`, plus the addend; sums in f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matmul {
    pub out: Operand,
    pub left: Operand,
    pub right: Operand,
    /// Address of an addend with out's shape and type; it may be out itself.
    pub addend: Option<u64>,
}
