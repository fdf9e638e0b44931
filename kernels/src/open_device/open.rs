//! Opens a device, and converts a recipe's element types to type parameters.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use half::bf16;

use crate::{Backend, Cpu, Element, ElementType};

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

/// Work that is generic over a training state: weights and activations `T`, gradients `G`, moments
/// `M`.
pub trait InTrainingElements {
    /// The result of the work.
    type Output;

    /// Runs the work on a state of these types.
    fn run<T: Element, G: Element, M: Element>(self) -> Self::Output;
}

/// The element types of a training state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingTypes {
    /// Weights and activations.
    pub weights: ElementType,
    /// Gradients.
    pub gradients: ElementType,
    /// Both optimiser moments.
    pub moments: ElementType,
}

/// Runs `work` on a training state of these types.
pub fn in_training_elements<W: InTrainingElements>(types: TrainingTypes, work: W) -> W::Output {
    match types.weights {
        ElementType::F32 => with_weights::<W, f32>(types, work),
        ElementType::BF16 => with_weights::<W, bf16>(types, work),
    }
}

fn with_weights<W: InTrainingElements, T: Element>(types: TrainingTypes, work: W) -> W::Output {
    match (types.gradients, types.moments) {
        (ElementType::F32, ElementType::F32) => work.run::<T, f32, f32>(),
        (ElementType::F32, ElementType::BF16) => work.run::<T, f32, bf16>(),
        (ElementType::BF16, ElementType::F32) => work.run::<T, bf16, f32>(),
        (ElementType::BF16, ElementType::BF16) => work.run::<T, bf16, bf16>(),
    }
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

    struct Name;

    impl Compute for Name {
        type Output = ElementType;

        fn run<B: Backend + Clone, T: Element>(self, _: B) -> ElementType {
            T::ELEMENT
        }
    }

    impl InTrainingElements for Name {
        type Output = TrainingTypes;

        fn run<T: Element, G: Element, M: Element>(self) -> TrainingTypes {
            TrainingTypes { weights: T::ELEMENT, gradients: G::ELEMENT, moments: M::ELEMENT }
        }
    }

    #[test]
    fn every_type_reaches_the_work() {
        for weights in ElementType::ALL {
            assert_eq!(OpenDevice::Cpu.compute(weights, Name), weights);
            for gradients in ElementType::ALL {
                for moments in ElementType::ALL {
                    let types = TrainingTypes { weights, gradients, moments };
                    assert_eq!(in_training_elements(types, Name), types);
                }
            }
        }
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
