//! The lock of a run directory. The system's own lock ends with the process that holds it. Some file systems
//! (Lustre and NFS with certain options) have none: there a file names the holder, which rewrites it while
//! it lives, and a holder that has not done so for a while no longer counts.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use moh_comm::host_name;
use moh_files::OpenDirectory;

use crate::Error;
use moh_files::unless_missing;

/// The file that is locked; it stays.
pub(crate) const LOCK: &str = ".lock";
/// The file that names the holder where the file system has no locks.
pub(crate) const HOLDER: &str = ".lock-holder";
/// Begins the name of the file that tells the time of the file system.
pub(crate) const CLOCK: &str = "lock-clock-";
/// How often a holder rewrites its file.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// A holder that has not rewritten its file for this long has died, or its machine is cut off.
const STALE: Duration = Duration::from_secs(90);
/// Maximum bytes of a holder's file.
const MAX_BYTES: u64 = 4096;
/// ENOLCK of Linux: no locks available.
const ENOLCK: i32 = 37;

/// An exclusive lock of a run directory, released when dropped or when the process ends.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
    holder: Option<Holder>,
    directory: Arc<OpenDirectory>,
}

impl RunLock {
    /// Locks the directory `root`, which exists. With `break_lock`, a holder's file is removed first, however
    /// new it is.
    ///
    /// # Errors
    /// Fails if another process holds the lock, or the file system reports an error.
    pub(crate) fn acquire(root: &Path, break_lock: bool) -> Result<Self, Error> {
        Self::acquire_by(File::try_lock, root, break_lock)
    }

    /// As [`Self::acquire`], with the system's lock.
    fn acquire_by(
        try_lock: impl Fn(&File) -> Result<(), TryLockError>,
        root: &Path,
        break_lock: bool,
    ) -> Result<Self, Error> {
        let path = root.join(LOCK);
        let directory = Arc::new(OpenDirectory::open(root).map_err(moh_files::io(root))?);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(moh_files::io(&path))?;
        match try_lock(&file) {
            Ok(()) => Ok(RunLock { _file: file, holder: None, directory }),
            Err(TryLockError::WouldBlock) => Err(Error::Locked { path: root.to_owned() }),
            Err(TryLockError::Error(error)) if has_no_locks(&error) => {
                let holder = Holder::create(root, break_lock)?;
                Ok(RunLock { _file: file, holder: Some(holder), directory })
            }
            Err(TryLockError::Error(error)) => Err(moh_files::io(&path)(error).into()),
        }
    }

    /// The directory that is locked, wherever it is now.
    pub fn directory(&self) -> &Arc<OpenDirectory> {
        &self.directory
    }

    /// What a user should know about the lock, in a sentence.
    pub fn warning(&self) -> Option<String> {
        self.holder.as_ref().map(|holder| {
            format!(
                "{}: the file system has no locks, so this file keeps other processes out of the run \
                 directory, for {} s after this one has died",
                holder.path.display(),
                STALE.as_secs()
            )
        })
    }
}

/// Whether the error says that the file system has no locks.
fn has_no_locks(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(ENOLCK)
}

/// A holder's file, rewritten by a thread until this is dropped.
#[derive(Debug)]
struct Holder {
    path: PathBuf,
    text: String,
    /// Dropping it ends the thread.
    alive: Option<Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Holder {
    fn create(root: &Path, break_lock: bool) -> Result<Self, Error> {
        let path = root.join(HOLDER);
        remove_stale(root, &path, break_lock)?;
        let text = format!("{}, process {}\n", host_name(), std::process::id());
        let mut file = match File::create_new(&path) {
            // Another process has been faster.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(Error::Locked { path: root.to_owned() });
            }
            file => file.map_err(moh_files::io(&path))?,
        };
        file.write_all(text.as_bytes()).map_err(moh_files::io(&path))?;
        let (alive, ended) = channel::<()>();
        let beat = text.clone();
        let thread = std::thread::spawn(move || {
            while ended.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                // Writing sets the time by the file system's clock. A failure is not the run's: if it
                // lasts, the file grows old.
                let _ = file.rewind().and_then(|()| file.write_all(beat.as_bytes()));
            }
        });
        Ok(Holder { path, text, alive: Some(alive), thread: Some(thread) })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.alive.take());
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ = thread.join();
        }
        // A process that was told to break the lock has its own file there.
        if read(&self.path).is_ok_and(|text| text.as_deref() == Some(&self.text)) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes the file of a holder that has died, or any if `break_lock`.
///
/// # Errors
/// [`Error::LockHeld`] if the holder lives.
fn remove_stale(root: &Path, path: &Path, break_lock: bool) -> Result<(), Error> {
    let Some(text) = read(path)? else { return Ok(()) };
    if !break_lock && !has_died(&text) {
        let age = age(root, path)?;
        if age < STALE {
            return Err(Error::LockHeld {
                path: path.to_owned(),
                holder: shown(&text),
                seconds: age.as_secs(),
                wait: (STALE - age).as_secs() + 1,
            });
        }
    }
    // Of several processes that find the same file, one renames it; the others find it gone, or a new one.
    let aside = root.join(format!("{}{HOLDER}-{}", moh_files::TEMPORARY, std::process::id()));
    if unless_missing(path, std::fs::rename(path, &aside))?.is_none() {
        return Ok(());
    }
    if read(&aside)?.as_deref() == Some(&text) {
        return Ok(std::fs::remove_file(&aside).map_err(moh_files::io(&aside))?);
    }
    // The file of a process that has just taken the lock: it gets it back.
    std::fs::rename(&aside, path).map_err(moh_files::io(path))?;
    Err(Error::Locked { path: root.to_owned() })
}

/// The holder's text; `None` if the file is missing.
fn read(path: &Path) -> Result<Option<String>, Error> {
    let Some(file) = unless_missing(path, File::open(path))? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(moh_files::io(path))?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// The first line of a holder's text, safe to print.
fn shown(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// Whether the holder was a process of this machine that no longer exists.
fn has_died(text: &str) -> bool {
    let Some((host, process)) = text.trim_end().rsplit_once(", process ") else { return false };
    let Ok(process) = process.parse::<u32>() else { return false };
    host == host_name()
        && Path::new("/proc/self").exists()
        && !Path::new("/proc").join(process.to_string()).exists()
}

/// The time since the file was written, by the clock of the file system: that of a file written now.
fn age(root: &Path, path: &Path) -> Result<Duration, Error> {
    let probe = root.join(format!("{}{CLOCK}{}", moh_files::TEMPORARY, std::process::id()));
    std::fs::write(&probe, b"now").map_err(moh_files::io(&probe))?;
    let now = std::fs::metadata(&probe).and_then(|found| found.modified());
    std::fs::remove_file(&probe).map_err(moh_files::io(&probe))?;
    let written = std::fs::metadata(path).and_then(|found| found.modified());
    let (now, written) =
        (now.map_err(moh_files::io(&probe))?, written.map_err(moh_files::io(path))?);
    // A file from the future is new.
    Ok(now.duration_since(written).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::SystemTime;

    use super::*;

    /// ENOTSUP, ENOSYS and ENOLCK of Linux.
    const NO_LOCKS: [i32; 3] = [95, 38, 37];

    fn acquire(root: &Path, errno: i32, break_lock: bool) -> Result<RunLock, Error> {
        let fails = |_: &File| Err(TryLockError::Error(io::Error::from_raw_os_error(errno)));
        RunLock::acquire_by(fails, root, break_lock)
    }

    /// Another machine's file, written `age` ago.
    fn held_elsewhere(root: &Path, age: Duration) {
        let path = root.join(HOLDER);
        std::fs::write(&path, "another-host, process 1\n").unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    #[test]
    fn without_locks_a_file_keeps_a_second_process_out_until_the_first_has_ended() {
        for errno in NO_LOCKS {
            let dir = tempfile::tempdir().unwrap();
            let lock = acquire(dir.path(), errno, false).unwrap();
            assert!(lock.warning().unwrap().contains("has no locks"));
            let error = acquire(dir.path(), errno, false).unwrap_err().to_string();
            let process = format!("process {}", std::process::id());
            assert!(error.contains(&process) && error.contains("--break-lock"), "{error}");
            drop(lock);
            assert!(!dir.path().join(HOLDER).exists());
            acquire(dir.path(), errno, false).unwrap();
        }
    }

    #[test]
    fn with_locks_there_is_no_such_file() {
        let dir = tempfile::tempdir().unwrap();
        let lock = RunLock::acquire(dir.path(), false).unwrap();
        assert!(lock.warning().is_none());
        assert!(!dir.path().join(HOLDER).exists());
    }

    #[test]
    fn another_error_of_the_lock_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        // EIO.
        assert!(matches!(
            acquire(dir.path(), 5, false),
            Err(Error::File(moh_files::FileError::Io { .. }))
        ));
    }

    #[test]
    fn a_holder_elsewhere_counts_until_it_is_old() {
        let dir = tempfile::tempdir().unwrap();
        held_elsewhere(dir.path(), Duration::from_secs(40));
        let error = acquire(dir.path(), 95, false).unwrap_err();
        assert!(matches!(error, Error::LockHeld { .. }), "{error}");
        assert!(error.to_string().contains("another-host, process 1"), "{error}");
        held_elsewhere(dir.path(), STALE + Duration::from_secs(5));
        acquire(dir.path(), 95, false).unwrap();
    }

    #[test]
    fn a_holder_of_this_machine_that_is_gone_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        // Above the largest process id of Linux.
        let text = format!("{}, process 4194305\n", host_name());
        std::fs::write(dir.path().join(HOLDER), text).unwrap();
        acquire(dir.path(), 95, false).unwrap();
    }

    #[test]
    fn breaking_the_lock_takes_it_from_any_holder() {
        let dir = tempfile::tempdir().unwrap();
        held_elsewhere(dir.path(), Duration::ZERO);
        let lock = acquire(dir.path(), 95, true).unwrap();
        assert!(acquire(dir.path(), 95, false).is_err());
        drop(lock);
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "only {LOCK} stays: {left:?}");
    }

    #[test]
    fn a_holder_whose_lock_was_broken_leaves_the_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let lock = acquire(dir.path(), 95, false).unwrap();
        held_elsewhere(dir.path(), Duration::ZERO);
        drop(lock);
        assert!(dir.path().join(HOLDER).exists());
    }

    #[test]
    fn what_is_not_a_holders_text_is_a_holder_that_may_live() {
        let dir = tempfile::tempdir().unwrap();
        for bytes in [&b""[..], b"\x1b[2J\xff\xff", b", process ", b"x, process -1", &[b'a'; 9000]]
        {
            std::fs::write(dir.path().join(HOLDER), bytes).unwrap();
            let error = acquire(dir.path(), 95, false).unwrap_err();
            assert!(matches!(error, Error::LockHeld { .. }), "{error}");
            assert!(!error.to_string().contains('\x1b'), "{error}");
        }
    }
}
