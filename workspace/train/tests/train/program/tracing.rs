//! Timelines of steps, and profilers.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{moh_train, prepared, results};
use moh_testkit::programs::{exits, failure, names, read_json, success};

#[test]
fn chosen_steps_leave_a_timeline_and_others_none() {
    let dir = prepared();
    success(&mut moh_train(dir.path(), &["run.dir=whole"]));
    success(moh_train(dir.path(), &[]).args(["--trace", "2,60-61"]));
    let traces = |run: &str| {
        let mut names = names(&dir.path().join(run));
        names.retain(|name| name.contains("trace"));
        names
    };
    let expected = ["trace-step-2.json", "trace-step-60.json", "trace-step-61.json"];
    assert_eq!((traces("run"), traces("whole")), (expected.map(str::to_owned).into(), Vec::new()));
    assert!(results(&dir.path().join("run")) == results(&dir.path().join("whole")));
    let trace = read_json(&dir.path().join("run/trace-step-60.json"));
    let events = trace.as_array().unwrap();
    for name in ["step 60", "backward 1", "gradient norm", "evaluation", "checkpoint"] {
        assert!(events.iter().any(|event| event["name"] == name), "{name}");
    }
}

#[test]
fn steps_that_cannot_be_traced_are_refused() {
    let dir = prepared();
    let trace = |steps: &str| {
        let mut command = moh_train(dir.path(), &[]);
        command.args(["--trace", steps]);
        command
    };
    let message = failure(dir.path(), &mut trace("3,121"), 2);
    assert_eq!(message, "--trace: step 121: the run has 120 steps");
    exits(trace("3").arg("--plan"), 2);
    assert!(!dir.path().join("run").exists());
}

/// The variable with which Nsight Systems names its library.
const PROFILER: &str = "NVTX_INJECTION64_PATH";

#[test]
fn a_profiler_hears_of_every_span() {
    let dir = prepared();
    let library = dir.path().join("profiler.so");
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/train/support/profiler.c"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source);
    assert!(compiler.status().unwrap().success());
    success(&mut moh_train(dir.path(), &["run.dir=whole"]));
    let mut watched = moh_train(dir.path(), &[]);
    success(watched.env(PROFILER, &library).env("RANGES", dir.path().join("ranges")));
    assert!(results(&dir.path().join("run")) == results(&dir.path().join("whole")));
    let ranges = fs::read_to_string(dir.path().join("ranges")).unwrap();
    let count = |line: &str| ranges.lines().filter(|found| *found == line).count();
    assert_eq!((count("step 1"), count("step 120"), count("optimizer")), (1, 1, 120));
    // Two micro-batches a step.
    assert_eq!((count("forward 0"), count("backward 1")), (120, 120));
    assert_eq!(2 * count("end"), ranges.lines().count());
}

#[test]
fn a_profiler_that_cannot_be_loaded_is_an_error() {
    let dir = prepared();
    let mut command = moh_train(dir.path(), &[]);
    let message = failure(dir.path(), command.env(PROFILER, "/none/profiler.so"), 1);
    assert!(message.starts_with("NVTX_INJECTION64_PATH=/none/profiler.so: "), "{message}");
    let advice = ": unset NVTX_INJECTION64_PATH to run without a profiler";
    assert!(message.ends_with(advice), "{message}");
}
