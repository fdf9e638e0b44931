//! The errors of this crate.

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A log has an invalid line, or fewer lines than the checkpoint's steps.
    #[error("{0}")]
    Lines(String),
}
