//! A device, opened.

use moh_kernels::{Backend, Cpu, Element, ElementType};

use crate::{DeviceName, InElements, in_elements};

/// A device that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device is missing or unfit.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Device(#[from] moh_kernels::Error),
    /// This program was built without it.
    #[cfg(not(feature = "cuda"))]
    #[error("this build computes on the CPU: build it with --features cuda")]
    NotBuilt,
}

/// What computes, ready to.
#[derive(Debug, Clone)]
pub enum OpenDevice {
    /// This machine's processors.
    Cpu,
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(moh_kernels::Cuda),
}

/// Work on any device.
pub trait OnDevice {
    /// What it returns.
    type Output;

    /// Does the work on a device.
    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output;
}

/// Work on any device, in elements of any type.
pub trait Compute {
    /// What it returns.
    type Output;

    /// Does the work on a device in elements of type `T`.
    fn run<B: Backend + Clone, T: Element>(self, backend: B) -> Self::Output;
}

impl OpenDevice {
    /// Opens a device; a GPU that is `deterministic` gives the same bits in every run.
    ///
    /// # Errors
    /// When this build or this machine has none.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "of GPUs alone"))]
    pub fn open(name: DeviceName, deterministic: bool) -> Result<Self, Error> {
        match name {
            DeviceName::Cpu => Ok(OpenDevice::Cpu),
            #[cfg(feature = "cuda")]
            DeviceName::Cuda(ordinal) => {
                let cuda = moh_kernels::Cuda::new(ordinal)?;
                Ok(OpenDevice::Cuda(cuda.with_deterministic(deterministic)))
            }
            #[cfg(not(feature = "cuda"))]
            DeviceName::Cuda(_) => Err(Error::NotBuilt),
        }
    }

    /// Opens the GPU of a process by its number on its machine. Slurm and others show each process
    /// the one that is its own: that one has number 0.
    ///
    /// # Errors
    /// As [`OpenDevice::open`].
    pub fn open_local(local_rank: usize, deterministic: bool) -> Result<Self, Error> {
        #[cfg(feature = "cuda")]
        let ordinal = ordinal(local_rank, moh_kernels::Cuda::count()?);
        #[cfg(not(feature = "cuda"))]
        let ordinal = local_rank;
        Self::open(DeviceName::Cuda(ordinal), deterministic)
    }

    /// Does `work` on the device.
    pub fn run<W: OnDevice>(self, work: W) -> W::Output {
        match self {
            OpenDevice::Cpu => work.run(Cpu),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(cuda) => work.run(cuda),
        }
    }

    /// Does `work` on the device, in elements of type `dtype`.
    pub fn compute<W: Compute>(self, dtype: ElementType, work: W) -> W::Output {
        self.run(Typed { dtype, work })
    }
}

/// Work that has its element type and waits for its device.
struct Typed<W> {
    dtype: ElementType,
    work: W,
}

/// Work that has its device and waits for its element type.
struct Placed<B, W> {
    backend: B,
    work: W,
}

impl<W: Compute> OnDevice for Typed<W> {
    type Output = W::Output;

    fn run<B: Backend + Clone>(self, backend: B) -> W::Output {
        in_elements(self.dtype, Placed { backend, work: self.work })
    }
}

impl<B: Backend + Clone, W: Compute> InElements for Placed<B, W> {
    type Output = W::Output;

    fn run<T: Element>(self) -> W::Output {
        self.work.run::<B, T>(self.backend)
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
