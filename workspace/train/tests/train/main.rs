//! Runs, from the library and from the program.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod calibrated_stages;
mod checkpoints;
mod continuation;
mod disk_space;
mod from_run;
mod guard;
mod inputs;
mod layouts;
mod masks;
mod measurements;
mod namespaces;
mod processes;
mod program;
mod ranks;
mod replay;
mod resume_step;
mod run_directory;
mod saving;
mod support;
mod teacher;
mod timeline;

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-train");
