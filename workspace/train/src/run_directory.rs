//! The run directory: its layout, its lock and its recipe.
//!
//! A resumed run must equal an uninterrupted one if its device is deterministic, so a directory
//! with checkpoints accepts only its own recipe. Some keys may change, because they affect no
//! weight except by the order of sums: `run.dir`, `log.*`, `checkpoint.*`, `memory.recompute`,
//! `data.validation.every_steps` (of any set) and `stage.NAME.parallel.*`. `stage.NAME.tokens` may grow
//! (`growth.rs`). The paths of token files and of the model may change too: their content is compared
//! with `inputs.json` (`run_inputs/`). `guard.patience` and `guard.rewind` may change, so that a run that
//! found nothing to return to can go on: they change what a later rewind does, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use toml::Value;

use crate::error::unless_missing;
use crate::recipe::Stage;
use crate::run_inputs::model_files::TOKENIZER;
use crate::run_lock::{HOLDER, LOCK};
use crate::{Error, KeyChange, Recipe, RunLock};

/// Keys, or prefixes of keys that end in a dot, that a resumed run may change.
const MAY_CHANGE: [&str; 7] = [
    "run.dir",
    "log.",
    "checkpoint.",
    "memory.recompute",
    "data.validation.every_steps",
    "guard.patience",
    "guard.rewind",
];

/// Prefix of the names of checkpoints that the run has left with a rewind.
pub(crate) const REWOUND: &str = "rewound-step-";

/// Begins the names of directories with what a run left after the step from which it resumed.
pub(crate) const AFTER: &str = "after-step-";

/// The paths of a run directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDirectory {
    root: PathBuf,
}

impl RunDirectory {
    /// The paths below `root`; accesses no file.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        RunDirectory { root: root.into() }
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The resolved recipe.
    pub fn recipe(&self) -> PathBuf {
        self.root.join("recipe.toml")
    }

    /// The content of the run's inputs.
    pub fn inputs(&self) -> PathBuf {
        self.root.join("inputs.json")
    }

    /// On what the run trains.
    pub fn machine(&self) -> PathBuf {
        self.root.join("machine.json")
    }

    /// What resuming needs of the run's model beside a checkpoint: configuration, tokenizers and the files
    /// that an export copies.
    pub fn model(&self) -> PathBuf {
        self.root.join("model")
    }

    /// The directory of the tokenizer with which the run trains; `None` if it has none.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        let places = [self.model().join(TOKENIZER), self.model()];
        places.into_iter().find(|place| place.join("tokenizer.json").is_file())
    }

    /// Whether the run can be resumed without the model of `recipe`: it has completed a checkpoint, so the
    /// initial weights are not needed, it keeps the model's other files, and the recipe names the same model.
    ///
    /// # Errors
    /// Fails if the stored recipe cannot be read.
    pub fn keeps_model(&self, recipe: &Recipe) -> Result<bool, Error> {
        if !self.model().is_dir() || !self.inputs().is_file() || !self.has_completed_work()? {
            return Ok(false);
        }
        let stored = Recipe::load(&self.recipe(), &[])?.model;
        let now = &recipe.model;
        Ok((&stored.from, &stored.revision, &stored.tokenizer)
            == (&now.from, &now.revision, &now.tokenizer))
    }

    /// The metrics, one JSON object per step.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// The routing of each evaluation.
    pub fn routing(&self) -> PathBuf {
        self.root.join("routing.jsonl")
    }

    /// The directory of all checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// The checkpoint after `step` steps over all stages.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints().join(format!("step-{step}"))
    }

    /// The picture of the losses, written when the run ends.
    pub fn picture(&self) -> PathBuf {
        self.root.join("run.svg")
    }

    /// TensorBoard's event files.
    pub fn tensorboard(&self) -> PathBuf {
        self.root.join("tensorboard")
    }

    /// A file that records that a checkpoint was completed: a run that has it does not start over when
    /// all of its checkpoints are gone.
    pub fn marker(&self) -> PathBuf {
        self.root.join("has-checkpoints")
    }

    /// The returns of the run to earlier steps.
    pub fn rewinds(&self) -> PathBuf {
        self.root.join("rewinds.jsonl")
    }

    /// The metrics of the steps that the run has left with a rewind.
    pub fn metrics_before_rewind(&self, number: u64) -> PathBuf {
        self.root.join(format!("metrics-before-rewind-{number}.jsonl"))
    }

    /// A checkpoint of the steps that the run has left with a rewind; removed after the next checkpoint.
    pub(crate) fn rewound_checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints().join(format!("{REWOUND}{step}"))
    }

    /// The model in Hugging Face layout after the last stage.
    pub fn export(&self) -> PathBuf {
        self.root.join("export")
    }

    /// The results of a finished run.
    pub fn summary(&self) -> PathBuf {
        self.root.join("summary.json")
    }

    /// The timeline of a step, counted over all stages; `rank` is given if there are several.
    pub fn trace(&self, step: u64, rank: Option<usize>) -> PathBuf {
        let rank = rank.map_or_else(String::new, |rank| format!("-rank-{rank}"));
        self.root.join(format!("trace-step-{step}{rank}.json"))
    }

    /// Creates the directory if it is missing and locks it against other processes.
    ///
    /// # Errors
    /// Fails if another process holds the lock, or the file system reports an error.
    pub fn lock(&self) -> Result<RunLock, Error> {
        self.lock_or_break(false)
    }

    /// As [`Self::lock`]; with `break_lock`, also where a process that holds the lock by its file, for want of
    /// locks in the file system, may be alive.
    ///
    /// # Errors
    /// As [`Self::lock`].
    pub(crate) fn lock_or_break(&self, break_lock: bool) -> Result<RunLock, Error> {
        std::fs::create_dir_all(&self.root).map_err(Error::io(&self.root))?;
        RunLock::acquire(&self.root, break_lock)
    }

    /// Steps of the complete checkpoints, ascending.
    ///
    /// # Errors
    /// Fails if the directory exists and cannot be listed.
    pub fn checkpoint_steps(&self) -> Result<Vec<u64>, Error> {
        let directory = self.checkpoints();
        let entries = unless_missing(&directory, std::fs::read_dir(&directory))?;
        let mut steps = Vec::new();
        for entry in entries.into_iter().flatten() {
            let name = entry.map_err(Error::io(&directory))?.file_name();
            let step = name.to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok());
            // Only the spelling of `checkpoint`: no sign, no leading zero.
            steps.extend(step.filter(|&step: &u64| name == *format!("step-{step}")));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Whether the run has ever completed a checkpoint, finished or returned to an earlier step: its marker,
    /// its summary or its rewinds exist, or a checkpoint, good or damaged.
    ///
    /// # Errors
    /// Fails if the directory of checkpoints exists and cannot be listed.
    pub fn has_completed_work(&self) -> Result<bool, Error> {
        let exists = |path: PathBuf| path.symlink_metadata().is_ok();
        if [self.marker(), self.summary(), self.rewinds()].into_iter().any(exists) {
            return Ok(true);
        }
        let directory = self.checkpoints();
        let is_one = |name: &str| name.starts_with("step-") || name.starts_with("damaged-step-");
        let entries = unless_missing(&directory, std::fs::read_dir(&directory))?;
        Ok(entries
            .into_iter()
            .flatten()
            .any(|entry| entry.is_ok_and(|entry| entry.file_name().to_str().is_some_and(is_one))))
    }

    /// Writes the marker, if it is missing.
    pub(crate) fn mark(&self) -> Result<(), Error> {
        const TEXT: &str = "This run has completed a checkpoint. Where all of its checkpoints are gone, \
                            it begins anew only with --begin-anew.\n";
        let path = self.marker();
        match path.is_file() {
            true => Ok(()),
            false => moh_files::write(&path, TEXT.as_bytes()).map_err(Error::io(&path)),
        }
    }

    /// Removes the marker of a run that begins again from its initial model.
    pub(crate) fn unmark(&self) -> Result<(), Error> {
        let path = self.marker();
        unless_missing(&path, std::fs::remove_file(&path))?;
        moh_files::sync_directory(&self.root).map_err(Error::io(&self.root))
    }

    /// Moves everything of an earlier run into `before-1`, or the next free number. The caller has
    /// locked the directory.
    pub(crate) fn begin_anew(&self) -> Result<(), Error> {
        let is_kept = |name: &str| [LOCK, HOLDER].contains(&name) || name.starts_with("before-");
        let mut moved = Vec::new();
        for entry in std::fs::read_dir(&self.root).map_err(Error::io(&self.root))? {
            let name = entry.map_err(Error::io(&self.root))?.file_name();
            if !name.to_str().is_some_and(is_kept) {
                moved.push(name);
            }
        }
        if moved.is_empty() {
            return Ok(());
        }
        let aside = first_free(|n| self.root.join(format!("before-{n}")));
        std::fs::create_dir(&aside).map_err(Error::io(&aside))?;
        for name in moved {
            let from = self.root.join(&name);
            std::fs::rename(&from, aside.join(&name)).map_err(Error::io(&from))?;
        }
        moh_files::sync_directory(&self.root).map_err(Error::io(&self.root))
    }

    /// Removes the summary of a run that continues, which would call it finished.
    pub(crate) fn remove_summary(&self) -> Result<(), Error> {
        let path = self.summary();
        unless_missing(&path, std::fs::remove_file(&path))?;
        Ok(())
    }

    /// Removes the leftovers of earlier processes beside and among the checkpoints. The caller has locked the
    /// directory.
    pub(crate) fn clear_remains(&self) -> Result<(), Error> {
        let mut remains = Vec::new();
        for directory in [self.root.clone(), self.checkpoints()] {
            let entries = unless_missing(&directory, std::fs::read_dir(&directory))?;
            for entry in entries.into_iter().flatten() {
                let entry = entry.map_err(Error::io(&directory))?;
                if entry.file_name().to_string_lossy().starts_with(moh_files::TEMPORARY) {
                    remains.push(entry.path());
                }
            }
        }
        // A partial export; a complete one is replaced when the next is complete.
        if !self.export().join("config.json").is_file() {
            remains.push(self.export());
        }
        for path in remains {
            let removed = match path.is_dir() {
                true => std::fs::remove_dir_all(&path),
                false => std::fs::remove_file(&path),
            };
            unless_missing(&path, removed)?;
        }
        Ok(())
    }

    /// Compares the recipe with the stored one if the run has completed a checkpoint or finished: it is
    /// resumed, and only some keys may change. Those of inputs may if the run records the content of its
    /// inputs, which the caller compares. Returns whether a stage has become longer.
    ///
    /// # Errors
    /// [`Error::RecipeChanged`] with every key that differs. Fails also if the stored recipe is
    /// missing beside checkpoints or cannot be read.
    pub fn check_recipe(&self, recipe: &Recipe) -> Result<bool, Error> {
        if !self.has_completed_work()? {
            return Ok(false);
        }
        let path = self.recipe();
        let stored = Recipe::load(&path, &[])?;
        let has_record = self.inputs().is_file();
        let longer = longer_stages(&stored, recipe);
        let forbidden = |change: &KeyChange| {
            !may_change(&change.key)
                && !longer.contains(&change.key)
                && (!has_record || !names_input(&change.key))
        };
        let changes: Vec<KeyChange> =
            changes(&stored, recipe)?.into_iter().filter(forbidden).collect();
        match changes.is_empty() {
            true => Ok(!longer.is_empty()),
            false => Err(Error::RecipeChanged { path, changes }),
        }
    }

    /// Writes the resolved recipe into the directory, which the caller has locked.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write_recipe(&self, recipe: &Recipe) -> Result<(), Error> {
        let path = self.recipe();
        let text = recipe.to_toml()?;
        moh_files::write(&path, text.as_bytes()).map_err(Error::io(&path))
    }
}

/// The first of the names with the suffixes "", "-2", "-3", ... that does not exist.
pub(crate) fn first_free_suffixed(name: impl Fn(&str) -> PathBuf) -> PathBuf {
    first_free(|n| match n {
        1 => name(""),
        _ => name(&format!("-{n}")),
    })
}

/// The first of the names for 1, 2, ... that does not exist.
fn first_free(name: impl Fn(u64) -> PathBuf) -> PathBuf {
    let mut number = 1;
    loop {
        let path = name(number);
        if path.symlink_metadata().is_err() {
            return path;
        }
        number += 1;
    }
}

/// The keys of the stages that are longer in the second recipe.
fn longer_stages(before: &Recipe, now: &Recipe) -> Vec<String> {
    let is_longer = |stage: &&Stage| {
        let known = before.stages.iter().find(|known| known.name == stage.name);
        known.is_some_and(|known| known.tokens < stage.tokens)
    };
    let longer = now.stages.iter().filter(is_longer);
    longer.map(|stage| format!("stage.{}.tokens", stage.name)).collect()
}

fn may_change(key: &str) -> bool {
    // After the stage's name, which may be "parallel" itself.
    let of_stage = key.strip_prefix("stage.").and_then(|rest| rest.split_once('.'));
    let of_set = key.strip_prefix("data.validation.").and_then(|rest| rest.split_once('.'));
    of_stage.is_some_and(|(_, key)| key.starts_with("parallel."))
        || of_set.is_some_and(|(_, key)| key == "every_steps")
        || MAY_CHANGE.iter().any(|allowed| match allowed.ends_with('.') {
            true => key.starts_with(allowed),
            false => key == *allowed,
        })
}

/// Whether the key names an input by its path alone.
fn names_input(key: &str) -> bool {
    let is_data = key.starts_with("data.sources.") || key.starts_with("data.validation.");
    (is_data && key.ends_with(".path"))
        || ["model.from", "model.revision", "model.tokenizer"].contains(&key)
}

/// The keys whose values differ between two recipes, in order.
fn changes(before: &Recipe, now: &Recipe) -> Result<Vec<KeyChange>, Error> {
    let (before, now) = (leaves(before)?, leaves(now)?);
    let keys: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let change = |key: &String| KeyChange {
        key: key.clone(),
        before: before.get(key).cloned(),
        now: now.get(key).cloned(),
    };
    Ok(keys.into_iter().map(change).filter(|change| change.before != change.now).collect())
}

/// Every value of a recipe by its full key, stages by name.
///
/// # Errors
/// Fails if TOML cannot represent a value, which a loaded recipe does not contain.
pub fn leaves(recipe: &Recipe) -> Result<BTreeMap<String, String>, Error> {
    let mut leaves = BTreeMap::new();
    collect("", &recipe.to_value()?, &mut leaves);
    // The order of stages is not the value of a single key.
    let order: Vec<&str> = recipe.stages.iter().map(|s| s.name.as_str()).collect();
    leaves.insert("stage".to_string(), order.join(", "));
    Ok(leaves)
}

fn collect(key: &str, value: &Value, leaves: &mut BTreeMap<String, String>) {
    let join = |part: &str| match key {
        "" => part.to_string(),
        key => format!("{key}.{part}"),
    };
    match value {
        Value::Table(table) => {
            for (part, value) in table {
                collect(&join(part), value, leaves);
            }
        }
        Value::Array(elements) => {
            for (index, element) in elements.iter().enumerate() {
                let part = crate::recipe::element_name(element, index);
                collect(&join(&part), element, leaves);
            }
        }
        value => {
            leaves.insert(key.to_string(), value.to_string());
        }
    }
}

#[cfg(test)]
mod tests;
