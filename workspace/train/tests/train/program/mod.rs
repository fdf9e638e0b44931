//! `moh-train` as processes: killed, stopped, locked out, on a full disk, and one sentence per
//! invalid input.

#![cfg(unix)]

mod comparing;
mod directories;
mod negative_values;
mod output;
mod page;
mod plans;
mod refusals;
mod stopping;
mod tracing;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

use serde_json::Value;

use moh_testkit::programs::{program, trainable, two_stages};

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-train");

/// The validation of the recipe.
const VALIDATION: &str = "validation = { path = \"held-out\", batches = 2, every_steps = 9 }";

/// A directory with a model, a token file and a recipe of two stages of 60 steps.
fn prepared() -> tempfile::TempDir {
    let stages = two_stages([3840, 3840], 64);
    trainable(&format!("{VALIDATION}\n{stages}\n[checkpoint]\nevery_steps = 7\n"))
}

fn moh_train(dir: &Path, overrides: &[&str]) -> Command {
    let mut command = program(PROGRAM, dir);
    command.args(["--recipe", "recipe.toml"]);
    for change in overrides {
        command.args(["--set", change]);
    }
    command
}

/// Starts a run and waits for its first `lines` lines of output.
fn started(command: &mut Command, lines: usize) -> (Child, BufReader<ChildStderr>) {
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    for _ in 0..lines {
        reader.read_line(&mut String::new()).unwrap();
    }
    (child, reader)
}

fn terminate(child: &Child) {
    signal(child, "TERM");
}

fn signal(child: &Child, name: &str) {
    let name = format!("-{name}");
    let done = Command::new("kill").args([&name, &child.id().to_string()]).status().unwrap();
    assert!(done.success());
}

/// The results of a finished run, without the speed.
#[derive(PartialEq)]
struct Results(Vec<u8>, String, Vec<Value>);

fn results(run: &Path) -> Results {
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let line = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        for field in ["tokens_per_second", "speed"] {
            value.as_object_mut().unwrap().remove(field).unwrap();
        }
        value
    };
    Results(
        fs::read(run.join("export/model.safetensors")).unwrap(),
        fs::read_to_string(run.join("summary.json")).unwrap(),
        metrics.lines().map(line).collect(),
    )
}

/// The newest checkpoint's step; 0 without a checkpoint.
fn newest_checkpoint(run: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return 0 };
    entries
        .filter_map(|entry| {
            entry.unwrap().file_name().to_str()?.strip_prefix("step-")?.parse().ok()
        })
        .max()
        .unwrap_or(0)
}
