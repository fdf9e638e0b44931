//! The errors of this crate.

use std::fmt;
use std::path::PathBuf;

use crate::KeyFault;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A recipe or an override is invalid: one line for each fault.
    #[error("{}", lines(faults))]
    Recipe {
        /// All faults; never empty.
        faults: Vec<KeyFault>,
    },
    /// The model differs from the recipe.
    #[error("{}: {key}: {reason}", path.display())]
    ModelDiffers {
        /// The recipe.
        path: PathBuf,
        /// The key that differs from the model.
        key: String,
        /// The difference.
        reason: String,
    },
    /// The shape of the model is invalid.
    #[error(transparent)]
    Hf(#[from] moh_hf::Error),
}

fn lines<T: fmt::Display>(items: &[T]) -> String {
    let lines: Vec<String> = items.iter().map(T::to_string).collect();
    lines.join("\n")
}
