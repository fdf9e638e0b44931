//! NVIDIA GPUs as a [`Backend`]: operators are kernels of ours and matrix products of cuBLASLt, on
//! one stream, so that each starts when the one before is done.
//!
//! What lies under the operators is a [`Device`]: the driver's GPU (`driver`, feature `cuda`), or the
//! same kernels run by the CPU, one block after the other (`emulator`, feature `cuda-emulator`), with
//! which they are tested where there is no GPU.

mod backend;
mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda-emulator")]
mod emulator;
mod launch;
mod memory;
#[cfg(feature = "cuda")]
mod products;

use std::sync::{Arc, Mutex};

pub(crate) use device::{Device, Gemm, Operand};
pub(crate) use launch::{THREADS, blocks, name};
pub(crate) use memory::address_or_null;
pub use memory::{CudaBuffer, CudaView, CudaViewMut};

use crate::error::Result;
use memory::Memory;

/// A GPU.
#[derive(Clone)]
pub struct Cuda {
    device: Arc<dyn Device>,
    /// What operators need for themselves, one after the other; grows to the largest need.
    scratch: Arc<Mutex<Option<Memory>>>,
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
    /// [`crate::Error::Device`] where the driver, cuBLASLt or the GPU is missing or too old.
    #[cfg(feature = "cuda")]
    pub fn new(ordinal: usize) -> Result<Self> {
        Ok(Self::of(Arc::new(driver::Driver::new(ordinal)?)))
    }

    /// The kernels run by the CPU: for tests, some thousand times slower than a GPU.
    #[cfg(feature = "cuda-emulator")]
    pub fn emulated() -> Self {
        Self::of(Arc::new(emulator::Emulator))
    }

    fn of(device: Arc<dyn Device>) -> Self {
        Cuda { device, scratch: Arc::default() }
    }

    pub(crate) fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Address of at least `bytes` bytes that are free until the next operator asks.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<u64> {
        // A thread that panicked while it held the lock left a buffer or none: both are sound.
        let mut scratch = self.scratch.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(memory) = scratch.as_ref().filter(|memory| memory.bytes() >= bytes) {
            return Ok(memory.address());
        }
        *scratch = None;
        let memory = Memory::new(&self.device, bytes)?;
        let address = memory.address();
        *scratch = Some(memory);
        Ok(address)
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Cuda").field(&self.device.name()).finish()
    }
}
