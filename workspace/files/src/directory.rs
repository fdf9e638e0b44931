//! A directory that appears complete or not at all.
//!
//! Its process locks the directory while it has its temporary name. So [`PendingDirectory::recover`] of
//! another process can distinguish a directory that is being written from the remains of a killed
//! process.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::{TEMPORARY, parent, remove_directory, sync_directory};

/// The suffix of the temporary name of a directory that contains a replaced directory, named [`REPLACED`].
const REPLACED_SUFFIX: &str = ".old";
const REPLACED: &str = "replaced";
/// Random letters and digits of a temporary name.
const RANDOM_CHARACTERS: usize = 6;

/// A directory that gets its final name when it is complete.
#[derive(Debug)]
pub struct PendingDirectory {
    place: PathBuf,
    path: PathBuf,
    published: bool,
    _lock: Option<File>,
}

impl PendingDirectory {
    /// Creates a directory with the final name `place`, under a unique temporary name.
    pub fn create(place: &Path) -> io::Result<Self> {
        let (path, lock) = unique(place, "")?;
        Ok(PendingDirectory { place: place.to_path_buf(), path, published: false, _lock: lock })
    }

    /// Removes directories with the final name `place` that killed processes have left. If a process had
    /// moved a directory aside to replace it, restores its name. Directories of running
    /// processes stay. If the file system has no locks, all directories stay.
    pub fn recover(place: &Path) -> io::Result<()> {
        let entries = match fs::read_dir(parent(place)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            let Some(suffix) = temporary_suffix(&path, place) else { continue };
            // Held until the directory is removed.
            let Locked::Here(_lock) = lock(&path) else { continue };
            let replaced = path.join(REPLACED);
            if suffix == REPLACED_SUFFIX && replaced.exists() && is_occupied(place) != Some(true) {
                rename_over_empty(&replaced, place)?;
            }
            remove_directory(&path)?;
        }
        Ok(())
    }

    /// Creates a directory with the final name `place`, under a temporary name that several
    /// processes know: [`PendingDirectory::shared_path`]. Removes the leftovers of an earlier
    /// process.
    pub fn create_shared(place: &Path) -> io::Result<Self> {
        let path = Self::shared_path(place);
        remove_directory(&path)?;
        fs::create_dir(&path)?;
        Ok(PendingDirectory { place: place.to_path_buf(), path, published: false, _lock: None })
    }

    /// Returns the temporary path that [`PendingDirectory::create_shared`] uses for `place`.
    pub fn shared_path(place: &Path) -> PathBuf {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        parent(place).join(format!("{TEMPORARY}{name}"))
    }

    /// Returns the temporary path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the directory to its final name. Its files must be synced.
    ///
    /// # Errors
    /// Fails if the name is in use, except by an empty directory, or if the directory cannot be
    /// renamed.
    pub fn publish(mut self) -> io::Result<()> {
        sync_directories(&self.path)?;
        self.rename()
    }

    /// Renames the directory to its final name and replaces an existing directory, which is restored after a failure.
    pub fn replace(mut self) -> io::Result<()> {
        if is_occupied(&self.place) != Some(true) {
            return self.publish();
        }
        sync_directories(&self.path)?;
        // The old directory is moved aside first, so that a partial directory never has the name.
        let (aside, _lock) = unique(&self.place, REPLACED_SUFFIX)?;
        let old = aside.join(REPLACED);
        let done = fs::rename(&self.place, &old).and_then(|()| self.rename());
        // If the old directory can neither be replaced nor restored, it stays aside.
        if done.is_ok() || !old.exists() || fs::rename(&old, &self.place).is_ok() {
            let _ = remove_directory(&aside);
        }
        done
    }

    fn rename(&mut self) -> io::Result<()> {
        rename_over_empty(&self.path, &self.place)?;
        self.published = true;
        sync_directory(parent(&self.place))
    }
}

/// Syncs the entries of a directory and of its subdirectories.
fn sync_directories(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_directories(&entry.path())?;
        }
    }
    sync_directory(path)
}

impl Drop for PendingDirectory {
    fn drop(&mut self) {
        if !self.published {
            // A directory that cannot be removed keeps the prefix of temporary names.
            let _ = remove_directory(&self.path);
        }
    }
}

/// Returns whether a directory has entries, or `None` if it is not a directory.
fn is_occupied(path: &Path) -> Option<bool> {
    fs::read_dir(path).ok().map(|mut entries| entries.next().is_some())
}

/// Renames a directory to a name that is free or belongs to an empty directory.
fn rename_over_empty(from: &Path, to: &Path) -> io::Result<()> {
    if is_occupied(to) == Some(false) {
        // Renaming replaces an empty directory only on Unix.
        fs::remove_dir(to)?;
    }
    fs::rename(from, to)
}

/// Creates and locks a directory next to `place` with a unique temporary name. There is no lock
/// if the file system has no locks.
fn unique(place: &Path, suffix: &str) -> io::Result<(PathBuf, Option<File>)> {
    let prefix = temporary_prefix(place);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(suffix).rand_bytes(RANDOM_CHARACTERS);
    loop {
        // Not `tempdir_in`: its errors name the temporary directory, and its mode is 0700, which the
        // final directory would keep.
        let made = builder.make_in(parent(place), |path| fs::create_dir(path))?;
        let path = made.into_temp_path().keep().map_err(|failed| failed.error)?;
        match lock(&path) {
            // `recover` of another process may have found the directory before it was locked.
            Locked::Elsewhere => {}
            Locked::Here(_) if !path.is_dir() => {}
            Locked::Here(lock) => return Ok((path, Some(lock))),
            Locked::Unsupported => return Ok((path, None)),
        }
    }
}

fn temporary_prefix(place: &Path) -> String {
    format!("{TEMPORARY}{}-", place.file_name().unwrap_or_default().to_string_lossy())
}

/// Returns the part after the random letters in the temporary name of a directory for `place`, or `None` for
/// other names.
fn temporary_suffix<'a>(path: &'a Path, place: &Path) -> Option<&'a str> {
    let name = path.file_name()?.to_str()?;
    let (random, suffix) =
        name.strip_prefix(&temporary_prefix(place))?.split_at_checked(RANDOM_CHARACTERS)?;
    let is_random = random.bytes().all(|byte| byte.is_ascii_alphanumeric());
    (is_random && ["", REPLACED_SUFFIX].contains(&suffix)).then_some(suffix)
}

enum Locked {
    /// Held by this process until the file is dropped.
    Here(File),
    /// Held by another process, or the directory is gone.
    Elsewhere,
    /// The file system or the operating system has no locks of directories.
    Unsupported,
}

fn lock(path: &Path) -> Locked {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Locked::Elsewhere,
        Err(_) => return Locked::Unsupported,
    };
    match file.try_lock() {
        Ok(()) => Locked::Here(file),
        Err(TryLockError::WouldBlock) => Locked::Elsewhere,
        Err(TryLockError::Error(_)) => Locked::Unsupported,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temporary::tests::names;
    use crate::write_synced;

    fn pending(place: &Path, text: &str) -> PendingDirectory {
        let pending = PendingDirectory::create(place).unwrap();
        write_synced(&pending.path().join("file"), text.as_bytes()).unwrap();
        pending
    }

    #[test]
    fn a_directory_appears_with_all_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("model");
        let started = pending(&place, "one");
        assert!(!place.exists());
        started.publish().unwrap();
        assert_eq!(fs::read(place.join("file")).unwrap(), b"one");
        assert_eq!(names(dir.path()), ["model"]);
    }

    #[test]
    fn a_dropped_directory_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        drop(pending(&dir.path().join("model"), "one"));
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn an_error_does_not_name_the_temporary_directory() {
        let dir = tempfile::tempdir().unwrap();
        let error = PendingDirectory::create(&dir.path().join("missing/model")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.raw_os_error().is_some(), "{error}");
    }

    #[test]
    fn what_is_there_stays_unless_it_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("model");
        pending(&place, "one").publish().unwrap();
        assert!(pending(&place, "two").publish().is_err());
        assert_eq!(fs::read(place.join("file")).unwrap(), b"one");
        pending(&place, "two").replace().unwrap();
        assert_eq!(fs::read(place.join("file")).unwrap(), b"two");
        fs::remove_dir_all(&place).unwrap();
        fs::create_dir(&place).unwrap();
        pending(&place, "three").publish().unwrap();
        assert_eq!(names(dir.path()), ["model"]);
    }

    #[test]
    fn processes_share_a_name_and_remains_under_it_go() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("step-3");
        let path = PendingDirectory::shared_path(&place);
        fs::create_dir(&path).unwrap();
        write_synced(&path.join("old"), b"").unwrap();
        let pending = PendingDirectory::create_shared(&place).unwrap();
        assert_eq!(pending.path(), path);
        write_synced(&path.join("new"), b"").unwrap();
        pending.publish().unwrap();
        assert_eq!(names(&place), ["new"]);
    }

    /// Returns a directory as a killed process leaves it: not removed and not locked.
    fn killed(dir: &Path, name: &str) -> PathBuf {
        let path = dir.join(name);
        fs::create_dir(&path).unwrap();
        write_synced(&path.join("half"), b"").unwrap();
        path
    }

    #[cfg(unix)]
    #[test]
    fn what_a_killed_process_left_goes_and_what_another_writes_stays() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("out");
        killed(dir.path(), ".tmp-out-Ab3dE9");
        let others = [".tmp-out-MoH-Ab3dE9", ".tmp-out-Ab3dE", ".tmp-outer-Ab3dE9", "out-Ab3dE9"];
        for name in others {
            killed(dir.path(), name);
        }
        let running = pending(&place, "one");
        PendingDirectory::recover(&place).unwrap();
        assert!(!dir.path().join(".tmp-out-Ab3dE9").exists());
        assert_eq!(names(dir.path()).len(), 5);
        running.publish().unwrap();
        assert_eq!(fs::read(place.join("file")).unwrap(), b"one");
    }

    #[cfg(unix)]
    #[test]
    fn a_directory_that_was_being_replaced_gets_its_name_back() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("out");
        let aside = dir.path().join(".tmp-out-Ab3dE9.old");
        killed(dir.path(), ".tmp-out-Ab3dE9.old");
        fs::rename(killed(dir.path(), "model"), aside.join(REPLACED)).unwrap();
        PendingDirectory::recover(&place).unwrap();
        assert_eq!((names(dir.path()), names(&place)), (vec!["out".into()], vec!["half".into()]));

        // The replacement has the name, so the replaced directory is removed.
        killed(dir.path(), ".tmp-out-Ab3dE9.old");
        fs::rename(killed(dir.path(), "model"), aside.join(REPLACED)).unwrap();
        write_synced(&place.join("new"), b"").unwrap();
        PendingDirectory::recover(&place).unwrap();
        assert_eq!(names(dir.path()), ["out"]);
        assert_eq!(names(&place), ["half", "new"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_directory_that_cannot_be_replaced_stays() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("model");
        pending(&place, "one").publish().unwrap();
        let two = pending(&place, "two");
        fs::remove_dir_all(two.path()).unwrap();
        assert!(two.replace().is_err());
        assert_eq!(fs::read(place.join("file")).unwrap(), b"one");
        assert_eq!(names(dir.path()), ["model"]);
    }
}
