//! Devices: their memory, the types of its elements, and what operators are written with. Nothing here knows an operator.

pub(crate) mod counting;
pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;
mod element_bytes;
pub(crate) mod error;
pub(crate) mod gpu_sizes;
pub mod memory;
pub mod ranks;
pub(crate) mod region;
pub mod scalar;
