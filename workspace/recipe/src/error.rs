//! The errors of this crate.

use std::path::Path;

use crate::KeyFault;

/// An error of this crate. Its message is one sentence with the problem, its place and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A recipe or an override is invalid: one line for each fault.
    #[error("{}", faults.iter().map(KeyFault::to_string).collect::<Vec<_>>().join("\n"))]
    Recipe {
        /// All faults; never empty.
        faults: Vec<KeyFault>,
    },
    /// The shape of the model is invalid.
    #[error(transparent)]
    Hf(#[from] moh_hf::Error),
}

impl Error {
    /// Returns the error of a recipe at `path` that is invalid at `key` or, if `key` is empty, as a whole.
    pub fn at_key(path: &Path, key: &str, reason: String) -> Self {
        let origin = path.display().to_string();
        Error::Recipe {
            faults: vec![KeyFault { origin, key: key.to_owned(), value: None, reason }],
        }
    }
}
