//! Errors of token files, tokenizers and their inputs. Each message names the file, states the
//! problem and, where possible, the remedy.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of a tokenizer could not be read, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// An I/O error of a file.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The attempted action: "read", "write", ...
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A `.bin`, `.idx` or `.json` that is not a valid token file.
    #[error("{}: not a valid token file: {reason}", path.display())]
    TokenFile {
        /// The invalid file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// An output that already exists.
    #[error("{}: already exists: choose another name, or replace it with --force", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// A token file shorter than one window.
    #[error(
        "{}: has {tokens} tokens, one window needs {needed}: add text, or lower {length}",
        path.display()
    )]
    TooShort {
        /// The token file's prefix.
        path: PathBuf,
        /// Tokens in the file.
        tokens: u64,
        /// Tokens of one window.
        needed: u64,
        /// The name of the windows' length.
        length: String,
    },
    /// Files, tokens or arguments cannot be used.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// Returns a function for `map_err` that adds the path and the action to an I/O error.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, action, source }
    }

    /// Sets the name of the windows' length that the user knows: an option, or a key.
    pub fn with_length(mut self, name: impl Into<String>) -> Self {
        if let Self::TooShort { length, .. } = &mut self {
            *length = name.into();
        }
        self
    }

    pub(crate) fn token_file(path: &Path, reason: impl Into<String>) -> Self {
        Self::TokenFile { path: path.to_path_buf(), reason: reason.into() }
    }

    pub(crate) fn argument(name: &str, value: u64, reason: impl Display) -> Self {
        Self::Invalid(format!("{name} = {value}: {reason}"))
    }

    /// Creates the error of a token id outside the model's vocabulary. `position` counts in the whole file `path`.
    pub(crate) fn outside_vocabulary(path: &Path, position: u64, id: i64, vocabulary: u64) -> Self {
        Self::Invalid(format!(
            "{}: token {position} has the id {id}, outside the vocabulary of {vocabulary}: if it is a token of the \
             model's tokenizer, for which the model has no row, give it one with moh-convert --tokenizer, and otherwise \
             prepare the text again with that tokenizer",
            path.display()
        ))
    }
}
