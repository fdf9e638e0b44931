//! `moh-train` as processes: killed, stopped, locked out, on a full disk, and one sentence per
//! invalid input.

#![cfg(unix)]

mod comparing;
mod directories;
mod output;
mod page;
mod plans;
mod refusals;
mod stopping;
mod tracing;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

use crate::PROGRAM;
use crate::support::job::{arguments, signal};
use crate::support::results::Results;
use moh_checkpoint::run_directory::RunDirectory;
use moh_testkit::programs::{program, trainable, two_stages};

/// The validation of the recipe.
const VALIDATION: &str = "validation = { path = \"held-out\", batches = 2, every_steps = 9 }";

/// Returns a directory with a model, a token file and a recipe of two stages of 60 steps.
fn prepared() -> tempfile::TempDir {
    let stages = two_stages([3840, 3840], 64);
    trainable(&format!("{VALIDATION}\n{stages}\n[checkpoint]\nevery_steps = 7\n"))
}

fn moh_train(dir: &Path, overrides: &[&str]) -> Command {
    let mut command = program(PROGRAM, dir);
    command.args(arguments(overrides));
    command
}

type Started = (Child, BufReader<ChildStderr>);

/// Starts a run and waits for its first `lines` lines of output.
fn started(command: &mut Command, lines: usize) -> Started {
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    for _ in 0..lines {
        reader.read_line(&mut String::new()).unwrap();
    }
    (child, reader)
}

/// Sends a signal to a run. Returns its exit code, and its output until its end.
fn ended_by(name: &str, (mut child, mut reader): Started) -> (Option<i32>, String) {
    signal(child.id(), name);
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    (child.wait().unwrap().code(), rest)
}

fn results(run: &Path) -> Results {
    Results::of_run(run)
}

fn newest_checkpoint(run: &Path) -> u64 {
    let steps = RunDirectory::new(run).checkpoint_steps().unwrap();
    steps.last().copied().unwrap_or(0)
}
