//! The programs of this crate.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod bench;
mod data;
mod data_bad_inputs;
mod data_remote;
mod data_tokenizer_identity;
mod eval;
mod generate;

/// The time that a test waits for another process.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);
