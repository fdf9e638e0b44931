//! Conversions, from the library and from the program.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod calibration;
mod convert;
mod released;
mod runs;
mod training;

use std::path::Path;
use std::process::Command;

use moh_testkit::programs::{self, program, success};

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-convert");

/// Returns the command in a directory, isolated from the user's own hub settings.
fn moh_convert(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = program(PROGRAM, dir);
    command.args(arguments);
    command
}

#[track_caller]
fn converted(dir: &Path, arguments: &[&str]) -> String {
    success(&mut moh_convert(dir, arguments))
}

/// Returns the sentence of a command that fails and leaves no files behind.
#[track_caller]
fn failure(dir: &Path, arguments: &[&str]) -> String {
    programs::failure(dir, &mut moh_convert(dir, arguments), 1)
}
