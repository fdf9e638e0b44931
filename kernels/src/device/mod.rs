//! Devices: their memory, its element types, and the tools of operators. Nothing here depends on an operator.

pub mod any;
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
