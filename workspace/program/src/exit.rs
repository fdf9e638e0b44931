//! Converts a program's result to its exit code: 0 success, 1 error, 2 usage, 75 stopped early after a checkpoint,
//! 128 + N ended by signal N. An error is a single sentence on standard error, `error: ...`. A closed pipe, as in
//! `moh-data info ... | head`, is not an error.

use std::fmt;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The program failed.
pub const ERROR: u8 = 1;
/// Invalid arguments. Clap exits with the same code.
const USAGE: u8 = 2;
/// Stopped early, and can be run again: sysexits' EX_TEMPFAIL.
const STOPPED_EARLY: u8 = 75;

/// The error of a program that stopped early and saved its state: exit code 75. Its message is printed without a
/// prefix.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StoppedEarly(pub String);

/// The error of contradictory arguments that clap cannot detect: exit code 2.
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

/// Prints a line on standard error. If the line cannot be written, as when its reader has left, it is dropped and the
/// work continues.
pub fn stderr_line(line: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Ends the program when SIGINT or SIGTERM arrives, after removing its temporary files. The exit code is 128 plus the
/// signal's number.
pub fn remove_temporary_files_on_signals() -> std::io::Result<()> {
    #[cfg(unix)]
    on_signals(end)?;
    Ok(())
}

/// Runs `work`; meanwhile signals end the program as after [`remove_temporary_files_on_signals`].
pub fn removing_temporary_files_on_signals<R>(work: impl FnOnce() -> R) -> std::io::Result<R> {
    #[cfg(unix)]
    let signals = on_signals(end)?;
    let result = work();
    #[cfg(unix)]
    signals.close();
    Ok(result)
}

/// Calls `act` with each SIGINT or SIGTERM, until the handle is closed.
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

/// Ends the program at a signal, after removing its temporary files.
fn end(signal: i32) {
    moh_files::exit_without_temporaries(128 + signal)
}

/// Within this time, a second signal is the same request: `timeout` and shells signal a process and also its group.
pub const SAME_REQUEST: Duration = Duration::from_millis(200);
/// The time that work has to end after a signal. Work that ignores the signal then ends with the program.
const PATIENCE: Duration = Duration::from_secs(4);

/// The request of a signal.
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
    /// When the first signal was received.
    first: Option<Instant>,
}

impl Requests {
    /// Creates the state before any signal. Signals within `same` of the first repeat its request.
    pub fn new(same: Duration) -> Self {
        Requests { same, first: None }
    }

    /// Returns the request of a signal that is received at `now`.
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

/// Calls `first` with the first SIGINT or SIGTERM. A second signal ends the program, after removing its temporary
/// files, with 128 plus the signal's number as exit code.
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

/// Sets `stop` when SIGINT or SIGTERM arrives, so that the program can save its work. If it has not ended after some
/// seconds, or at a second signal, it ends as in [`at_first_signal`].
pub fn stop_on_signals(stop: &Arc<AtomicBool>) -> std::io::Result<()> {
    let stop = Arc::clone(stop);
    at_first_signal(move |signal| {
        stop.store(true, Ordering::Relaxed);
        // If the thread cannot start, a second signal still ends the program.
        let _ = std::thread::Builder::new().spawn(move || {
            std::thread::sleep(PATIENCE);
            end(signal);
        });
    })
}

/// Turns the signal for a file that exceeds a limit into an error of `write`, as on a full disk. By default the signal
/// ends the process.
fn full_disks_are_errors() -> anyhow::Result<()> {
    #[cfg(unix)]
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    Ok(())
}

/// Returns the error and its causes, without causes that an earlier message quotes.
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
