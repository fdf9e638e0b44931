#![doc = include_str!("../README.md")]

mod backend;
#[cfg(feature = "cases")]
pub mod cases;
mod device;
mod matmul;
pub mod open_device;
mod operators;
mod profiling;
mod workspace;

// Modules have short names, also within the crate.
use device::cpu::{compiled, disjoint, math, scratch, simd};
#[cfg(gpu)]
use device::cuda;
pub use device::{any, memory, ranks, scalar};
use device::{counting, cpu, error, gpu_sizes, region};
use error::{check_ids, check_len, ensure};
pub use operators::{
    adamw, add, attention, convert, cross_entropy, embedding, key_value_cache, linear, qk_norm,
    rms_norm, rope, router, sampling, swiglu,
};
pub use profiling::{gpu_activity, span};

pub use any::{AnyBuffer, AnyView, AnyViewMut, Stored};
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
#[doc(hidden)]
pub use half::bf16;
pub use matmul::{Accumulation, Bf16Path};
pub use memory::{Memory, MemoryInfo, Purpose, View, ViewMut};
pub use ranks::Heads;
pub use region::{Location, LocationMut, Region, RegionMut};
pub use rope::QkvShape;
pub use scalar::{DType, Element, ElementType, Scalar};
pub use workspace::{WorkingSet, Workspace};
