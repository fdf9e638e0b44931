//! What the operators need of a device. Addresses are the device's own; kernels and products run in
//! the order in which they are asked for, and later than the call that asks.

use bytemuck::{Pod, Zeroable};

use crate::error::Result;
use crate::memory::MemoryInfo;
use crate::scalar::DType;

/// A device's memory, kernels and matrix products.
pub(crate) trait Device: Send + Sync {
    /// A name for messages.
    fn name(&self) -> String;

    /// The most shared memory that a block may ask for, in bytes.
    fn most_shared_bytes(&self) -> usize;

    /// How many blocks of the largest kernels run at a time: one on each multiprocessor.
    fn multiprocessors(&self) -> usize;

    /// Whether the kernels that are compiled for sm_90a alone run here.
    fn runs_hopper(&self) -> bool;

    /// What those kernels bring a tensor to shared memory by.
    fn tensor_map(&self, tensor: &BoxedTensor) -> Result<TensorMap>;

    /// How much memory is in use; `None` where the device cannot tell.
    fn memory_info(&self) -> Option<MemoryInfo>;

    /// How often memory was taken and given back, where that is counted.
    #[cfg(feature = "cuda-emulator")]
    fn memory_calls(&self) -> Option<super::MemoryCalls> {
        None
    }

    /// Memory filled with zeros, aligned to 256 bytes.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Gives memory back, once the work so far is done.
    fn free(&self, address: u64, bytes: usize);

    /// Copies from the host's ordinary (pageable) memory; `source` may be reused when the call
    /// returns.
    fn upload(&self, source: &[u8], to: u64) -> Result<()>;

    /// Waits for the work so far and copies to the host.
    fn download(&self, from: u64, destination: &mut [u8]) -> Result<()>;

    /// Copies within the device.
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Fills with zeros.
    fn zero(&self, at: u64, bytes: usize) -> Result<()>;

    /// Waits for the work so far.
    fn synchronize(&self) -> Result<()>;

    /// The GPU's context and the stream of its work, where the device is a GPU.
    #[cfg(feature = "cuda")]
    fn stream(&self) -> Option<super::CudaStream> {
        None
    }

    /// Runs a kernel of `threads` threads a block, whose parameters are structures with these bytes.
    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        parameters: &[&[u8]],
    ) -> Result<()>;

    /// Runs a matrix product, `deterministic` where the same operands must give the same bits in every
    /// run.
    fn gemm(&self, gemm: &Gemm, deterministic: bool) -> Result<()>;
}

/// A tensor of bf16 that the copy engine reads box by box, each box's rows swizzled over 128 bytes
/// and numbers beyond the tensor zeros. Dimensions go from the innermost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BoxedTensor {
    pub address: u64,
    pub dimensions: [u64; 3],
    /// Bytes from one row to the next, and from one matrix to the next.
    pub strides: [u64; 2],
    /// Sides of a box.
    pub sides: [u32; 3],
}

/// A [`BoxedTensor`] as a kernel takes it: the bytes of a `CUtensorMap`.
#[repr(C, align(128))]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct TensorMap(pub(super) [u64; 16]);

/// A row-major matrix in a device's memory, as it takes part in a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Operand {
    pub address: u64,
    pub dtype: DType,
    /// Rows and columns of the matrix that is multiplied, which are those in memory, swapped where
    /// `transposed`.
    pub rows: usize,
    pub columns: usize,
    /// Whether memory holds the transpose.
    pub transposed: bool,
}

impl Operand {
    /// `rows` x `columns` numbers as they lie in memory.
    pub(crate) fn new(address: u64, dtype: DType, rows: usize, columns: usize) -> Self {
        Operand { address, dtype, rows, columns, transposed: false }
    }

    /// The transpose, without moving a number.
    pub(crate) fn transposed(self) -> Self {
        Operand { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }
}

/// `out = left right`, plus what `addend` says; sums in f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gemm {
    pub out: Operand,
    pub left: Operand,
    pub right: Operand,
    /// Address of a matrix of out's shape and type that is added; it may be out's own.
    pub addend: Option<u64>,
}
