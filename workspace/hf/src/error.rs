//! What can go wrong in this crate.

use std::path::{Path, PathBuf};

/// An error of this crate; its message is one sentence that says what, where and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file or directory is not what it should be.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// A vocabulary cannot grow as it was asked to.
    #[error("{0}")]
    Vocabulary(String),
    /// The model that was read is not one that can be computed.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
}

impl Error {
    /// For `map_err` on what a file operation returns.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
        move |source| Error::Io { path: path.to_path_buf(), source }
    }

    pub(crate) fn file(path: &Path, reason: impl Into<String>) -> Error {
        Error::File { path: path.to_path_buf(), reason: reason.into() }
    }
}
