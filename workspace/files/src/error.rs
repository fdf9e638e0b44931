//! Errors of files, which name the path.

use std::io;
use std::path::{Path, PathBuf};

/// An error of a file or directory.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is damaged, or cannot be used.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The problem, and what was expected.
        reason: String,
    },
}

/// Adds the path to an I/O error, for `map_err`.
pub fn io(path: &Path) -> impl Fn(io::Error) -> FileError + use<> {
    let path = path.to_path_buf();
    move |source| FileError::Io { path: path.clone(), source }
}

/// Returns the error of a file that cannot be used.
pub fn unusable(path: &Path, reason: impl Into<String>) -> FileError {
    FileError::Unusable { path: path.to_path_buf(), reason: reason.into() }
}

/// Returns the value of an operation on `path`, or `None` if nothing exists at `path`.
pub fn unless_missing<T>(path: &Path, result: io::Result<T>) -> Result<Option<T>, FileError> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some).map_err(io(path)),
    }
}

/// Returns whether there is a file at `path`.
///
/// # Errors
/// Fails if there is a broken link, which a copy of the directory would lack.
pub fn is_file(path: &Path) -> Result<bool, FileError> {
    match (path.metadata(), path.read_link()) {
        (Err(error), Ok(target)) if error.kind() == io::ErrorKind::NotFound => {
            let reason = format!(
                "is a link to {}, where there is nothing: fetch the file again, or remove the link",
                target.display()
            );
            Err(unusable(path, reason))
        }
        (found, _) => Ok(found.is_ok_and(|found| found.is_file())),
    }
}
