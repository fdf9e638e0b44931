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
    /// The counts of shared and routed heads do not fit the model.
    #[error("{reason}")]
    Moh {
        /// What is wrong.
        reason: String,
    },
    /// An operator refused its input.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
}
