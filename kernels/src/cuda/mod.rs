//! NVIDIA GPUs as a [`crate::Backend`]: operators are kernels of ours and matrix products of cuBLASLt, on
//! one stream, so that each starts when the one before is done.
//!
//! What lies under the operators is a [`Device`]: the driver's GPU (`driver`, feature `cuda`), or the
//! same kernels run by the CPU, one block after the other (`emulator`, feature `cuda-emulator`), with
//! which they are tested where there is no GPU.

mod buffer;
mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda-emulator")]
mod emulator;
mod launch;
mod memory;
#[cfg(feature = "cuda")]
mod products;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use buffer::address_or_null;
pub use buffer::{CudaBuffer, CudaView, CudaViewMut};
pub(crate) use device::{BoxedTensor, Device, Gemm, Operand, TensorMap};
#[cfg(feature = "cuda-emulator")]
pub use emulator::MemoryCalls;
pub(crate) use launch::{THREADS, blocks, mirrored, name};

use crate::attention::cuda::AttentionPath;
use crate::error::Result;
use crate::gpu_workspace;
use buffer::Allocation;

/// A GPU.
#[derive(Clone)]
pub struct Cuda {
    device: Arc<dyn Device>,
    /// What operators need for themselves, one after the other; grows to the largest need.
    scratch: Arc<Mutex<Option<Allocation>>>,
    /// One number, 0 between any two kernels.
    counter: Arc<Mutex<Option<Allocation>>>,
    /// The first path that attention tries.
    first_attention: AttentionPath,
    /// The one that it took last.
    last_attention: Arc<Mutex<Option<AttentionPath>>>,
    /// Shared memory that a block of threads may ask for.
    most_shared_bytes: usize,
    deterministic: bool,
}

/// What a lock guards here is whole whenever a thread can panic.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a library of NVIDIA's needs in order to work in step with the operators.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub struct CudaStream {
    /// The GPU's context.
    pub context: Arc<cudarc::driver::CudaContext>,
    /// The stream on which every operator runs; it lives as long as the [`Cuda`].
    pub stream: cudarc::driver::sys::CUstream,
}

impl Cuda {
    /// The stream of the operators; none where they are emulated.
    #[cfg(feature = "cuda")]
    pub fn stream(&self) -> Option<CudaStream> {
        self.device.stream()
    }

    /// GPU number `ordinal` of this machine.
    ///
    /// # Errors
    /// [`crate::Error::Device`] where the driver, cuBLASLt or the GPU is missing or too old, or the
    /// variable `MOH_ATTENTION` names no [`AttentionPath`].
    #[cfg(feature = "cuda")]
    pub fn new(ordinal: usize) -> Result<Self> {
        let first = AttentionPath::from_environment()?;
        Ok(Self::of(Arc::new(driver::Driver::new(ordinal)?)).with_attention(first))
    }

    /// How many GPUs this process sees.
    ///
    /// # Errors
    /// [`crate::Error::Device`] where the driver is missing.
    #[cfg(feature = "cuda")]
    pub fn count() -> Result<usize> {
        driver::count()
    }

    /// The kernels run by the CPU: for tests, some thousand times slower than a GPU.
    #[cfg(feature = "cuda-emulator")]
    pub fn emulated() -> Self {
        Self::of(Arc::new(emulator::Emulator::default()))
    }

    fn of(device: Arc<dyn Device>) -> Self {
        Cuda {
            most_shared_bytes: device.most_shared_bytes(),
            device,
            scratch: Arc::default(),
            counter: Arc::default(),
            first_attention: AttentionPath::Hopper,
            last_attention: Arc::default(),
            deterministic: true,
        }
    }

    /// The same GPU with another first choice of attention: a path that does not take a problem, or
    /// does not run on this GPU, leaves it to the next one.
    pub fn with_attention(self, first: AttentionPath) -> Self {
        Cuda { first_attention: first, last_attention: Arc::default(), ..self }
    }

    /// The same GPU with no more shared memory for a block of threads than `bytes`, as on a smaller
    /// GPU (99 KiB on compute capability 8.6, 8.9 and 12.0, 163 KiB on 8.0, 227 KiB on 9.0).
    pub fn with_shared_bytes(self, bytes: usize) -> Self {
        let most_shared_bytes = bytes.min(self.most_shared_bytes);
        Cuda { most_shared_bytes, last_attention: Arc::default(), ..self }
    }

    /// The same GPU, with results that have the same bits in every run, as they have where nothing is
    /// said, or without: then attention adds to the gradient of the queries in any order, and large
    /// products take the fastest of several algorithms, timed when their shape is first seen.
    pub fn with_deterministic(self, deterministic: bool) -> Self {
        Cuda { deterministic, ..self }
    }

    /// Whether results have the same bits in every run.
    pub(crate) fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    /// Shared memory that a block may ask for, in bytes.
    pub(crate) fn most_shared_bytes(&self) -> usize {
        self.most_shared_bytes
    }

    /// Whether the kernels of a path run on this GPU at all.
    pub fn has_attention(&self, path: AttentionPath) -> bool {
        path != AttentionPath::Hopper || self.device.runs_hopper()
    }

    /// The path that attention took last, forward or backward; none before the first.
    pub fn attention_path(&self) -> Option<AttentionPath> {
        *locked(&self.last_attention)
    }

    pub(crate) fn first_attention(&self) -> AttentionPath {
        self.first_attention
    }

    pub(crate) fn remember_attention(&self, path: AttentionPath) {
        *locked(&self.last_attention) = Some(path);
    }

    pub(crate) fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// How often memory was taken and given back so far, where the GPU is emulated: for tests.
    #[cfg(feature = "cuda-emulator")]
    pub fn memory_calls(&self) -> Option<MemoryCalls> {
        self.device.memory_calls()
    }

    /// Address of at least `bytes` bytes that are free until the next operator asks. Growing gives
    /// memory back, for which the host waits: [`Workspace::reserve`](crate::Workspace::reserve) comes
    /// before.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<u64> {
        let mut scratch = locked(&self.scratch);
        if let Some(memory) = scratch.as_ref().filter(|memory| memory.bytes() >= bytes) {
            return Ok(memory.address());
        }
        *scratch = None;
        let memory = Allocation::new(&self.device, bytes)?;
        let address = memory.address();
        *scratch = Some(memory);
        Ok(address)
    }

    /// Address of a u32 that is 0, for a kernel that leaves it so.
    pub(crate) fn counter(&self) -> Result<u64> {
        let mut counter = locked(&self.counter);
        if let Some(memory) = counter.as_ref() {
            return Ok(memory.address());
        }
        let memory = Allocation::new(&self.device, gpu_workspace::COUNTER)?;
        Ok(counter.insert(memory).address())
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Cuda").field(&self.device.name()).finish()
    }
}
