//! `moh-serve` as a process: its answers are those of the model alone, whatever other clients do.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

#[path = "../../../cli/tests/support/mod.rs"]
mod support;
#[path = "../../../cli/tests/support/trained_run.rs"]
mod trained_run;

mod answers;
mod client;
mod errors;
mod load;
mod runs;
