//! The errors of this crate.

use std::path::Path;

/// An error of this crate. Its message is one sentence: the problem, the place, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// The model is invalid.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
    /// The caller stopped a download.
    #[error("stopped: the same command resumes the download")]
    Stopped,
    /// The hub did not provide the model or the dataset.
    #[error("{id}: {reason}")]
    Hub {
        /// The hub id of the model or dataset.
        id: String,
        /// The cause and the remedy.
        reason: String,
    },
}

impl Error {
    /// Adds the path to an I/O error, for `map_err`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
        move |source| moh_files::io(path)(source).into()
    }

    pub(crate) fn file(path: &Path, reason: impl Into<String>) -> Error {
        moh_files::unusable(path, reason).into()
    }

    #[cfg(feature = "hub")]
    pub(crate) fn hub(id: &str, reason: impl Into<String>) -> Error {
        Error::Hub { id: id.to_string(), reason: reason.into() }
    }
}
