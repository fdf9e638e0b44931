//! What can go wrong in this crate.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::recipe::Fault;

/// An error of this crate; its message says what, where and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A recipe, or an override of it, is wrong: one line for each fault.
    #[error("{}", lines(faults))]
    Recipe {
        /// Everything that is wrong with it; never empty.
        faults: Vec<Fault>,
    },
    /// A run directory was started with another recipe.
    #[error(
        "{}: this run was started with another recipe, and would not continue as it began:\n{}\n\
         give it the recipe it was started with, or another run.dir",
        path.display(), lines(changes)
    )]
    RecipeChanged {
        /// The recipe that the run directory holds.
        path: PathBuf,
        /// The keys that differ; never empty.
        changes: Vec<KeyChange>,
    },
    /// Another process trains in this run directory.
    #[error("{}: another process is training in this run directory", path.display())]
    Locked {
        /// The run directory.
        path: PathBuf,
    },
    /// A line of a metrics file is not what the trainer writes.
    #[error("{}:{line}: {reason}", path.display())]
    MetricsLine {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// What is wrong in it.
        reason: String,
    },
    /// A metrics file holds fewer steps than its checkpoint.
    #[error(
        "{}: holds {found} complete lines, and the checkpoint was made at step {expected}: \
         restore the file, or continue from an earlier checkpoint", path.display()
    )]
    MetricsShort {
        /// The file.
        path: PathBuf,
        /// Complete lines in it.
        found: u64,
        /// Steps that it should hold.
        expected: u64,
    },
    /// The model's configuration is wrong.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
}

impl Error {
    /// An input or output error at `path`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }
}

/// A key whose value differs between two recipes; `None` where one of them lacks it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyChange {
    /// The full key, stages by name.
    pub key: String,
    /// The value that the run was started with.
    pub before: Option<String>,
    /// The value asked for now.
    pub now: Option<String>,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".to_string());
        let (before, now) = (value(&self.before), value(&self.now));
        write!(f, "  {}: was {before}, now {now}", self.key)
    }
}

fn lines<T: fmt::Display>(items: &[T]) -> String {
    let lines: Vec<String> = items.iter().map(T::to_string).collect();
    lines.join("\n")
}
