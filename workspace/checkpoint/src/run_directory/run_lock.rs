//! The lock of a run directory: the system's own, which ends with the process that holds it. Some file systems
//! (Lustre and NFS with certain options) have no locks. On them, a second process is not kept out.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::Path;

use crate::Result;

/// The file that is locked. It is never removed.
pub(crate) const LOCK: &str = ".lock";
/// ENOLCK of Linux: no locks available.
const ENOLCK: i32 = 37;

/// An exclusive lock of a run directory, released when dropped or when the process ends.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
    warning: Option<String>,
}

impl RunLock {
    /// Locks the directory `root`, which must exist.
    pub(crate) fn acquire(root: &Path) -> Result<Self> {
        Self::acquire_by(File::try_lock, root)
    }

    /// Locks the directory with `try_lock`, which the tests replace.
    fn acquire_by(
        try_lock: impl Fn(&File) -> Result<(), TryLockError>,
        root: &Path,
    ) -> Result<Self> {
        let path = root.join(LOCK);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(moh_files::io(&path))?;
        let warning = match try_lock(&file) {
            Ok(()) => None,
            Err(TryLockError::WouldBlock) => {
                let reason = "another process trains in this run directory: wait for it, or use another run.dir";
                return Err(moh_files::unusable(root, reason).into());
            }
            Err(TryLockError::Error(error)) if has_no_locks(&error) => Some(format!(
                "{}: the file system has no locks, so nothing keeps a second process out of this run directory: \
                 start only one",
                root.display()
            )),
            Err(TryLockError::Error(error)) => return Err(moh_files::io(&path)(error).into()),
        };
        Ok(RunLock { _file: file, warning })
    }

    /// Returns a sentence for the user if the file system has no locks.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }
}

/// Returns whether the error says that the file system has no locks.
fn has_no_locks(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(ENOLCK)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::Error;

    fn acquire(root: &Path, errno: i32) -> Result<RunLock> {
        let fails = |_: &File| Err(TryLockError::Error(io::Error::from_raw_os_error(errno)));
        RunLock::acquire_by(fails, root)
    }

    #[test]
    fn a_file_system_without_locks_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        // ENOTSUP, ENOSYS and ENOLCK of Linux.
        for errno in [95, 38, 37] {
            let lock = acquire(dir.path(), errno).unwrap();
            assert!(lock.warning().unwrap().contains("has no locks"));
        }
        assert!(RunLock::acquire(dir.path()).unwrap().warning().is_none());
    }

    #[test]
    fn another_error_of_the_lock_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        // EIO.
        assert!(matches!(
            acquire(dir.path(), 5),
            Err(Error::File(moh_files::FileError::Io { .. }))
        ));
    }
}
