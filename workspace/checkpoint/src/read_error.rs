//! Why a checkpoint cannot be used, and whether its bytes are proven to be wrong.

use std::io::{self, ErrorKind};
use std::path::Path;

use crate::Error;

/// A reason not to use a checkpoint. Only damage on the disk is a reason to use an older one: after a
/// failure of any other kind the checkpoint may be good, and the run must not lose it.
#[derive(Debug)]
pub enum ReadError {
    /// A hash, a length or a content is wrong.
    Damaged(Error),
    /// A file is missing here. It is damage if all ranks miss it.
    Missing(Error),
    /// Nothing is known of the bytes: they cannot be read, or another version wrote them.
    Unusable(Error),
}

impl ReadError {
    /// What is wrong with the bytes of the file at `path`.
    pub(super) fn damaged(path: &Path, reason: impl Into<String>) -> ReadError {
        ReadError::Damaged(moh_files::unusable(path, reason).into())
    }

    /// Why the file at `path` is of no use here.
    pub(super) fn unusable(path: &Path, reason: impl Into<String>) -> ReadError {
        moh_files::unusable(path, reason).into()
    }

    /// For `map_err`: classifies an I/O error of the file at `path`.
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
