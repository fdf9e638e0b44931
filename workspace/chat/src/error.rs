//! The errors of this crate.

use std::path::PathBuf;

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the tokenizer could not be read, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A template that is no Jinja, that rejects a conversation, or that does not end.
    #[error("{}: chat template: {reason}", path.display())]
    Template {
        /// The file with the template.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A value that is no conversation, or one that the template does not suit.
    #[error("{reason}")]
    Conversation {
        /// The problem.
        reason: String,
    },
}

impl Error {
    pub(crate) fn conversation(reason: impl Into<String>) -> Self {
        Self::Conversation { reason: reason.into() }
    }
}
