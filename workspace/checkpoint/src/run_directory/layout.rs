//! The run directory: its layout, its lock and its files. Ownership of the directory is in `ownership.rs`, and the
//! recipe, with the changes that a resumed run may make, in `stored_recipe.rs`.

mod ownership;
mod stored_recipe;

use std::path::{Path, PathBuf};

use crate::StoredCheckpoint;
use crate::listing::{DAMAGED, complete_step, names};
use crate::run_log::Summary;
use moh_files::first_free_suffixed;
use moh_hf::ConfigFile;
use moh_recipe::{DistillOptions, Recipe, Stage};
pub use ownership::join_names;
pub use stored_recipe::{KeyChange, changes, leaves};

use crate::run_directory::RunLock;
use crate::run_directory::checkpoint_name::config_file;
use crate::{Error, Result};
use moh_files::unless_missing;

/// Prefix of the names of a calibration's files.
pub(crate) const CALIBRATION: &str = "calibration-step-";

/// Prefix of the names of exports that held other files when the run wrote a new export.
const EXPORT_BEFORE: &str = "export-before-step-";

/// The directory of the tokenizer among the model's files that a run keeps.
pub const TOKENIZER: &str = "tokenizer";

/// The paths of a run directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDirectory {
    root: PathBuf,
}

/// Defines the paths of a run directory that have a fixed name.
macro_rules! paths {
    ($($(#[$doc:meta])+ $method:ident: $name:literal,)+) => {
        impl RunDirectory {
            $($(#[$doc])+
            pub fn $method(&self) -> PathBuf {
                self.root.join($name)
            })+
        }
    };
}

paths! {
    /// The resolved recipe.
    recipe: "recipe.toml",
    /// The content of the run's inputs.
    inputs: "inputs.json",
    /// The machine on which the run trains.
    machine: "machine.json",
    /// The model's files that resuming needs in addition to a checkpoint: configuration, tokenizers and files
    /// that an export copies.
    model: "model",
    /// The metrics, one JSON object per step.
    metrics: "metrics.jsonl",
    /// The routing of each evaluation.
    routing: "routing.jsonl",
    /// The directory of all checkpoints.
    checkpoints: "checkpoints",
    /// The chart of the losses that `moh-report` draws.
    picture: "run.svg",
    /// TensorBoard's event files.
    tensorboard: "tensorboard",
    /// A file that records that a checkpoint was completed. A run with this file does not start over when
    /// all of its checkpoints are gone.
    marker: "has-checkpoints",
    /// The stages that have become longer.
    growth: "growth.jsonl",
    /// The model in Hugging Face layout after the last stage.
    export: "export",
    /// The results of a finished run.
    summary: "summary.json",
}

impl RunDirectory {
    /// Returns the paths below `root`. Accesses no file.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        RunDirectory { root: root.into() }
    }

    /// Returns the directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory of the tokenizer with which the run trains, or `None` if it has no tokenizer.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        let places = [self.model().join(TOKENIZER), self.model()];
        places.into_iter().find(|place| place.join("tokenizer.json").is_file())
    }

    /// Returns whether the run can be resumed without the model of `recipe`. The run must have completed a checkpoint,
    /// which replaces the initial weights, and keep the model's other files. The recipe must name the same model. No
    /// stage may still [learn from the initial weights](moh_recipe::DistillOptions).
    pub fn keeps_model(&self, recipe: &Recipe) -> Result<bool> {
        let is_kept = self.model().is_dir() && self.inputs().is_file();
        if !is_kept || !self.is_run()? || !self.has_completed_work()? {
            return Ok(false);
        }
        let stored = self.stored_recipe()?;
        let teaches = |stage: &Stage| stage.distill.as_ref().is_some_and(DistillOptions::is_start);
        let is_done =
            || Ok::<_, Error>(self.is_finished()? && recipe.num_steps() <= stored.num_steps());
        if recipe.stages.iter().any(teaches) && !is_done()? {
            return Ok(false);
        }
        let (stored, now) = (stored.model, &recipe.model);
        Ok((&stored.from, &stored.revision, &stored.tokenizer)
            == (&now.from, &now.revision, &now.tokenizer))
    }

    /// Returns the checkpoint after `step` steps, without reading its tensors.
    pub fn stored(&self, step: u64) -> Result<StoredCheckpoint> {
        StoredCheckpoint::of_step(self, step)
    }

    /// Returns the checkpoint after `step` steps, and the model's configuration in it.
    pub fn stored_model(&self, step: u64) -> Result<(StoredCheckpoint, ConfigFile)> {
        let stored = self.stored(step)?;
        let file = config_file(&stored, &self.checkpoint(step))?;
        // Checked before the caller allocates memory for a configuration of other sizes.
        stored.check_size(&file.config)?;
        Ok((stored, file))
    }

    /// Returns the path of the checkpoint after `step` steps over all stages.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints().join(format!("step-{step}"))
    }

    /// Returns a free name for an export with other files, before the export of `step` is written.
    pub fn export_aside(&self, step: u64) -> PathBuf {
        first_free_suffixed(|suffix| self.root.join(format!("{EXPORT_BEFORE}{step}{suffix}")))
    }

    /// Returns the path of the results of a calibration after `step` steps over all stages.
    pub fn calibration(&self, step: u64) -> PathBuf {
        self.root.join(format!("{CALIBRATION}{step}.json"))
    }

    /// Returns the path of the layers that a calibration has found, with output projections and router matrices.
    pub fn calibrated_layers(&self, step: u64) -> PathBuf {
        self.root.join(format!("{CALIBRATION}{step}.layers"))
    }

    /// Returns the path of a step's timeline. The step counts over all stages. `rank` is given if there are several.
    pub fn trace(&self, step: u64, rank: Option<usize>) -> PathBuf {
        let rank = rank.map_or_else(String::new, |rank| format!("-rank-{rank}"));
        self.root.join(format!("trace-step-{step}{rank}.json"))
    }

    /// Creates the directory if it is missing, and locks it against other processes. The caller has
    /// [checked](Self::check) that the run may use it.
    pub fn lock(&self) -> Result<RunLock> {
        std::fs::create_dir_all(&self.root).map_err(moh_files::io(&self.root))?;
        RunLock::acquire(&self.root)
    }

    /// Returns the steps of the complete checkpoints, ascending.
    pub fn checkpoint_steps(&self) -> Result<Vec<u64>> {
        let names = names(&self.checkpoints())?;
        let mut steps: Vec<u64> = names.iter().filter_map(|name| complete_step(name)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    pub(crate) fn no_good_checkpoint(&self) -> Error {
        let reason = "no checkpoint is good: moh-train checkpoints RUN verify names the damage";
        moh_files::unusable(&self.checkpoints(), reason).into()
    }

    /// Returns whether the run has ever completed a checkpoint or finished: its marker, its summary or a
    /// checkpoint, good or damaged, exists.
    pub fn has_completed_work(&self) -> Result<bool> {
        let exists = |path: PathBuf| path.symlink_metadata().is_ok();
        if [self.marker(), self.summary()].into_iter().any(exists) {
            return Ok(true);
        }
        self.has_names()
    }

    /// Returns whether a name of a checkpoint, good or damaged, exists.
    pub(crate) fn has_names(&self) -> Result<bool> {
        let is_one = |name: &String| name.starts_with("step-") || name.starts_with(DAMAGED);
        Ok(names(&self.checkpoints())?.iter().any(is_one))
    }

    /// Writes the marker, if it is missing.
    pub fn mark(&self) -> Result<()> {
        const TEXT: &str = "This run has completed a checkpoint. Where all of its checkpoints are gone, \
                            it begins anew only with --begin-anew.\n";
        let path = self.marker();
        match path.is_file() {
            true => Ok(()),
            false => Ok(moh_files::write(&path, TEXT.as_bytes()).map_err(moh_files::io(&path))?),
        }
    }

    /// Returns whether the run has finished: it has a summary and an export.
    pub fn is_finished(&self) -> Result<bool> {
        let has_summary = Summary::read(&self.summary())?.is_some();
        Ok(has_summary && self.export().join("config.json").is_file())
    }

    /// Removes the summary of a run that continues: the summary would mark the run as finished.
    pub fn remove_summary(&self) -> Result<()> {
        let path = self.summary();
        unless_missing(&path, std::fs::remove_file(&path))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
