//! The temporary files of this process, which a program can remove when a signal ends it, and the temporary files
//! that a killed process has left. A process keeps its temporary files locked, so no process uses a file that can be
//! locked.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use tempfile::TempPath;

use crate::{TEMPORARY, parent};

/// Random characters at the end of a temporary name.
const RANDOM_CHARACTERS: usize = 6;
/// Maximum bytes of a final name in a temporary name. File systems allow about 255 bytes in total.
const MAX_NAME_BYTES: usize = 200;

static PATHS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
/// Locked for reading while several files get their names together.
static PUBLICATION: RwLock<()> = RwLock::new(());

/// Ends the process with `code` after removing its [`PendingFile`](crate::PendingFile)s. Waits
/// for a [`Publication`].
pub fn exit_without_temporaries(code: i32) -> ! {
    // Both stay locked: other threads run until the exit, and must neither create nor publish files.
    let _publication = PUBLICATION.write().unwrap_or_else(PoisonError::into_inner);
    let paths = paths();
    for path in paths.iter() {
        // If a file cannot be removed now, the next run removes it.
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
    std::process::exit(code)
}

/// Delays [`exit_without_temporaries`] while it exists: some files of a group may have their names and others
/// not yet.
#[derive(Debug)]
pub struct Publication {
    _lock: RwLockReadGuard<'static, ()>,
}

impl Publication {
    /// Starts the publication of several files. A thread must not start a second publication before the
    /// first has ended.
    pub fn start() -> Self {
        Self { _lock: PUBLICATION.read().unwrap_or_else(PoisonError::into_inner) }
    }
}

/// The registration of a temporary file or directory. Dropping it removes the registration.
#[derive(Debug)]
pub struct Registered(PathBuf);

impl Registered {
    /// Lets [`exit_without_temporaries`] remove a directory and its contents.
    pub fn directory(path: &Path) -> Self {
        paths().push(path.to_path_buf());
        Self(path.to_path_buf())
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        paths().retain(|path| *path != self.0);
    }
}

/// Creates a locked and registered temporary file next to `path`. Removes temporary files of `path`
/// that a killed process has left.
///
/// Errors are the system's own. Errors of `tempfile` would name the temporary file, which
/// users do not know.
pub(crate) fn create(path: &Path) -> io::Result<(File, TempPath, Registered)> {
    let (directory, prefix) = (parent(path), prefix(path));
    remove_leftovers(directory, &prefix);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).rand_bytes(RANDOM_CHARACTERS);
    let open = |path: &Path| File::options().read(true).write(true).create_new(true).open(path);
    loop {
        let mut paths = paths();
        let (file, path) = builder.make_in(directory, open)?.into_parts();
        paths.push(path.to_path_buf());
        drop(paths);
        let registered = Registered(path.to_path_buf());
        // Some network file systems have no locks. On them, no file is removed as left over.
        let _ = file.lock();
        // Another process may have removed the file as left over before it was locked.
        if path.exists() {
            return Ok((file, path, registered));
        }
    }
}

fn paths() -> MutexGuard<'static, Vec<PathBuf>> {
    PATHS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn prefix(path: &Path) -> OsString {
    let name = path.file_name().unwrap_or_default();
    let mut prefix = OsString::from(TEMPORARY);
    if name.len() <= MAX_NAME_BYTES {
        prefix.push(name);
    } else {
        let name = name.to_string_lossy();
        prefix.push(&name[..name.floor_char_boundary(MAX_NAME_BYTES)]);
    }
    prefix.push("-");
    prefix
}

/// Removes the temporary files with this prefix that no process uses. Ignores errors: leftovers
/// only use space.
fn remove_leftovers(directory: &Path, prefix: &OsStr) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let rest = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        let is_random = |rest: &[u8]| {
            rest.len() == RANDOM_CHARACTERS && rest.iter().all(u8::is_ascii_alphanumeric)
        };
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if !is_file || !rest.is_some_and(is_random) {
            continue;
        }
        // On network file systems, only a file that is open for writing can be locked for writing.
        let Ok(file) = File::options().write(true).open(entry.path()) else { continue };
        if file.try_lock().is_ok() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn leftovers_of_the_same_file_are_removed_unless_they_are_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let kept = [".tmp-a-1234567", ".tmp-a-b-123456", ".tmp-ab-123456", "a-123456"];
        for name in kept.into_iter().chain([".tmp-a-123456", ".tmp-a-abcDEF"]) {
            fs::write(dir.path().join(name), "left").unwrap();
        }
        fs::create_dir(dir.path().join(".tmp-a-000000")).unwrap();
        let path = dir.path().join("a");
        let (first_file, first, _registered) = create(&path).unwrap();
        let (second_file, second, _registered) = create(&path).unwrap();
        assert!(first.exists() && second.exists());
        drop((first, first_file, second, second_file));
        let mut expected = kept.to_vec();
        expected.push(".tmp-a-000000");
        expected.sort();
        assert_eq!(names(dir.path()), expected);
    }

    #[test]
    fn long_names_have_temporary_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("\u{e4}".repeat(120));
        let (_file, temporary, _registered) = create(&path).unwrap();
        temporary.persist(&path).unwrap();
        assert!(path.exists());
    }

    #[test]
    fn a_file_is_registered_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let is_registered = |path: &Path| paths().iter().any(|known| known == path);
        let (_file, path, registered) = create(&dir.path().join("a")).unwrap();
        assert!(is_registered(&path));
        drop(registered);
        assert!(!is_registered(&path));
    }
}
