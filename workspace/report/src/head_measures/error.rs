//! The errors of measuring heads.

/// An error of measuring heads; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// The model could not be read or run.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
    /// A text or a sentence cannot be measured.
    #[error("{0}")]
    Invalid(String),
}
