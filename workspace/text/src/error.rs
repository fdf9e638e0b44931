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
    /// A token file or a tokenizer's file could not be read.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
    /// A tokenizer that cannot be read or run.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A token file prepared with another tokenizer.
    #[error(
        "{}: prepared with another tokenizer than {}: {difference}: use the tokenizer of the token file, \
         prepare the text again with this one, or accept it, if it gives the same ids on a sample of the file, \
         with --allow-other-tokenizer, or for all programs with moh-data accept",
        path.display(), tokenizer.display()
    )]
    TokenizerMismatch {
        /// The `.json` beside the token file.
        path: PathBuf,
        /// The tokenizer in use.
        tokenizer: PathBuf,
        /// What the tokenizer in use has otherwise.
        difference: String,
    },
    /// A tokenizer that gives other ids than a token file has.
    #[error(
        "{}: does not give the ids of {}: {place}: use the tokenizer of the token file, or prepare the \
         text again with this one",
        tokenizer.display(), prefix.display()
    )]
    OtherIds {
        /// The token file.
        prefix: PathBuf,
        /// The tokenizer in use.
        tokenizer: PathBuf,
        /// Where.
        place: String,
    },
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
