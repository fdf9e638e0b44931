//! Opening a device.

use std::marker::PhantomData;

use half::bf16;

use super::DeviceName;
use crate::{Backend, Cpu, Element, ElementType};

/// A device that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device is missing or unsuitable, or a setting of the environment cannot be followed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// This build has no support for the device.
    #[cfg(not(feature = "cuda"))]
    #[error("this build supports the CPU only: build it with --features cuda")]
    NotBuilt,
}

/// An opened device.
#[derive(Debug, Clone)]
pub enum OpenDevice {
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(crate::Cuda),
}

/// Work that is generic over its device.
pub trait OnDevice {
    /// The result of the work.
    type Output;

    /// Runs the work on a device.
    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output;
}

/// Work that is generic over its device and element type.
pub trait Compute {
    /// The result of the work.
    type Output;

    /// Runs the work on a device in elements of type `T`.
    fn run<B: Backend + Clone, T: Element>(self, backend: B) -> Self::Output;
}

impl OpenDevice {
    /// Opens a device; with `deterministic` a GPU's results are bitwise reproducible.
    ///
    /// # Errors
    /// Fails if this build or this machine lacks the device, or if a setting of
    /// it in the environment is invalid.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only GPUs use it"))]
    pub fn open(name: DeviceName, deterministic: bool) -> Result<Self, Error> {
        match name {
            DeviceName::Cpu => Cpu::open().map(|_| OpenDevice::Cpu).map_err(Error::Device),
            #[cfg(feature = "cuda")]
            DeviceName::Cuda(ordinal) => {
                let cuda = crate::Cuda::new(ordinal)?;
                Ok(OpenDevice::Cuda(cuda.with_deterministic(deterministic)))
            }
            #[cfg(not(feature = "cuda"))]
            DeviceName::Cuda(_) => Err(Error::NotBuilt),
        }
    }

    /// Makes a GPU's results for a sequence bitwise independent of the other sequences in a pass. A CPU's always are.
    #[must_use]
    pub fn with_batch_invariance(self) -> Self {
        match self {
            OpenDevice::Cpu => OpenDevice::Cpu,
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(cuda) => OpenDevice::Cuda(cuda.with_batch_invariance()),
        }
    }

    /// Opens a process's GPU by its local rank. If a launcher such as Slurm makes one GPU visible
    /// to each process, that GPU has number 0.
    pub fn open_local(local_rank: usize, deterministic: bool) -> Result<Self, Error> {
        #[cfg(feature = "cuda")]
        let ordinal = ordinal(local_rank, crate::Cuda::count()?);
        #[cfg(not(feature = "cuda"))]
        let ordinal = local_rank;
        Self::open(DeviceName::Cuda(ordinal), deterministic)
    }

    /// Runs `work` on the device.
    pub fn run<W: OnDevice>(self, work: W) -> W::Output {
        match self {
            OpenDevice::Cpu => work.run(Cpu),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(cuda) => work.run(cuda),
        }
    }

    /// Runs `work` on the device, in elements of type `dtype`.
    pub fn compute<W: Compute>(self, dtype: ElementType, work: W) -> W::Output {
        match dtype {
            ElementType::F32 => self.run(Typed(work, PhantomData::<f32>)),
            ElementType::BF16 => self.run(Typed(work, PhantomData::<bf16>)),
        }
    }
}

/// Work with its element type, before its device is known.
struct Typed<W, T>(W, PhantomData<T>);

impl<W: Compute, T: Element> OnDevice for Typed<W, T> {
    type Output = W::Output;

    fn run<B: Backend + Clone>(self, backend: B) -> W::Output {
        self.0.run::<B, T>(backend)
    }
}

#[cfg(feature = "cuda")]
fn ordinal(local_rank: usize, gpus: usize) -> usize {
    if gpus == 1 { 0 } else { local_rank }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::ordinal;

    #[test]
    fn a_process_that_sees_one_gpu_takes_it() {
        assert_eq!([0, 3].map(|rank| ordinal(rank, 1)), [0, 0]);
        assert_eq!([0, 3].map(|rank| ordinal(rank, 8)), [0, 3]);
    }
}
