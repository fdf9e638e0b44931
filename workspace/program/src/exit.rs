//! From a program's result to its exit code: 0 success, 1 error, 2 usage, 75 stopped early after a
//! checkpoint, 128 + N ended by signal N. An error is one sentence on standard error, `error: ...`.
//! A closed pipe, as in `moh-data info ... | head`, is not an error.

use std::fmt;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The program failed.
pub const ERROR: u8 = 1;
/// Invalid arguments; clap exits with the same code.
const USAGE: u8 = 2;
/// Stopped early, to be run again: sysexits' EX_TEMPFAIL.
const STOPPED_EARLY: u8 = 75;

/// Returned as an error when a program has stopped early and saved its state: exit code 75. Its
/// message is printed without a prefix.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StoppedEarly(pub String);

/// Returned as an error for contradictory arguments that clap cannot detect: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Runs a program, prints its error and returns its exit code.
pub fn run(program: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    let Err(error) = full_disks_are_errors().and_then(|()| program()) else {
        return ExitCode::SUCCESS;
    };
    if is_broken_pipe(&error) {
        return ExitCode::SUCCESS;
    }
    if let Some(stopped) = error.downcast_ref::<StoppedEarly>() {
        stderr_line(format_args!("{stopped}"));
        return ExitCode::from(STOPPED_EARLY);
    }
    stderr_line(format_args!("error: {}", sentence(&error)));
    ExitCode::from(if error.is::<Usage>() { USAGE } else { ERROR })
}

/// Prints a line on standard error. A line that cannot be written, as when its reader has left, is
/// dropped: the work goes on without it.
pub fn stderr_line(line: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Ends the program when SIGINT or SIGTERM arrives, after its temporary files are removed, with 128
/// and the signal's number as exit code.
pub fn remove_temporary_files_on_signals() -> std::io::Result<()> {
    #[cfg(unix)]
    on_signals(end)?;
    Ok(())
}

/// As [`remove_temporary_files_on_signals`], while `work` runs.
pub fn removing_temporary_files_on_signals<R>(work: impl FnOnce() -> R) -> std::io::Result<R> {
    #[cfg(unix)]
    let signals = on_signals(end)?;
    let result = work();
    #[cfg(unix)]
    signals.close();
    Ok(result)
}

/// Calls `act` with each SIGINT or SIGTERM that arrives, until the handle is closed.
#[cfg(unix)]
fn on_signals(
    act: impl FnMut(i32) + Send + 'static,
) -> std::io::Result<signal_hook::iterator::Handle> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
    let handle = signals.handle();
    std::thread::Builder::new().spawn(move || signals.forever().for_each(act))?;
    Ok(handle)
}

/// Ends the program at a signal, after its temporary files are removed.
fn end(signal: i32) {
    moh_files::exit_without_temporaries(128 + signal)
}

/// Within this time a second signal is the same request: `timeout` and shells send one to a process and to its
/// group.
pub const SAME_REQUEST: Duration = Duration::from_millis(200);
/// The time that work has to end after a signal; what does not look at it then ends with the program.
const PATIENCE: Duration = Duration::from_secs(4);

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// To end in order.
    Stop,
    /// To end at once.
    Abort,
    /// Nothing new.
    Repeated,
}

/// The signals so far.
#[derive(Debug)]
pub struct Requests {
    same: Duration,
    /// When the first one was received.
    first: Option<Instant>,
}

impl Requests {
    /// No signal yet; one within `same` of the first is the same request.
    pub fn new(same: Duration) -> Self {
        Requests { same, first: None }
    }

    /// What a signal asks for that is received now.
    pub fn receive(&mut self, now: Instant) -> Request {
        let Some(first) = self.first else {
            self.first = Some(now);
            return Request::Stop;
        };
        match now.saturating_duration_since(first) >= self.same {
            true => Request::Abort,
            false => Request::Repeated,
        }
    }
}

/// Calls `first` with the first SIGINT or SIGTERM that arrives. A second one ends the program, after its temporary
/// files are removed, with 128 and the signal's number as exit code.
pub fn at_first_signal(first: impl FnOnce(i32) + Send + 'static) -> std::io::Result<()> {
    let (mut requests, mut first) = (Requests::new(SAME_REQUEST), Some(first));
    let act = move |signal| match requests.receive(Instant::now()) {
        Request::Stop => first.take().into_iter().for_each(|first| first(signal)),
        Request::Abort => end(signal),
        Request::Repeated => {}
    };
    #[cfg(unix)]
    on_signals(act)?;
    #[cfg(not(unix))]
    drop(act);
    Ok(())
}

/// Sets `stop` when SIGINT or SIGTERM arrives, so that the program can save what it has done. If it has not ended in
/// some seconds, or at a second signal, it ends as [`at_first_signal`] says.
pub fn stop_on_signals(stop: &Arc<AtomicBool>) -> std::io::Result<()> {
    let stop = Arc::clone(stop);
    at_first_signal(move |signal| {
        stop.store(true, Ordering::Relaxed);
        // Without the thread a second signal ends the program.
        let _ = std::thread::Builder::new().spawn(move || {
            std::thread::sleep(PATIENCE);
            end(signal);
        });
    })
}

/// Makes a file that exceeds a limit an error of `write`, like a full disk; by default the signal
/// ends the process.
fn full_disks_are_errors() -> anyhow::Result<()> {
    #[cfg(unix)]
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    Ok(())
}

/// Returns the error and its causes, without causes that an earlier message already quotes.
fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| cause.kind() == ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn results_have_their_exit_codes() {
        let broken = std::io::Error::from(ErrorKind::BrokenPipe);
        for (result, code) in [
            (Ok(()), 0),
            (Err(anyhow!("no")), 1),
            (Err(Usage("no".to_owned()).into()), 2),
            (Err(StoppedEarly("later".to_owned()).into()), 75),
            (Err(broken).context("cannot print"), 0),
        ] {
            assert_eq!(run(|| result), ExitCode::from(code));
        }
    }

    #[test]
    fn a_second_signal_aborts_unless_it_is_the_first_one_again() {
        let (start, mut requests) = (Instant::now(), Requests::new(SAME_REQUEST));
        let expected = [Request::Stop, Request::Repeated, Request::Repeated, Request::Abort];
        let received =
            [0, 50, 199, 200].map(|at| requests.receive(start + Duration::from_millis(at)));
        assert_eq!(received, expected);
    }

    #[test]
    fn a_cause_is_told_once() {
        let cause = anyhow!("disk full");
        assert_eq!(
            sentence(&cause.context("a.txt: cannot write")),
            "a.txt: cannot write: disk full"
        );
        let cause = anyhow!("disk full");
        assert_eq!(sentence(&cause.context("a.txt: disk full")), "a.txt: disk full");
    }
}
