#![doc = include_str!("../README.md")]

pub mod adamw;
pub mod add;
pub mod attention;
mod backend;
#[cfg(feature = "cases")]
pub mod cases;
pub mod convert;
mod counting;
mod cpu;
pub mod cross_entropy;
#[cfg(gpu)]
mod cuda;
mod disjoint;
mod element_bytes;
pub mod embedding;
mod error;
pub mod gpu_activity;
mod gpu_workspace;
mod huge_pages;
pub mod key_value_cache;
pub mod linear;
mod math;
mod matmul;
pub mod memory;
pub mod qk_norm;
pub mod ranks;
mod region;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod scalar;
mod scratch;
mod simd;
pub mod span;
pub mod swiglu;

#[cfg(gpu)]
pub use attention::cuda::AttentionPath;
pub use backend::Backend;
pub use counting::{Counted, CountedDevice, CountingMemory};
pub use cpu::Cpu;
#[cfg(gpu)]
pub use cuda::Cuda;
#[cfg(feature = "cuda")]
pub use cuda::CudaStream;
#[cfg(feature = "cuda-emulator")]
pub use cuda::EmulatedCalls;
pub use error::{Error, Result, with_cause};
pub use linear::Accumulation;
pub use matmul::Bf16Path;
pub use memory::{Memory, MemoryInfo, Purpose, View, ViewMut, WorkingSet, Workspace};
pub use region::{Location, LocationMut, Region, RegionMut};
pub use scalar::{DType, Element, ElementType, Scalar};
