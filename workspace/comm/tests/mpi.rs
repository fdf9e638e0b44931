//! Groups of processes.
#![cfg(feature = "mpi")]
#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod collectives;
#[path = "support/launcher.rs"]
mod launcher;
mod processes;
