//! What can go wrong in this crate.

use std::path::{Path, PathBuf};

/// An error of this crate; its message is one sentence that says what, where and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory is not what it should be.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// An option does not fit the model.
    #[error("{0}")]
    Option(String),
    /// The caller's progress function asked to stop; nothing was written.
    #[error("interrupted: nothing was written")]
    Interrupted,
    /// A model could not be read or written.
    #[error(transparent)]
    Hf(#[from] moh_hf::Error),
    /// The model cannot be computed, or has no such heads.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
}

impl Error {
    pub(crate) fn file(path: &Path, reason: impl Into<String>) -> Error {
        Error::File { path: path.to_path_buf(), reason: reason.into() }
    }
}
