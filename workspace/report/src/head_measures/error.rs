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
    /// An argument cannot be used.
    #[error("{reason}")]
    Argument {
        /// What is wrong with it.
        reason: String,
    },
    /// The token file could not be read.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
    /// The tokenizer failed.
    #[error(transparent)]
    Text(#[from] moh_text::Error),
}
