//! The errors of this crate.

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the tokenizer could not be read, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A token file or a tokenizer's file could not be read.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
    /// A token file of another tokenizer, or a value that is no conversation or does not suit the template.
    #[error("{0}")]
    Invalid(String),
}
