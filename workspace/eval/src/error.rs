//! The errors of this crate.

use std::path::PathBuf;

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
    /// A file with invalid contents.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem, and what was expected.
        reason: String,
    },
    /// The model could not be read or run.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
    /// The token file could not be read.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
}
