//! `moh-train checkpoints` as a process: it lists, verifies and removes checkpoints.

#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::PROGRAM;
use moh_testkit::programs::{exits, failure, flip, names, program, success, trainable, two_stages};

/// Returns a directory with a finished run of six steps with a checkpoint after each.
fn finished() -> tempfile::TempDir {
    let checkpoint = "[checkpoint]\nevery_steps = 1\nkeep = 9";
    let dir = trainable(&format!("{}{checkpoint}", two_stages([128, 64], 32)));
    success(program(PROGRAM, dir.path()).args(["--recipe", "recipe.toml"]));
    dir
}

fn checkpoints(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = program(PROGRAM, dir);
    command.args(["checkpoints", "run"]).args(arguments);
    command
}

/// Changes one byte in the middle of the weights of a step.
fn damage(dir: &Path, step: u64) {
    let path = format!("run/checkpoints/step-{step}/weights.safetensors");
    flip(&dir.join(path), |length| length / 2);
}

/// Returns the lines of the list without its head, in words.
fn rows(dir: &Path) -> Vec<Vec<String>> {
    let text = success(&mut checkpoints(dir, &[]));
    assert!(text.lines().next().unwrap().trim_start().starts_with("step"), "{text}");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    text.lines().skip(1).map(words).collect()
}

#[test]
fn the_list_has_every_checkpoint_with_its_stage_tokens_and_state() {
    let dir = finished();
    let all = dir.path().join("run/checkpoints");
    fs::rename(all.join("step-3"), all.join("damaged-step-3")).unwrap();
    fs::create_dir(all.join(".tmp-step-7")).unwrap();
    let rows = rows(dir.path());
    let steps: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(steps, ["1", "2", "4", "5", "6", "3", "7"]);
    assert_eq!(rows[0][1..5], ["adapt,", "step", "1", "32"]);
    assert_eq!(rows[2][1..4], ["adapt,", "end", "128"]);
    assert_eq!(rows[3][1..5], ["moh,", "step", "1", "160"]);
    assert_eq!(rows[4][1..4], ["moh,", "end", "192"]);
    assert!(rows[..5].iter().all(|row| row.last().unwrap() == "complete"), "{rows:?}");
    assert!(rows[0].contains(&"UTC".to_owned()) && rows[0].contains(&"KiB".to_owned()), "{rows:?}");
    assert!(rows[5].join(" ").ends_with("damaged (set aside): checkpoints/damaged-step-3"));
    assert!(rows[6].join(" ").ends_with("unfinished: checkpoints/.tmp-step-7"));
}

#[test]
fn verification_finds_damage_and_renames_nothing() {
    let dir = finished();
    let text = success(&mut checkpoints(dir.path(), &["verify"]));
    let good = |step| format!("step {step}: complete, all hashes match\n");
    assert_eq!(text, (1..=6).map(good).collect::<String>());
    damage(dir.path(), 6);
    let before = names(&dir.path().join("run/checkpoints"));
    let (text, error) = exits(&mut checkpoints(dir.path(), &["verify", "6", "2"]), 1);
    assert!(text.starts_with("step 6: damaged: ") && text.ends_with(&good(2)), "{text}");
    assert!(text.contains("does not match its hash"), "{text}");
    assert!(error.ends_with("1 of 2 checkpoints cannot be used\n"), "{error}");
    assert_eq!(names(&dir.path().join("run/checkpoints")), before);
    let error = failure(dir.path(), &mut checkpoints(dir.path(), &["verify", "17"]), 1);
    assert!(error.ends_with("no checkpoint of step 17: name one of 1, 2, 3, 4, 5, 6"), "{error}");
}

#[test]
fn pruning_keeps_the_newest_and_every_mth() {
    let dir = finished();
    let prune = |arguments: &[&str]| success(checkpoints(dir.path(), &["prune"]).args(arguments));
    let steps = || names(&dir.path().join("run/checkpoints")).len();
    let dry = prune(&["--keep", "2", "--keep-every", "2", "--dry-run"]);
    assert_eq!(dry, "would remove run/checkpoints/step-1\nwould remove run/checkpoints/step-3\n");
    assert_eq!(steps(), 6);
    assert_eq!(
        prune(&["--keep", "2", "--keep-every", "2"]),
        dry.replace("would remove", "removed")
    );
    assert_eq!(steps(), 4);
    assert_eq!(prune(&["--keep", "4"]), "nothing to remove\n");
}

#[test]
fn pruning_never_removes_the_newest_good_checkpoint() {
    let dir = finished();
    damage(dir.path(), 6);
    damage(dir.path(), 5);
    let text = success(&mut checkpoints(dir.path(), &["prune", "--keep", "1"]));
    let removed = |step| format!("removed run/checkpoints/step-{step}\n");
    assert_eq!(text, [1, 2, 3, 5].map(removed).concat());
    success(&mut checkpoints(dir.path(), &["verify", "4"]));
}

#[test]
fn pruning_is_refused_while_a_process_trains() {
    let dir = finished();
    let lock = fs::File::open(dir.path().join("run/.lock")).unwrap();
    lock.lock().unwrap();
    let error = failure(dir.path(), &mut checkpoints(dir.path(), &["prune", "--keep", "1"]), 1);
    assert!(error.contains("another process trains in this run directory: wait"), "{error}");
    success(&mut checkpoints(dir.path(), &["verify", "6"]));
}

#[test]
fn what_is_not_a_run_has_no_checkpoints() {
    let dir = finished();
    let error =
        failure(dir.path(), program(PROGRAM, dir.path()).args(["checkpoints", "source"]), 1);
    assert!(error.starts_with("source: is not a run directory"), "{error}");
    let mixed = ["--recipe", "recipe.toml", "checkpoints", "run"];
    exits(program(PROGRAM, dir.path()).args(mixed), 2);
}
