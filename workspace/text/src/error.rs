//! The errors of this crate.

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. Its message is one sentence: the problem, its place, and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the tokenizer could not be read, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A token file or a tokenizer's file could not be read.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
    /// A token file of another tokenizer, a value that is not a conversation or does not suit the template, a record
    /// that is not a document, or an option that does not fit.
    #[error("{0}")]
    Invalid(String),
    /// Hugging Face's hub did not provide a dataset or one of its files.
    #[cfg(feature = "prepare")]
    #[error(transparent)]
    Hub(#[from] moh_hf::Error),
    /// The caller stopped a preparation.
    #[error("stopped: the same call continues")]
    Interrupted,
}

impl Error {
    /// Returns whether the same call may succeed when a network or a disk is back, so that no work is discarded.
    #[cfg(feature = "prepare")]
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Error::Hub(_))
    }

    /// Creates the error of a file that cannot be used as it is.
    #[cfg(feature = "prepare")]
    pub(crate) fn unusable(path: &std::path::Path, reason: impl Into<String>) -> Self {
        moh_files::unusable(path, reason).into()
    }
}
