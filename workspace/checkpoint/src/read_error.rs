//! Reasons why a checkpoint cannot be used, and whether its bytes are proven to be wrong.

use std::io::{self, ErrorKind};
use std::path::Path;

use crate::Error;

/// A reason not to use a checkpoint. Only damage on the disk is a reason to use an older checkpoint: after any
/// other failure the checkpoint may be good, and the run must not lose it.
#[derive(Debug)]
pub enum ReadError {
    /// A hash, a length or content is wrong.
    Damaged(Error),
    /// A file is missing on this rank. If all ranks miss it, the checkpoint is damaged.
    Missing(Error),
    /// The state of the bytes is unknown: they cannot be read, or another version wrote them.
    Unusable(Error),
}

impl ReadError {
    /// Creates the error of a damaged file at `path`.
    pub(super) fn damaged(path: &Path, reason: impl Into<String>) -> ReadError {
        ReadError::Damaged(moh_files::unusable(path, reason).into())
    }

    /// Creates the error of a file at `path` that cannot be used here.
    pub(super) fn unusable(path: &Path, reason: impl Into<String>) -> ReadError {
        moh_files::unusable(path, reason).into()
    }

    /// Classifies an I/O error of the file at `path`, for `map_err`.
    pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> ReadError + '_ {
        |error| {
            let kind = error.kind();
            let error = moh_files::io(path)(error).into();
            match kind {
                ErrorKind::NotFound => ReadError::Missing(error),
                ErrorKind::UnexpectedEof => ReadError::Damaged(error),
                _ => ReadError::Unusable(error),
            }
        }
    }
}

impl From<moh_model::Error> for ReadError {
    fn from(error: moh_model::Error) -> ReadError {
        ReadError::Unusable(error.into())
    }
}

impl From<moh_files::FileError> for ReadError {
    fn from(error: moh_files::FileError) -> ReadError {
        ReadError::Unusable(error.into())
    }
}

impl From<Error> for ReadError {
    fn from(error: Error) -> ReadError {
        ReadError::Unusable(error)
    }
}

impl From<ReadError> for Error {
    fn from(error: ReadError) -> Error {
        match error {
            ReadError::Damaged(error) | ReadError::Missing(error) | ReadError::Unusable(error) => {
                error
            }
        }
    }
}
