//! The errors of this crate.

use std::fmt;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory could not be read or written, or a run cannot use it.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A recipe is invalid.
    #[error(transparent)]
    Recipe(#[from] moh_recipe::Error),
    /// A checkpoint is missing or damaged, or cannot be read.
    #[error(transparent)]
    Checkpoint(crate::Error),
    /// A file of the run's logs cannot be read or written.
    #[error(transparent)]
    RunLog(#[from] crate::run_log::Error),
    /// Another rank failed, or the device.
    #[error(transparent)]
    Step(#[from] moh_step::Error),
    /// The configuration of a model cannot be used, or the export cannot be read.
    #[error(transparent)]
    Hf(#[from] moh_hf::Error),
}

/// An error of another rank is [`Error::Step`], wherever it was met.
impl From<crate::Error> for Error {
    fn from(error: crate::Error) -> Self {
        match error {
            crate::Error::Step(error) => Error::Step(error),
            error => Error::Checkpoint(error),
        }
    }
}

/// A key whose value differs between two recipes; `None` where a recipe lacks it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyChange {
    /// The full key, stages by name.
    pub key: String,
    /// The value in the run's recipe.
    pub before: Option<String>,
    /// The new value.
    pub now: Option<String>,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [before, now] =
            [&self.before, &self.now].map(|value| value.as_deref().unwrap_or("absent"));
        write!(f, "  {}: was {before}, now {now}", self.key)
    }
}
