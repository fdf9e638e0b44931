//! What can go wrong in this crate.

use std::path::PathBuf;

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
    /// A file was read and is not what it should be.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong in it, and what was expected.
        reason: String,
    },
    /// The model could not be read or run.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
    /// The token file could not be read.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
}
