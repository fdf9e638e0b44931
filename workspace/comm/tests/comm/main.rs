//! Groups of ranks: threads, processes and GPUs.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod collectives;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(feature = "mpi")]
mod processes;
mod threads;
