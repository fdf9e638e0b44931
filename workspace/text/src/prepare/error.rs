//! The errors of this crate.

use std::fmt;
use std::path::Path;

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A token file could not be read or written.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
    /// A tokenizer or a chat template cannot be used.
    #[error(transparent)]
    Text(#[from] crate::Error),
    /// Hugging Face's hub did not provide a dataset or a file of one.
    #[error(transparent)]
    Hub(#[from] moh_hf::hub::Error),
    /// The caller stopped the preparation.
    #[error("stopped: the same call continues")]
    Interrupted,
    /// A record is not a document, nothing is there to be prepared, or an option does not fit.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// Whether the same call may succeed when a network or a disk is back, so that nothing is thrown away.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Error::Hub(_))
    }

    /// A file that cannot be used as it is.
    pub(crate) fn unusable(path: &Path, reason: impl Into<String>) -> Self {
        moh_files::unusable(path, reason).into()
    }
}

/// A place in an input, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A line.
    Line(u64),
    /// A row of a table, or an element of a JSON array.
    Row(u64),
    /// The whole input, as of plain text.
    Whole,
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(line) => write!(out, ":{line}"),
            Place::Row(row) => write!(out, ": row {row}"),
            Place::Whole => Ok(()),
        }
    }
}
