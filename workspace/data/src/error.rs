//! What can go wrong with token files, tokenizers and their inputs. Each message names the file,
//! says what was found, and where it helps what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused to read or write a file.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried: "read", "write", ...
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// A `.bin`, `.idx` or `.json` that is not a sound token file.
    #[error("{}: not a usable token file: {reason}", path.display())]
    TokenFile {
        /// The file at fault.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A token id that the model has no embedding for.
    #[error(
        "{}: token {position} has the id {id}, outside the vocabulary of {vocabulary}: \
         use the tokenizer that the file was prepared with, or prepare the text again",
        path.display()
    )]
    Vocabulary {
        /// The `.bin` file.
        path: PathBuf,
        /// Position of the token, counted over the whole file from 0.
        position: u64,
        /// The id that was found.
        id: i64,
        /// The number of ids allowed.
        vocabulary: u64,
    },
    /// Positions beyond the end of a token file were asked for.
    #[error(
        "{}: tokens {start}..{end} were asked for, the file holds {tokens}", path.display()
    )]
    Range {
        /// The `.bin` file.
        path: PathBuf,
        /// First position asked for.
        start: u64,
        /// One past the last position asked for.
        end: u64,
        /// Tokens in the file.
        tokens: u64,
    },
    /// A token file that was prepared with another tokenizer than the one in use.
    #[error(
        "{}: prepared with another tokenizer (hash {recorded}) than {} (hash {found}): use the \
         tokenizer of the token file, or prepare the text again with this one",
        path.display(), tokenizer.display()
    )]
    TokenizerMismatch {
        /// The `.json` beside the token file.
        path: PathBuf,
        /// The tokenizer in use.
        tokenizer: PathBuf,
        /// The hash that the token file records.
        recorded: String,
        /// The hash of the tokenizer in use.
        found: String,
    },
    /// A tokenizer that cannot be read, or that failed on a text.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A line of an input that is not a document.
    #[error("{}:{line}: {reason}", path.display())]
    Line {
        /// The input file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// A text file that is not UTF-8.
    #[error(
        "{}: not UTF-8 at byte {offset}: convert it to UTF-8 first, for example with iconv",
        path.display()
    )]
    NotUtf8 {
        /// The input file.
        path: PathBuf,
        /// Offset of the first byte that does not belong.
        offset: u64,
    },
    /// An output that is already there.
    #[error("{}: exists already: choose another name, or overwrite it with --force", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// An output that would overwrite one of the inputs.
    #[error("{}: is an input and an output at once: choose another output", path.display())]
    OverwritesInput {
        /// The file.
        path: PathBuf,
    },
    /// Nothing to work on: no input, or inputs without text.
    #[error("{reason}")]
    Empty {
        /// What is missing.
        reason: String,
    },
    /// A token file that is shorter than one window.
    #[error(
        "{}: holds {tokens} tokens, one window needs {needed}: add text, or shorten the sequence",
        path.display()
    )]
    TooShort {
        /// The token file's prefix.
        path: PathBuf,
        /// Tokens in the file.
        tokens: u64,
        /// Tokens of one window.
        needed: u64,
    },
    /// A weight of a mixture that cannot be honoured.
    #[error("{}: weight {weight}: {reason}", path.display())]
    Weight {
        /// The source's prefix.
        path: PathBuf,
        /// The weight.
        weight: f64,
        /// What was expected.
        reason: &'static str,
    },
    /// An argument outside its limits.
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
    /// A closure for `map_err` that adds the path and the action to an I/O error.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, action, source }
    }

    /// A fault in a token file.
    pub(crate) fn token_file(path: &Path, reason: impl Into<String>) -> Self {
        Self::TokenFile { path: path.to_path_buf(), reason: reason.into() }
    }
}
