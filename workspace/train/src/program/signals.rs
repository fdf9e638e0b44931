//! Signals that end a run with a checkpoint. A second signal ends it without a checkpoint.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
#[cfg(unix)]
use std::sync::atomic::Ordering;
#[cfg(unix)]
use std::time::{Duration, Instant};

use moh_comm::Launcher;
#[cfg(unix)]
use moh_program::exit::{Request, Requests, SAME_REQUEST};
use signal_hook::consts::{SIGINT, TERM_SIGNALS};

/// Under a launcher, a second signal within this time is the same request: the launcher passes on signals that its
/// process group has already received.
#[cfg(unix)]
const SAME_REQUEST_LAUNCHED: Duration = Duration::from_secs(5);

/// A function that prints a sentence for the user.
pub(crate) type Say = Box<dyn Fn(&str) + Send>;

/// Sets `stop` on SIGINT, SIGTERM, SIGQUIT and SIGUSR1, and on SIGHUP unless the process was started with SIGHUP
/// ignored, as by nohup. Calls `say` with a sentence at once. A second signal removes the process's temporary files and
/// ends it, with 128 plus the signal's number as exit code. Launchers repeat all signals except SIGINT while a job
/// ends, so under a launcher only SIGINT does so.
#[cfg(unix)]
pub(crate) fn stop_on_signals(
    stop: &Arc<AtomicBool>,
    launcher: Launcher,
    say: Say,
) -> io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGUSR1};
    // mpirun forwards SIGUSR1 to its ranks. On SIGTERM it kills the ranks within seconds.
    let mut heard = [TERM_SIGNALS, &[SIGUSR1]].concat();
    if is_ignored(SIGHUP) == Some(false) {
        heard.push(SIGHUP);
    }
    let mut signals = signal_hook::iterator::Signals::new(heard)?;
    let (mut requests, stop) = (requests(launcher), Arc::clone(stop));
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            match receive(&mut requests, launcher, signal, Instant::now()) {
                Request::Stop => {
                    // Before the flag is set: the run may then end, and print so, within microseconds.
                    say(&acknowledgement(launcher));
                    stop.store(true, Ordering::Relaxed);
                }
                Request::Abort => {
                    say(ABORTED);
                    moh_files::exit_without_temporaries(128 + signal);
                }
                Request::Repeated => {}
            }
        }
    })?;
    Ok(())
}

/// Sets `stop` on SIGINT and SIGTERM. A second SIGINT ends the process.
#[cfg(not(unix))]
pub(crate) fn stop_on_signals(stop: &Arc<AtomicBool>, _: Launcher, _: Say) -> io::Result<()> {
    signal_hook::flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, Arc::clone(stop))?;
    for signal in TERM_SIGNALS {
        signal_hook::flag::register(*signal, Arc::clone(stop))?;
    }
    Ok(())
}

/// The sentence when a second signal ends the process.
#[cfg(unix)]
const ABORTED: &str =
    "aborted without a checkpoint: the same command continues from the newest one";

#[cfg(unix)]
fn acknowledgement(launcher: Launcher) -> String {
    let again = if launcher == Launcher::None { "again" } else { "SIGINT (Ctrl-C)" };
    format!("stopping, with a checkpoint if a step was taken; {again} to abort without one")
}

#[cfg(unix)]
fn requests(launcher: Launcher) -> Requests {
    let is_launched = launcher != Launcher::None;
    Requests::new(if is_launched { SAME_REQUEST_LAUNCHED } else { SAME_REQUEST })
}

/// Returns the request of a signal. Under a launcher only SIGINT ends the process without a checkpoint.
#[cfg(unix)]
fn receive(requests: &mut Requests, launcher: Launcher, signal: i32, now: Instant) -> Request {
    match requests.receive(now) {
        Request::Abort if signal != SIGINT && launcher != Launcher::None => Request::Repeated,
        request => request,
    }
}

/// Returns whether this process ignores a signal; `None` if the system has no file that says so.
#[cfg(unix)]
fn is_ignored(signal: i32) -> Option<bool> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
    Some(mask >> (signal - 1) & 1 == 1)
}

#[cfg(all(test, unix))]
mod tests {
    use signal_hook::consts::SIGTERM;

    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn received(launcher: Launcher, signals: &[(i32, u32)]) -> Vec<Request> {
        let (start, mut requests) = (Instant::now(), requests(launcher));
        let mut receive = |&(signal, at): &(i32, u32)| {
            receive(&mut requests, launcher, signal, start + at * MILLISECOND)
        };
        signals.iter().map(&mut receive).collect()
    }

    #[test]
    fn a_second_signal_aborts_unless_it_is_the_first_one_again() {
        use Request::{Abort, Repeated, Stop};
        let twice = [(SIGTERM, 0), (SIGTERM, 1), (SIGINT, 300)];
        assert_eq!(received(Launcher::None, &twice), [Stop, Repeated, Abort]);
        assert_eq!(received(Launcher::None, &[(SIGINT, 0), (SIGTERM, 200)]), [Stop, Abort]);
    }

    #[test]
    fn what_a_launcher_repeats_does_not_abort() {
        use Request::{Abort, Repeated, Stop};
        // Slurm's pre-emption ends with a second SIGTERM, and torchrun passes Ctrl-C on.
        let signals = [(SIGTERM, 0), (SIGTERM, 30_000), (SIGINT, 31_000)];
        assert_eq!(received(Launcher::Slurm, &signals), [Stop, Repeated, Abort]);
        let signals = [(SIGINT, 0), (SIGINT, 100), (SIGINT, 5000)];
        assert_eq!(received(Launcher::Torchrun, &signals), [Stop, Repeated, Abort]);
    }
}
