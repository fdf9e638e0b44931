//! `moh-serve` as a process: it answers as the model alone would, whatever other clients do.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod answers;
mod client;
mod errors;
mod load;
mod passes;
mod runs;
