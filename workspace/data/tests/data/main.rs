//! Token files, and samples from them.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod mask;
mod samples;
mod token_file;
