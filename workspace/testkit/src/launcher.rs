//! Waiting, also for the end of mpirun.
//!
//! After the death of a rank, mpirun of Open MPI 4.1 may wait forever for a lock of PMIx 4.2 (in
//! `PMIx_server_finalize`), although all ranks have ended.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long mpirun may have no process before it is killed.
const LIMIT: Duration = Duration::from_secs(10);

/// Waits for a condition, or fails.
#[track_caller]
pub fn wait_until(limit: Duration, what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A running mpirun.
pub struct Launcher {
    process: u32,
    /// The last time at which it had a process.
    last: Instant,
}

impl Launcher {
    pub fn new(process: u32) -> Self {
        Launcher { process, last: Instant::now() }
    }

    /// Kills mpirun if it has had no process for too long. Must be called repeatedly.
    pub fn check(&mut self) {
        if has_processes(self.process) {
            self.last = Instant::now();
        } else if self.last.elapsed() > LIMIT {
            println!("mpirun has no process and does not end: it is killed");
            // mpirun may have ended by now.
            let _ = Command::new("kill").args(["-KILL", &self.process.to_string()]).status();
        }
    }
}

/// Returns whether a process has children that have not ended.
fn has_processes(process: u32) -> bool {
    let file = format!("/proc/{process}/task/{process}/children");
    let children = fs::read_to_string(file).unwrap_or_default();
    children.split_whitespace().any(|child| {
        // The state follows the name, which is in parentheses.
        let status = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        status.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
    })
}
