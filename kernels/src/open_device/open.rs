//! Opens a device.

use std::fmt;
use std::str::FromStr;

use crate::{Backend, Cpu};

/// A device that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device is missing or unsuitable, or a setting in the environment is invalid.
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

impl OpenDevice {
    /// Opens a device; with `deterministic` a GPU's results are bitwise reproducible.
    ///
    /// # Errors
    /// Fails if this build or this machine lacks the device, or if one of the device's settings in
    /// the environment is invalid.
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

    /// Makes a GPU's results for a sequence bitwise independent of the other sequences in a pass. A CPU's results
    /// always are.
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
}

#[cfg(feature = "cuda")]
fn ordinal(local_rank: usize, gpus: usize) -> usize {
    if gpus == 1 { 0 } else { local_rank }
}

/// A device that is not open yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceName {
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by its number on this machine.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|_| plain)
        };
        match text.split_once(':') {
            None if text == "cpu" => Ok(DeviceName::Cpu),
            None if text == "cuda" => Ok(DeviceName::Cuda(0)),
            Some(("cuda", digits)) if let Some(ordinal) = number(digits) => {
                Ok(DeviceName::Cuda(ordinal))
            }
            _ => Err("expected cpu, cuda or cuda:N".to_owned()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(0) => f.write_str("cuda"),
            DeviceName::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "cuda")]
    #[test]
    fn a_process_that_sees_one_gpu_takes_it() {
        assert_eq!([0, 3].map(|rank| ordinal(rank, 1)), [0, 0]);
        assert_eq!([0, 3].map(|rank| ordinal(rank, 8)), [0, 3]);
    }

    #[test]
    fn devices_are_named_by_kind_and_number() {
        for (text, expected) in [
            ("cpu", DeviceName::Cpu),
            ("cuda", DeviceName::Cuda(0)),
            ("cuda:3", DeviceName::Cuda(3)),
        ] {
            assert_eq!(text.parse(), Ok(expected));
            assert_eq!(expected.to_string(), text);
        }
        for text in ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "CUDA"] {
            assert!(text.parse::<DeviceName>().is_err(), "{text}");
        }
    }
}
