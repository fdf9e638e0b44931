//! Files and directories that appear complete or not at all, even if the program or the machine
//! fails. They are written next to the final path under a name that starts with [`TEMPORARY`],
//! synced to disk, and renamed. If a file or directory is dropped before that, it is removed. A program that a signal
//! ends can remove its temporary files. The next writer of a file removes the temporary files of a killed process.
//! [`units`] is separate: it has the formats in which all crates write quantities for users.

mod bounded;
mod directory;
mod error;
mod file;
mod temporary;
pub mod units;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

pub use bounded::{open, read, read_bounded, read_bounded_if_any, utf8};
pub use directory::PendingDirectory;
pub use error::{FileError, io, is_file, unless_missing, unusable};
pub use file::{PendingFile, shorten, write};
pub use temporary::{Publication, Registered, exit_without_temporaries};

/// Prefix of the names of incomplete and replaced files.
pub const TEMPORARY: &str = ".tmp-";
/// The first bytes of the pointer with which Git LFS replaces a large file.
pub const GIT_LFS: &[u8] = b"version https://git-lfs.github.com/";
/// The remedy for a file with these first bytes.
pub const IS_POINTER: &str = "is a pointer of Git LFS: fetch the file itself, with `git lfs pull`";

/// Returns the parent directory of `path`.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Creates the missing parent directories of a file or directory `path`.
pub fn create_parents(path: &Path) -> std::io::Result<()> {
    fs::create_dir_all(parent(path))
}

/// Creates a directory in an existing directory, unless it exists already.
pub fn create_directory(path: &Path) -> std::io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Describes a file with bytes that are not JSON, with a remedy for values that only Python writes.
pub fn json_fault(error: &dyn std::fmt::Display, bytes: &[u8]) -> String {
    let has = |word: &[u8]| bytes.windows(word.len()).any(|part| part == word);
    match has(b"NaN") || has(b"Infinity") {
        true => format!(
            "not valid JSON: {error}: NaN and Infinity are not JSON, write null in their place"
        ),
        false => format!("not valid JSON: {error}"),
    }
}

/// Syncs new and renamed entries of a directory to disk. Does nothing except on Unix.
pub fn sync_directory(path: &Path) -> std::io::Result<()> {
    match cfg!(unix) {
        true => File::open(path)?.sync_all(),
        false => Ok(()),
    }
}

/// Writes and syncs a new file, for files of a [`PendingDirectory`], which need no temporary name.
pub fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Removes a directory and its contents. A missing directory is not an error.
pub fn remove_directory(path: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the first name with the suffix "", "-2", "-3", ... that does not exist.
pub fn first_free_suffixed(name: impl Fn(&str) -> PathBuf) -> PathBuf {
    first_free(|n| match n {
        1 => name(""),
        _ => name(&format!("-{n}")),
    })
}

/// Returns the first name for 1, 2, ... that does not exist.
pub fn first_free(name: impl Fn(u64) -> PathBuf) -> PathBuf {
    let mut number = 1;
    loop {
        let path = name(number);
        if path.symlink_metadata().is_err() {
            return path;
        }
        number += 1;
    }
}
