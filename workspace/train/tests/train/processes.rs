//! `moh-train` on several ranks, as processes started by mpirun.

#![cfg(unix)]

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::PROGRAM;
use crate::support::job::{
    Job, arguments, assert_alike, losses, mpirun, prepared, process_of, signal, wait_for_steps,
};
use moh_testkit::programs::{exits, program, stderr, success};

/// A fault ends a job within this time. A silent rank 0 is detected last.
const BOUND: Duration = Duration::from_secs(60);

fn ranks(count: usize, overrides: &[&str]) -> Vec<String> {
    let mut words = vec!["-n".to_owned(), count.to_string(), PROGRAM.to_owned()];
    words.extend(arguments(overrides));
    words
}

/// Returns the error of a job that fails before it has a run directory.
fn refused(dir: &Path, words: &[String]) -> String {
    let done = mpirun(dir, words).output().unwrap();
    assert!(!done.status.success() && !dir.join("run").exists());
    stderr(&done)
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn processes_end_as_one_alone() {
    let dir = prepared();
    // Data parallelism, a pipeline, and both.
    for (count, stages) in [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)] {
        let name = format!("run{count}-{stages}");
        let changes = [format!("run.dir={name}"), format!("stage.moh.parallel.pipeline={stages}")];
        let changes: Vec<&str> = changes.iter().map(String::as_str).collect();
        // Only one rank prints the report.
        let text = success(&mut mpirun(dir.path(), &ranks(count, &changes)));
        assert_eq!(text.matches("Try next:").count(), 1, "{text}");
        let found = losses(&dir.path().join(name));
        assert_alike(&found, &losses(&dir.path().join("run1-1")));
    }
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn a_rank_that_is_killed_is_named_and_the_rest_continues_with_fewer() {
    let dir = prepared();
    success(&mut mpirun(dir.path(), &ranks(1, &["run.dir=whole"])));

    let job = Job::start(&mut mpirun(dir.path(), &ranks(3, &[])), dir.path());
    wait_for_steps(&dir.path().join("run"), 12);
    signal(process_of(dir.path(), 2).unwrap(), "KILL");
    let (status, text) = job.end(BOUND);
    assert!(!status.success());
    assert!(text.contains("rank 2 "), "{text}");

    let (_, told) = exits(&mut mpirun(dir.path(), &ranks(2, &[])), 0);
    assert!(told.contains("continuing after step "), "{told}");
    assert_alike(&losses(&dir.path().join("run")), &losses(&dir.path().join("whole")));
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn ranks_with_other_recipes_are_refused_before_they_begin() {
    let dir = prepared();
    let mut words = ranks(1, &[]);
    words.push(":".into());
    words.extend(ranks(1, &["run.seed=2"]));
    let text = refused(dir.path(), &words);
    assert!(text.contains("rank 1") && text.contains("seed = 2"), "{text}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn another_build_of_the_program_is_refused_before_it_begins() {
    let dir = prepared();
    let other = dir.path().join("moh-train");
    let mut bytes = fs::read(PROGRAM).unwrap();
    bytes.extend(b"built elsewhere");
    fs::write(&other, bytes).unwrap();
    fs::set_permissions(&other, fs::metadata(PROGRAM).unwrap().permissions()).unwrap();
    let mut words = ranks(1, &[]);
    words.extend([":", "-n", "1", other.to_str().unwrap()].map(str::to_owned));
    words.extend(arguments(&[]));
    let text = refused(dir.path(), &words);
    let version = concat!("`program ", env!("CARGO_PKG_VERSION"), " ");
    assert!(text.contains(&format!("was started with {version}")), "{text}");
    assert!(text.contains(&format!("rank 0 with {version}")), "{text}");
}

/// Runs one rank of two, as a launcher starts it, without the other rank; returns its error.
fn alone_of_two(rank: usize, limit: [&str; 2]) -> String {
    let dir = prepared();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = program(PROGRAM, dir.path());
    let [name, value] = limit;
    if name.starts_with("--") {
        command.args(limit);
    } else {
        command.env(name, value);
    }
    command.args(arguments(&[]));
    let rank = rank.to_string();
    command.envs([("RANK", rank.as_str()), ("WORLD_SIZE", "2"), ("LOCAL_RANK", &rank)]);
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())]);
    let start = Instant::now();
    let (_, text) = exits(&mut command, 1);
    assert!(start.elapsed() >= Duration::from_secs(1) && start.elapsed() < BOUND);
    assert!(!dir.path().join("run").exists());
    text
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn a_rank_that_never_arrives_is_named_at_the_time_limit() {
    let text = alone_of_two(0, ["--rendezvous-timeout", "2"]);
    let expected = "rank 1 of 2 did not reach the rendezvous at 127.0.0.1:";
    assert!(text.contains(expected) && text.contains(" within 2 s: "), "{text}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn a_rank_0_that_never_arrives_is_named_at_the_time_limit() {
    let text = alone_of_two(1, ["MOH_RENDEZVOUS_TIMEOUT", "2"]);
    assert!(text.contains("rendezvous at 127.0.0.1:"), "{text}");
    assert!(text.contains("rank 1 found no rank 0 within "), "{text}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn a_job_that_mpirun_is_asked_to_stop_ends_with_a_checkpoint() {
    let dir = prepared();
    let job = Job::start(&mut mpirun(dir.path(), &ranks(2, &[])), dir.path());
    wait_for_steps(&dir.path().join("run"), 12);
    job.signal("USR1");
    let (status, text) = job.end(BOUND);
    assert_eq!(status.code(), Some(75), "{text}");
    assert!(text.contains("stopped after step ") && text.contains(" with a checkpoint"), "{text}");

    let (_, told) = exits(&mut mpirun(dir.path(), &ranks(2, &[])), 0);
    assert!(told.contains("continuing after step "), "{told}");
    assert_eq!(losses(&dir.path().join("run")).len(), 80);
}

/// Runs a job of two ranks, and lets rank `rank` hang during training; returns the job's output.
fn hangs(rank: usize) -> String {
    let dir = prepared();
    let mut words = ranks(2, &[]);
    words.extend(["--operation-timeout", "10"].map(str::to_owned));
    let job = Job::start(&mut mpirun(dir.path(), &words), dir.path());
    wait_for_steps(&dir.path().join("run"), 12);
    signal(process_of(dir.path(), rank).unwrap(), "STOP");
    let (status, text) = job.end(BOUND);
    assert!(!status.success());
    // mpirun ends the remaining ranks, also stopped ranks.
    assert_eq!(process_of(dir.path(), rank), None);
    text
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn a_rank_that_hangs_is_named_with_the_operation_that_waits_for_it() {
    let text = hangs(1);
    let report = text.lines().find(|line| line.starts_with("error: rank 0: rank 0 (")).unwrap();
    assert!(report.contains(" waits in ") && report.contains(" of group "), "{text}");
    assert!(report.contains("; rank 1 (") && report.contains(") is silent: "), "{text}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn a_rank_0_that_hangs_is_named_once_it_has_been_silent() {
    // Rank 0 asks the other ranks for their reports, so its own hang shows as silence.
    let text = hangs(0);
    assert!(text.contains("error: rank 1: rank 0 (") && text.contains("no sign of life"), "{text}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi and mpirun")]
fn an_error_that_all_ranks_see_is_told_once() {
    let dir = prepared();
    fs::remove_file(dir.path().join("text.bin")).unwrap();
    let text = refused(dir.path(), &ranks(3, &[]));
    assert_eq!(text.matches("text.bin").count(), 1, "{text}");
}
