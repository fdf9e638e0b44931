//! NVIDIA GPUs as a [`crate::Backend`]: operators are this crate's kernels and cuBLASLt's matmuls,
//! all on one stream.
//!
//! Operators run on a [`Device`]: the driver's GPU (`driver`, feature `cuda`), or the same kernels
//! on the CPU, one block at a time (`emulator`, feature `cuda-emulator`), for tests without a GPU.

mod buffer;
mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda-emulator")]
mod emulator;
mod launch;
#[cfg(feature = "cuda")]
mod matmul;
mod memory;

/// The structs of the kernels' parameters, as the CUDA sources declare them (build/parameters.rs).
pub(crate) mod parameters {
    include!(concat!(env!("OUT_DIR"), "/parameters.rs"));
}

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use buffer::address_or_null;
pub use buffer::{CudaBuffer, CudaView, CudaViewMut};
pub(crate) use device::{Algorithms, BoxedTensor, Device, Matmul, Operand};
#[cfg(feature = "cuda-emulator")]
pub use emulator::EmulatedCalls;
pub(crate) use launch::{THREADS, blocks, name};

use crate::{Result, gpu_sizes};
use buffer::Allocation;

/// A GPU.
#[derive(Clone)]
pub struct Cuda {
    device: Arc<dyn Device>,
    /// Scratch memory that operators use in turn; grows to the largest need.
    scratch: Arc<Mutex<Option<Allocation>>>,
    /// One u32 that is 0 between kernels.
    counter: Arc<Mutex<Option<Allocation>>>,
    /// Index of the path that an operator with several paths tries first.
    pub(crate) first_path: usize,
    pub(crate) last_path: Arc<Mutex<Option<usize>>>,
    /// Maximum shared memory of a block.
    pub(crate) most_shared_bytes: usize,
    pub(crate) algorithms: Algorithms,
}

/// Locks the mutex and ignores poisoning: guarded values are consistent whenever a thread can panic.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The handles that an NVIDIA library needs to order its work with the operators.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub struct CudaStream {
    /// The GPU's context.
    pub context: Arc<cudarc::driver::CudaContext>,
    /// The stream of all operators; it lives as long as the [`Cuda`].
    pub stream: cudarc::driver::sys::CUstream,
}

impl Cuda {
    /// Returns the stream of the operators; `None` if the GPU is emulated.
    #[cfg(feature = "cuda")]
    pub fn stream(&self) -> Option<CudaStream> {
        self.device.stream()
    }

    /// Opens a GPU without reading the environment for the paths of operators.
    #[cfg(feature = "cuda")]
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        Ok(Self::of(Arc::new(driver::Driver::new(ordinal)?)))
    }

    /// Returns the number of GPUs visible to this process.
    #[cfg(feature = "cuda")]
    pub fn count() -> Result<usize> {
        driver::count()
    }

    /// Creates an emulated GPU: the CPU runs the kernels, for tests, thousands of times slower than a GPU.
    #[cfg(feature = "cuda-emulator")]
    pub fn emulated() -> Self {
        Self::of(Arc::new(emulator::Emulator::default()))
    }

    /// Creates an emulated GPU with a random order of threads and copies, which depends only on the seed.
    /// With seed 0 they run in the order of [`emulated`](Self::emulated).
    #[cfg(feature = "cuda-emulator")]
    pub fn emulated_with_schedule(seed: u32) -> Self {
        Self::of(Arc::new(emulator::Emulator::with_schedule(seed)))
    }

    fn of(device: Arc<dyn Device>) -> Self {
        Cuda {
            most_shared_bytes: device.most_shared_bytes(),
            device,
            scratch: Arc::default(),
            counter: Arc::default(),
            first_path: 0,
            last_path: Arc::default(),
            algorithms: Algorithms::OfShape,
        }
    }

    /// Limits the shared memory of a block to `bytes`, as on a smaller GPU (99 KiB on compute
    /// capability 8.6, 8.9 and 12.0, 163 KiB on 8.0, 227 KiB on 9.0).
    pub fn with_shared_bytes(self, bytes: usize) -> Self {
        let most_shared_bytes = bytes.min(self.most_shared_bytes);
        Cuda { most_shared_bytes, last_path: Arc::default(), ..self }
    }

    /// Enables (default) or disables bitwise reproducibility. If it is disabled, attention accumulates the
    /// gradient of the queries in any order. Large matmuls then use the fastest of several
    /// algorithms, timed when their shape first occurs.
    pub fn with_deterministic(self, deterministic: bool) -> Self {
        let algorithms = if deterministic { Algorithms::OfShape } else { Algorithms::Fastest };
        Cuda { algorithms, ..self }
    }

    /// Enables bitwise reproducibility, and makes the forward pass of a sequence bitwise independent of other
    /// sequences. Matmuls use the same algorithm for any number of rows.
    pub fn with_batch_invariance(self) -> Self {
        Cuda { algorithms: Algorithms::OfAnyRows, ..self }
    }

    /// Returns whether results are bitwise reproducible.
    pub(crate) fn is_deterministic(&self) -> bool {
        self.algorithms != Algorithms::Fastest
    }

    pub(crate) fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Returns the calls so far if the GPU is emulated, for tests.
    #[cfg(feature = "cuda-emulator")]
    pub fn emulated_calls(&self) -> Option<EmulatedCalls> {
        self.device.emulated_calls()
    }

    /// Returns the address of at least `bytes` bytes of scratch, valid until the next operator's request.
    /// Growing frees memory, and the host waits for that, so
    /// [`Workspace::reserve`](crate::Workspace::reserve) comes first.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<u64> {
        let mut scratch = locked(&self.scratch);
        if let Some(memory) = scratch.as_ref().filter(|memory| memory.bytes >= bytes) {
            return Ok(memory.address);
        }
        *scratch = None;
        let memory = Allocation::new(&self.device, bytes)?;
        Ok(scratch.insert(memory).address)
    }

    /// Returns the address of a u32 that is 0, for a kernel that resets it to 0.
    pub(crate) fn counter(&self) -> Result<u64> {
        let mut counter = locked(&self.counter);
        if let Some(memory) = counter.as_ref() {
            return Ok(memory.address);
        }
        let memory = Allocation::new(&self.device, gpu_sizes::COUNTER)?;
        Ok(counter.insert(memory).address)
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Cuda").field(&self.device.name()).finish()
    }
}
