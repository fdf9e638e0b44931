//! Errors of token files, tokenizers and their inputs. Each message names the file, states the
//! problem and, where possible, the remedy.

use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
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
    /// A token id outside the model's vocabulary.
    #[error(
        "{}: token {position} has the id {id}, outside the vocabulary of {vocabulary}: \
         use the tokenizer that the file was prepared with, or prepare the text again",
        path.display()
    )]
    Vocabulary {
        /// The `.bin` file.
        path: PathBuf,
        /// Position of the token in the whole file, counted from 0.
        position: u64,
        /// The id in the file.
        id: i64,
        /// The number of valid ids.
        vocabulary: u64,
    },
    /// A read beyond the end of a token file.
    #[error(
        "{}: cannot read tokens {start}..{end}: the file has {tokens}", path.display()
    )]
    Range {
        /// The `.bin` file.
        path: PathBuf,
        /// First position of the read.
        start: u64,
        /// End of the read, exclusive.
        end: u64,
        /// Tokens in the file.
        tokens: u64,
    },
    /// A token file prepared with another tokenizer.
    #[error(
        "{}: prepared with another tokenizer than {}: {difference}: use the tokenizer of the token file, \
         prepare the text again with this one, or accept it with --allow-other-tokenizer if it gives the \
         same ids on a sample of the file",
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
    /// A tokenizer that cannot be read or run.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// An input line that is not a document.
    #[error("{}:{line}: {reason}", path.display())]
    Line {
        /// The input file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// The problem.
        reason: String,
    },
    /// An output that already exists.
    #[error("{}: already exists: choose another name, or replace it with --force", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// A token file that would be written and read at the same time.
    #[error("{}: is both an input and an output: choose another output", path.display())]
    InputAsOutput {
        /// The token file's prefix.
        path: PathBuf,
    },
    /// Token files that cannot be one.
    #[error(
        "{}: cannot be merged with {}: {difference}: prepare the text of one of them as that of the other",
        path.display(), first.display()
    )]
    Different {
        /// The token file's prefix.
        path: PathBuf,
        /// The other one.
        first: PathBuf,
        /// What the token file has otherwise than the other one.
        difference: String,
    },
    /// No input, or inputs without text.
    #[error("{reason}")]
    Empty {
        /// What is missing.
        reason: String,
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
    /// An invalid weight of a mixture.
    #[error("{}: weight {weight}: {reason}", path.display())]
    Weight {
        /// The source's prefix.
        path: PathBuf,
        /// The weight.
        weight: f64,
        /// What was expected.
        reason: &'static str,
    },
    /// An argument out of range.
    #[error("{name} = {value}: {reason}")]
    Argument {
        /// The argument.
        name: &'static str,
        /// Its value.
        value: u64,
        /// What was expected.
        reason: String,
    },
}

impl Error {
    /// For `map_err`: adds the path and the action to an I/O error.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, action, source }
    }

    /// The same error, with the user's name of the windows' length: an option, or a key.
    pub fn with_length(mut self, name: impl Into<String>) -> Self {
        if let Self::TooShort { length, .. } = &mut self {
            *length = name.into();
        }
        self
    }

    /// An invalid token file.
    pub(crate) fn token_file(path: &Path, reason: impl Into<String>) -> Self {
        Self::TokenFile { path: path.to_path_buf(), reason: reason.into() }
    }
}
