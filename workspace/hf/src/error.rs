//! The errors of this crate.

use std::path::{Path, PathBuf};

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file or directory is invalid.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// The problem, and what was expected.
        reason: String,
    },
    /// A vocabulary cannot grow as requested.
    #[error("{0}")]
    Vocabulary(String),
    /// The model is invalid.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
}

impl Error {
    /// For `map_err`: adds the path to an I/O error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
        move |source| Error::Io { path: path.to_path_buf(), source }
    }

    pub(crate) fn file(path: &Path, reason: impl Into<String>) -> Error {
        Error::File { path: path.to_path_buf(), reason: reason.into() }
    }
}
