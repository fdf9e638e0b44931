//! Work on a separate thread, at the same time as training.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The niceness of background threads: on a busy machine they get about a tenth of the time of a
/// training thread. While training waits for them, they get all of the time.
#[cfg(target_os = "linux")]
const NICENESS: i32 = 10;

/// Work on a separate thread. Dropping it waits for the thread.
#[derive(Debug)]
pub(crate) struct Background<R> {
    result: Receiver<R>,
    thread: Option<JoinHandle<()>>,
}

/// The thread has ended without a result: it panicked.
#[derive(Debug)]
pub(crate) struct Panicked;

impl<R: Send + 'static> Background<R> {
    /// Starts `work` on a thread with a low priority. Fails if the system has no thread left. `work` is then dropped.
    pub(crate) fn start(name: &str, work: impl FnOnce() -> R + Send + 'static) -> io::Result<Self> {
        let (sender, result) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            lower_priority();
            // The receiver is dropped only if the result is not needed.
            let _ = sender.send(work());
        })?;
        Ok(Background { result, thread: Some(thread) })
    }

    /// Waits at most `limit` for the result. Returns `None` while the work runs, and the result only once.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<Result<R, Panicked>> {
        let found = match self.result.recv_timeout(limit) {
            Ok(result) => Ok(result),
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => Err(Panicked),
        };
        self.join();
        Some(found)
    }
}

impl<R> Background<R> {
    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic is reported by the missing result.
            let _ = thread.join();
        }
    }
}

impl<R> Drop for Background<R> {
    fn drop(&mut self) {
        self.join();
    }
}

/// Lets other threads of the machine run before this one.
pub(crate) fn lower_priority() {
    // On Linux, each thread has its own priority. Elsewhere this would set the process's.
    #[cfg(target_os = "linux")]
    // A system that refuses leaves the priority as it is.
    let _ = rustix::process::setpriority_process(None, NICENESS);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result<R: Send + 'static>(work: &mut Background<R>) -> Result<R, Panicked> {
        std::iter::repeat_with(|| work.wait(Duration::from_secs(1))).flatten().next().unwrap()
    }

    #[test]
    fn a_result_is_waited_for() {
        let (release, gate) = mpsc::channel::<()>();
        let mut work = Background::start("work", move || gate.recv().is_ok()).unwrap();
        assert!(work.wait(Duration::ZERO).is_none());
        release.send(()).unwrap();
        assert!(matches!(result(&mut work), Ok(true)));
    }

    #[test]
    fn a_panic_is_not_a_result() {
        let mut work: Background<()> = Background::start("work", || panic!("on purpose")).unwrap();
        assert!(matches!(result(&mut work), Err(Panicked)));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_background_thread_is_nice_and_its_starter_is_not() {
        let niceness = || rustix::process::getpriority_process(None).unwrap();
        let before = niceness();
        let mut work = Background::start("work", niceness).unwrap();
        let found = result(&mut work).unwrap();
        assert_eq!((found, niceness()), (NICENESS.max(before), before));
    }
}
