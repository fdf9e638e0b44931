#![doc = include_str!("../README.md")]

pub mod adamw;
mod add;
pub mod attention;
pub mod backend;
#[cfg(feature = "cases")]
pub mod cases;
mod convert;
mod cpu;
pub mod cross_entropy;
#[cfg(gpu)]
mod cuda;
mod disjoint;
mod element_bytes;
mod embedding;
mod error;
mod key_value_cache;
mod linear;
mod math;
mod matmul;
pub mod ranks;
mod region;
mod rms_norm;
pub mod rope;
pub mod router;
pub mod scalar;
mod scratch;
mod simd;
pub mod span;
mod swiglu;

#[cfg(gpu)]
pub use attention::cuda::AttentionPath;
pub use backend::{Accumulation, Backend, DeviceMemory, View, ViewMut, WorkingSet};
pub use cpu::Cpu;
#[cfg(gpu)]
pub use cuda::Cuda;
#[cfg(feature = "cuda")]
pub use cuda::CudaStream;
#[cfg(feature = "cuda-emulator")]
pub use cuda::MemoryCalls;
pub use error::{Error, Result, with_cause};
pub use region::{Memory, MemoryMut, Region, RegionMut};
pub use scalar::{DType, Element, ElementType, Scalar};
