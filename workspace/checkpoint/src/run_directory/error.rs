//! The errors of this crate.

use std::fmt;
use std::path::PathBuf;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// The recipe differs from the one the run directory was started with.
    #[error(
        "{}: the recipe differs from the run's, and resuming would change results:\n{}\n\
         use the recipe that the run was started with, or {}",
        path.display(), lines(changes), other_run(another.as_deref())
    )]
    RecipeChanged {
        /// The recipe in the run directory.
        path: PathBuf,
        /// The keys that differ; never empty.
        changes: Vec<KeyChange>,
        /// The command of another run that starts from this one's newest checkpoint.
        another: Option<String>,
    },
    /// The run directory has files that no run has written.
    #[error(
        "{}: is not a run directory, and holds {found}: a run takes a directory that is new, empty or its own, \
         so choose another one, such as --set run.dir={}",
        path.display(), instead.display()
    )]
    NotARun {
        /// The directory.
        path: PathBuf,
        /// Some of its files.
        found: String,
        /// Another directory.
        instead: PathBuf,
    },
    /// The run directory is a file, or a link that leads to no directory.
    #[error(
        "{}: run.dir is {what}: choose a directory that is new or a run's, such as --set run.dir={}",
        path.display(), instead.display()
    )]
    NotADirectory {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: String,
        /// Another directory.
        instead: PathBuf,
    },
    /// A new run would write beside or among what it reads.
    #[error(
        "{}: run.dir {relation} {}, which {key} names and no run may change: choose another run.dir",
        path.display(), input.display()
    )]
    HoldsInput {
        /// The run directory.
        path: PathBuf,
        /// How it lies to the input.
        relation: &'static str,
        /// The input's key in the recipe.
        key: String,
        /// The input.
        input: PathBuf,
    },
    /// A stage is longer than in the run's recipe, but it is over.
    #[error(
        "{}: stage.{stage}.tokens: was {before}, now {now}: at step {step} the stage is over, and only a \
         stage that is not, or the last one, can grow: set it back to {before}",
        path.display()
    )]
    StageOver {
        /// The recipe in the run directory.
        path: PathBuf,
        /// The stage.
        stage: String,
        /// Its tokens in the run's recipe.
        before: u64,
        /// Its tokens in the recipe to resume with.
        now: u64,
        /// Steps done, over all stages.
        step: u64,
    },
    /// Another process trains in this run directory.
    #[error(
        "{}: another process trains in this run directory: wait for it, or use another run.dir",
        path.display()
    )]
    Locked {
        /// The run directory.
        path: PathBuf,
    },
    /// A run has no checkpoint whose bytes are good.
    #[error(
        "{}: no checkpoint is good: moh-train checkpoints RUN verify names the damage",
        path.display()
    )]
    NoGoodCheckpoint {
        /// The directory of checkpoints.
        path: PathBuf,
    },
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
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".to_string());
        let (before, now) = (value(&self.before), value(&self.now));
        write!(f, "  {}: was {before}, now {now}", self.key)
    }
}

/// How another run is begun.
fn other_run(command: Option<&str>) -> String {
    match command {
        Some(command) => {
            format!("begin another run from this one's newest checkpoint:\n  {command}")
        }
        None => "another run.dir".to_owned(),
    }
}

fn lines<T: fmt::Display>(items: &[T]) -> String {
    let lines: Vec<String> = items.iter().map(T::to_string).collect();
    lines.join("\n")
}
