//! The names of checkpoints below a directory.

use std::path::{Path, PathBuf};

use moh_files::TEMPORARY;

use crate::Error;
use moh_files::unless_missing;

/// Prefix of the names of checkpoints whose bytes are wrong.
pub(crate) const DAMAGED: &str = "damaged-step-";

/// Prefix of the names of checkpoints after the step from which the run resumed.
pub(crate) const ASIDE: &str = "aside-step-";

/// The checkpoints below a directory, a run's: `checkpoints/step-N`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointDirectory {
    root: PathBuf,
}

impl CheckpointDirectory {
    /// The paths below `root`; accesses no file.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        CheckpointDirectory { root: root.into() }
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of all checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// The checkpoint after `step` steps over all stages.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints().join(format!("step-{step}"))
    }

    /// Steps of the complete checkpoints, ascending.
    pub fn checkpoint_steps(&self) -> Result<Vec<u64>, Error> {
        let directory = self.checkpoints();
        let entries = unless_missing(&directory, std::fs::read_dir(&directory))?;
        let mut steps = Vec::new();
        for entry in entries.into_iter().flatten() {
            let name = entry.map_err(moh_files::io(&directory))?.file_name();
            let step = name.to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok());
            // Only the spelling of `checkpoint`: no sign, no leading zero.
            steps.extend(step.filter(|&step: &u64| name == *format!("step-{step}")));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Whether there is a checkpoint, good or damaged, by its name.
    pub fn has_names(&self) -> Result<bool, Error> {
        let directory = self.checkpoints();
        let is_one = |name: &str| name.starts_with("step-") || name.starts_with(DAMAGED);
        let entries = unless_missing(&directory, std::fs::read_dir(&directory))?;
        Ok(entries
            .into_iter()
            .flatten()
            .any(|entry| entry.is_ok_and(|entry| entry.file_name().to_str().is_some_and(is_one))))
    }
}

/// Whether this is the name of a checkpoint that was being written or removed.
pub(crate) fn is_unfinished_checkpoint(name: &str) -> bool {
    let rest = name.strip_prefix(TEMPORARY);
    rest.is_some_and(|rest| rest.starts_with("step-") || rest.starts_with("removed-step-"))
}
