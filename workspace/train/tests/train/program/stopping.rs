//! Runs that are killed, stopped, locked out or on a full disk, and continue.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{ChildStderr, Command};
use std::time::{Duration, Instant};

use super::{PROGRAM, ended_by, moh_train, newest_checkpoint, prepared, results, started};
use crate::support::job::signal;
use moh_testkit::programs::{
    VOCABULARY, exits, failure, isolate, names, program, read_json, success, write_tokens,
};

#[test]
fn a_killed_run_ends_as_one_that_was_not() {
    let dir = prepared();
    success(&mut moh_train(dir.path(), &["run.dir=whole"]));
    // The process is killed some time after the lines were read, at any point.
    for (lines, microseconds) in [(2, 700), (9, 3100), (17, 12_000), (31, 400)] {
        let (mut child, _reader) = started(&mut moh_train(dir.path(), &[]), lines);
        std::thread::sleep(std::time::Duration::from_micros(microseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    success(&mut moh_train(dir.path(), &[]));
    let run = dir.path().join("run");
    assert!(results(&run) == results(&dir.path().join("whole")));
    let parts = [
        ".lock",
        ".moh-run",
        "checkpoints",
        "export",
        "has-checkpoints",
        "inputs.json",
        "machine.json",
        "metrics.jsonl",
        "model",
        "recipe.toml",
        "routing.jsonl",
    ];
    assert_eq!(names(&run), [&parts[..], &["summary.json", "tensorboard"]].concat());
    assert_eq!(names(&run.join("checkpoints")), ["step-119", "step-120"]);

    let text = success(&mut moh_train(dir.path(), &[]));
    assert!(text.starts_with("this run has already finished\n"), "{text}");
}

#[test]
fn a_terminated_run_exits_with_75_and_continues() {
    let dir = prepared();
    let long = ["stage.adapt.tokens=25600"];
    success(&mut moh_train(dir.path(), &[long[0], "run.dir=whole"]));
    let (code, rest) = ended_by("TERM", started(&mut moh_train(dir.path(), &long), 5));
    assert_eq!(code, Some(75), "{rest}");
    let step = newest_checkpoint(&dir.path().join("run"));
    let last = format!(
        "stopped after step {step} with a checkpoint: run the same command again to continue"
    );
    assert_eq!(rest.lines().last(), Some(last.as_str()));
    let (_, text) = exits(&mut moh_train(dir.path(), &long), 0);
    assert!(text.starts_with(&format!("continuing after step {step} of 460\n")), "{text}");
    assert!(results(&dir.path().join("run")) == results(&dir.path().join("whole")));
}

const ACKNOWLEDGED: &str =
    "stopping, with a checkpoint if a step was taken; again to abort without one\n";

fn next_line(reader: &mut BufReader<ChildStderr>) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    line
}

#[test]
fn a_signal_is_acknowledged_at_once_and_obeyed_within_an_evaluation() {
    let dir = prepared();
    // Validation text that takes minutes, evaluated as loaded and after step 9.
    write_tokens(&dir.path().join("long"), VOCABULARY, 4_000_000, 2);
    let long = [
        "data.validation.path=long",
        "data.validation.batches=1000000",
        "stage.adapt.tokens=25600",
    ];
    for name in ["INT", "TERM"] {
        // The data is reported before the evaluation.
        let (mut child, mut reader) = started(&mut moh_train(dir.path(), &long), 1);
        std::thread::sleep(Duration::from_millis(100));
        let asked = Instant::now();
        signal(child.id(), name);
        let mut line = next_line(&mut reader);
        if line.starts_with("warning: ") {
            line = next_line(&mut reader);
        }
        assert_eq!(line, ACKNOWLEDGED);
        let last = "stopped before a step was taken: run the same command again to continue\n";
        assert_eq!(next_line(&mut reader), last);
        assert_eq!(child.wait().unwrap().code(), Some(75));
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    }
}

#[test]
fn a_second_signal_aborts_without_a_checkpoint() {
    for (first, second, code) in [("INT", "INT", 130), ("TERM", "TERM", 143), ("TERM", "INT", 130)]
    {
        let dir = prepared();
        // A step lasts seconds.
        let long = ["stage.adapt.batch_tokens=6400000", "stage.adapt.tokens=64e6"];
        let (mut child, mut reader) = started(&mut moh_train(dir.path(), &long), 1);
        while !next_line(&mut reader).starts_with("stage adapt: ") {}
        let asked = Instant::now();
        signal(child.id(), first);
        assert_eq!(next_line(&mut reader), ACKNOWLEDGED);
        // The same request, as `timeout` sends it to the process and to its group.
        signal(child.id(), first);
        std::thread::sleep(Duration::from_millis(300));
        signal(child.id(), second);
        let line = "aborted without a checkpoint: the same command continues from the newest one\n";
        assert_eq!(next_line(&mut reader), line);
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
        let run = dir.path().join("run");
        assert_eq!(newest_checkpoint(&run), 0);
        assert!(!names(&run).iter().any(|name| name.starts_with(".tmp-")), "{:?}", names(&run));
    }
}

#[test]
fn another_number_of_threads_changes_no_bit_and_may_change_on_resume() {
    let dir = prepared();
    let long = "stage.adapt.tokens=25600";
    success(&mut moh_train(dir.path(), &[long, "run.dir=whole", "run.threads=1"]));
    let run = started(&mut moh_train(dir.path(), &[long, "run.threads=3"]), 5);
    assert_eq!(ended_by("TERM", run).0, Some(75));
    let threads = |run: &str| {
        read_json(&dir.path().join(run).join("machine.json"))["threads"].as_u64().unwrap()
    };
    assert_eq!((threads("whole"), threads("run")), (1, 3));
    success(&mut moh_train(dir.path(), &[long, "run.threads=2"]));
    assert_eq!(threads("run"), 2);
    assert!(results(&dir.path().join("run")) == results(&dir.path().join("whole")));
    let message = failure(dir.path(), &mut moh_train(dir.path(), &["run.threads=0"]), 1);
    assert!(message.contains("run.threads = 0: must be from 1 to 4096"), "{message}");
}

#[test]
fn a_time_limit_and_the_end_of_a_job_stop_a_run_with_75() {
    let dir = prepared();
    let endless = ["stage.adapt.tokens=64e6"];
    let stopped = |command: &mut Command| {
        let (_, text) = exits(command, 75);
        let step = newest_checkpoint(&dir.path().join("run"));
        assert!(text.ends_with(&format!(
            "stopped after step {step} with a checkpoint: run the same command again to continue\n"
        )));
        step
    };
    let first = stopped(moh_train(dir.path(), &endless).args(["--time-limit", "1s"]));
    let end = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs() + 2;
    let job = |end: u64| {
        let mut command = moh_train(dir.path(), &endless);
        command.env("SLURM_JOB_END_TIME", end.to_string()).args(["--time-limit", "2h"]);
        command
    };
    assert!(stopped(&mut job(end)) > first);
    // The end of a job that is over does not count: the run continues until it is stopped.
    assert_eq!(ended_by("TERM", started(&mut job(end - 1000), 5)).0, Some(75));
}

#[test]
fn a_stopped_run_continues_when_its_model_is_gone_and_a_new_one_does_not_start() {
    let dir = prepared();
    let long = ["stage.adapt.tokens=25600"];
    assert_eq!(ended_by("TERM", started(&mut moh_train(dir.path(), &long), 5)).0, Some(75));
    fs::rename(dir.path().join("source"), dir.path().join("gone")).unwrap();
    let other = [long[0], "run.dir=other"];
    let message = failure(dir.path(), &mut moh_train(dir.path(), &other), 1);
    assert!(message.starts_with("source: "), "{message}");
    success(&mut moh_train(dir.path(), &long));
}

#[cfg(target_os = "linux")]
#[test]
fn a_hangup_stops_a_run_unless_it_is_ignored() {
    let dir = prepared();
    // The process that runs the tests may ignore SIGHUP, and programs inherit this.
    let mut listening = program("env", dir.path());
    listening.args(["--default-signal=HUP", PROGRAM, "--recipe", "recipe.toml"]);
    let run = started(listening.args(["--set", "stage.adapt.tokens=64e6"]), 5);
    assert_eq!(ended_by("HUP", run).0, Some(75));
    let long = ["stage.adapt.tokens=25600"];
    // As nohup starts a program.
    let mut shell = program("sh", dir.path());
    shell.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", PROGRAM, "--recipe", "recipe.toml"]);
    let run = started(shell.args(["--set", long[0], "--set", "run.dir=other"]), 5);
    assert_eq!(ended_by("HUP", run).0, Some(0));
}

#[test]
fn a_second_process_in_one_run_directory_is_refused() {
    let dir = prepared();
    let long = ["stage.adapt.tokens=64e6"];
    let run = started(&mut moh_train(dir.path(), &long), 3);
    let message = failure(dir.path(), &mut moh_train(dir.path(), &long), 1);
    let advice = "wait for it, or use another run.dir";
    assert_eq!(message, format!("run: another process trains in this run directory: {advice}"));
    assert_eq!(ended_by("TERM", run).0, Some(75));
}

/// A limit on the size of files acts like a full disk.
#[test]
fn a_full_disk_keeps_the_newest_checkpoint_and_room_continues() {
    let dir = prepared();
    success(&mut moh_train(dir.path(), &["run.dir=whole"]));
    let (mut child, _reader) = started(&mut moh_train(dir.path(), &[]), 30);
    child.kill().unwrap();
    child.wait().unwrap();
    let run = dir.path().join("run");
    let step = newest_checkpoint(&run);
    assert!(step >= 7, "{step}");
    let before = names(&run.join("checkpoints"));
    // 32 blocks are 16 or 32 KB, depending on the shell. The weights have 46 KB.
    let script = format!("ulimit -f 32; exec '{PROGRAM}' --recipe recipe.toml");
    let mut shell = Command::new("sh");
    isolate(&mut shell, dir.path());
    let (_, text) = exits(shell.arg("-c").arg(script), 1);
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("error: ") && last.contains("File too large"), "{text}");
    let good = format!("the last good checkpoint is of step {step}");
    assert!(last.contains("the checkpoint could not be written") && last.contains(&good), "{text}");
    // The run has continued until its end, and retried at every seventh step and at the stages' ends.
    let warnings = text.lines().filter(|line| line.starts_with("warning: the checkpoint of step "));
    let attempts = (step + 1..=120).filter(|step| step % 7 == 0 || step % 60 == 0).count();
    assert_eq!(warnings.count(), attempts, "{text}");
    assert!(text.contains("moh 120/120: "), "{text}");
    let left = names(&run.join("checkpoints"));
    let whole: Vec<_> = left.iter().filter(|name| !name.starts_with(".tmp-")).collect();
    assert_eq!(whole, before.iter().filter(|name| !name.starts_with(".tmp-")).collect::<Vec<_>>());
    let (_, text) = exits(&mut moh_train(dir.path(), &[]), 0);
    assert!(text.starts_with(&format!("continuing after step {step} of 120\n")), "{text}");
    assert!(results(&run) == results(&dir.path().join("whole")));
}
