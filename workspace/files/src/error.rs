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

/// For `map_err`: adds the path to an I/O error.
pub fn io(path: &Path) -> impl Fn(io::Error) -> FileError + use<> {
    let path = path.to_path_buf();
    move |source| FileError::Io { path: path.clone(), source }
}

/// The error of a file that cannot be used.
pub fn unusable(path: &Path, reason: impl Into<String>) -> FileError {
    FileError::Unusable { path: path.to_path_buf(), reason: reason.into() }
}

/// The value of an operation on `path`; `None` if there is nothing at `path`.
pub fn unless_missing<T>(path: &Path, result: io::Result<T>) -> Result<Option<T>, FileError> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some).map_err(io(path)),
    }
}
