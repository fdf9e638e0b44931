//! `moh-train` on several ranks, real processes that mpirun starts; where the feature `mpi` is off or
//! there is no mpirun the tests say so and pass.

#![cfg(unix)]
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::fs;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{isolate, stderr, trainable};

mod support;

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-train");

/// What follows the head of the recipe.
const RECIPE: &str = r#"

[[stage]]
name = "moh"
attention = "moh"
moh = { shared_heads = 4, routed_top_k = 2 }
tokens = 7680
batch_tokens = 96
micro_batch = 1
learning_rate = { max = 5e-3, min = 1e-3, warmup_steps = 1 }

[checkpoint]
every_steps = 5
"#;

/// A directory with a model, a token file and a recipe of 80 steps of 6 micro-batches; `None` where
/// ranks cannot be started.
fn prepared() -> Option<tempfile::TempDir> {
    let found = Command::new("mpirun").arg("--version").output().is_ok();
    if !cfg!(feature = "mpi") || !found {
        println!("skipped: needs --features mpi and mpirun");
        return None;
    }
    Some(trainable(RECIPE))
}

/// The command of some ranks, with overrides of their recipe.
fn ranks(count: usize, overrides: &[&str]) -> Vec<String> {
    let mut words = vec!["-n".to_owned(), count.to_string(), PROGRAM.to_owned()];
    words.extend(["--recipe", "recipe.toml"].map(str::to_owned));
    for change in overrides {
        words.extend(["--set".to_owned(), (*change).to_owned()]);
    }
    words
}

fn mpirun(dir: &Path, words: &[String]) -> Command {
    let mut command = Command::new("mpirun");
    isolate(&mut command, dir);
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]).args(words);
    // As many threads as there are ranks would only be in each other's way.
    command.env("RAYON_NUM_THREADS", "1").stdin(Stdio::null());
    command
}

fn losses(run: &Path) -> Vec<f64> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    text.lines().map(loss).collect()
}

fn assert_alike(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found / expected - 1.0).abs() < 1e-3, "{found}, not {expected}");
    }
}

/// Process numbers of rank `rank` of this test's job.
fn process_of(dir: &Path, rank: usize) -> Option<u32> {
    let variable = format!("OMPI_COMM_WORLD_RANK={rank}");
    fs::read_dir("/proc").unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        let number = path.file_name()?.to_str()?.parse().ok()?;
        let environment = fs::read(path.join("environ")).ok()?;
        let of_rank = environment.split(|&byte| byte == 0).any(|text| text == variable.as_bytes());
        (of_rank && fs::read_link(path.join("cwd")).ok()? == dir.canonicalize().unwrap())
            .then_some(number)
    })
}

#[test]
fn processes_end_as_one_alone() {
    let Some(dir) = prepared() else { return };
    // Sharing the data; as a pipeline; both.
    for (count, stages) in [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)] {
        let name = format!("run{count}-{stages}");
        let changes = [format!("run.dir={name}"), format!("stage.moh.parallel.pipeline={stages}")];
        let changes: Vec<&str> = changes.iter().map(String::as_str).collect();
        let done = mpirun(dir.path(), &ranks(count, &changes)).output().unwrap();
        assert!(done.status.success(), "{}", stderr(&done));
        // One rank tells of it.
        let text = String::from_utf8(done.stdout).unwrap();
        assert_eq!(text.matches("Try next:").count(), 1, "{text}");
        let found = losses(&dir.path().join(name));
        assert_alike(&found, &losses(&dir.path().join("run1-1")));
    }
}

#[test]
fn a_rank_that_is_killed_is_named_and_the_rest_continues_with_fewer() {
    let Some(dir) = prepared() else { return };
    let alone = mpirun(dir.path(), &ranks(1, &["run.dir=whole"])).output().unwrap();
    assert!(alone.status.success(), "{}", stderr(&alone));

    let mut command = mpirun(dir.path(), &ranks(3, &[]));
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut reader = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("moh 12/80") {
        assert!(reader.read_line(&mut text).unwrap() > 0, "{text}");
    }
    let victim = process_of(dir.path(), 2).unwrap();
    let killed = Instant::now();
    assert!(Command::new("kill").args(["-KILL", &victim.to_string()]).status().unwrap().success());
    reader.read_to_string(&mut text).unwrap();
    assert!(!child.wait().unwrap().success());
    assert!(killed.elapsed() < Duration::from_secs(60));
    assert!(text.contains("rank 2 "), "{text}");

    let resumed = mpirun(dir.path(), &ranks(2, &[])).output().unwrap();
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    assert!(stderr(&resumed).contains("continuing after step "), "{}", stderr(&resumed));
    assert_alike(&losses(&dir.path().join("run")), &losses(&dir.path().join("whole")));
}

#[test]
fn ranks_with_other_recipes_are_refused_before_they_begin() {
    let Some(dir) = prepared() else { return };
    let mut words = ranks(1, &[]);
    words.push(":".into());
    words.extend(ranks(1, &["run.seed=2"]));
    let done = mpirun(dir.path(), &words).output().unwrap();
    assert!(!done.status.success());
    let text = stderr(&done);
    assert!(text.contains("rank 1") && text.contains("seed = 2"), "{text}");
    assert!(!dir.path().join("run").exists());
}

#[test]
fn an_error_that_all_ranks_see_is_told_once() {
    let Some(dir) = prepared() else { return };
    fs::remove_file(dir.path().join("text.bin")).unwrap();
    let done = mpirun(dir.path(), &ranks(3, &[])).output().unwrap();
    assert!(!done.status.success());
    assert_eq!(stderr(&done).matches("text.bin").count(), 1, "{}", stderr(&done));
    assert!(!dir.path().join("run").exists());
}

#[test]
fn every_rank_is_measured_before_a_long_run() {
    let Some(dir) = prepared() else { return };
    let mut words = ranks(2, &[]);
    words.push("--preflight".into());
    let done = mpirun(dir.path(), &words).output().unwrap();
    assert!(done.status.success(), "{}", stderr(&done));
    let text = String::from_utf8(done.stdout).unwrap();
    for what in ["rank 0 ", "rank 1 ", "GFLOP/s", "all_reduce over all ranks: "] {
        assert!(text.contains(what), "{text}");
    }
    assert!(!dir.path().join("run").exists());
}
