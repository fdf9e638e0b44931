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
    /// A path is not what it should be.
    #[error("{}: {reason}", path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// The hub did not give the model.
    #[error("{id}: {reason}")]
    Hub {
        /// The model's hub id.
        id: String,
        /// Why not, and what to do.
        reason: String,
    },
}

impl Error {
    /// For `map_err` on what a file operation returns.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
        move |source| Error::Io { path: path.to_path_buf(), source }
    }

    pub(crate) fn file(path: &Path, reason: impl Into<String>) -> Error {
        Error::File { path: path.to_path_buf(), reason: reason.into() }
    }

    pub(crate) fn hub(id: &str, reason: impl Into<String>) -> Error {
        Error::Hub { id: id.to_string(), reason: reason.into() }
    }
}
