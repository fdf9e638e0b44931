//! `moh-serve` as a process: its answers are those of the model alone, whatever other clients do.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod answers;
mod client;
mod errors;
mod load;
mod passes;
mod runs;
