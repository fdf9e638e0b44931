//! Signals that end a run after its current step.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, TERM_SIGNALS};
use signal_hook::flag;

/// Sets `stop` on SIGINT, SIGTERM and SIGQUIT, on SIGUSR1, and on SIGHUP unless the process was started
/// with it ignored, as by nohup. A second SIGINT ends the process at once; launchers repeat SIGTERM, so
/// repeating the others has no effect.
///
/// # Errors
/// Fails if the system refuses a handler.
pub fn stop_on_signals(stop: &Arc<AtomicBool>) -> io::Result<()> {
    flag::register_conditional_shutdown(SIGINT, 130, Arc::clone(stop))?;
    for signal in TERM_SIGNALS {
        flag::register(*signal, Arc::clone(stop))?;
    }
    #[cfg(unix)]
    {
        use signal_hook::consts::{SIGHUP, SIGUSR1};
        // mpirun forwards SIGUSR1 to its ranks; a SIGTERM makes it kill them within seconds.
        flag::register(SIGUSR1, Arc::clone(stop))?;
        if is_ignored(SIGHUP) == Some(false) {
            flag::register(SIGHUP, Arc::clone(stop))?;
        }
    }
    Ok(())
}

/// Whether this process ignores a signal; `None` where the system does not say so in a file.
#[cfg(unix)]
fn is_ignored(signal: i32) -> Option<bool> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
    Some(mask >> (signal - 1) & 1 == 1)
}
