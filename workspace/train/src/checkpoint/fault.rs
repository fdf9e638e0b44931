//! Why a checkpoint cannot be used, and whether its bytes are proven to be wrong.

use std::io::{self, ErrorKind};
use std::path::Path;

use crate::Error;

/// A reason not to use a checkpoint. Only damage on the disk is a reason to use an older one: after a
/// failure of any other kind the checkpoint may be good, and the run must not lose it.
#[derive(Debug)]
pub(crate) enum Fault {
    /// A hash, a length or a content is wrong.
    Damaged(Error),
    /// A file is missing here. It is damage if all ranks miss it.
    Missing(Error),
    /// Nothing is known of the bytes: they cannot be read, or another version wrote them.
    Unusable(Error),
}

impl Fault {
    /// For `map_err`: classifies an I/O error of the file at `path`.
    pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> Fault + '_ {
        |error| {
            let kind = error.kind();
            let error = Error::io(path)(error);
            match kind {
                ErrorKind::NotFound => Fault::Missing(error),
                ErrorKind::UnexpectedEof => Fault::Damaged(error),
                _ => Fault::Unusable(error),
            }
        }
    }
}

impl From<moh_model::Error> for Fault {
    fn from(error: moh_model::Error) -> Fault {
        Fault::Unusable(error.into())
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Unusable(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        match fault {
            Fault::Damaged(error) | Fault::Missing(error) | Fault::Unusable(error) => error,
        }
    }
}
