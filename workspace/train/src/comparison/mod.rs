//! The comparison of variants of a recipe: a run for each variant, and runs for shared stages.
//!
//! A variant shares with the recipe all stages before the first stage that its overrides change. Each such sequence of
//! stages is one run, `shared-STAGE`, named for its last stage. A longer sequence continues a shorter one
//! (`branch.rs`). The shared stages of a variant that changes a stage follow from the recipe and this variant alone:
//! another variant can be added at any time.
//!
//! All runs are ordinary runs in the comparison's directory, so each run resumes by itself. The comparison resumes by
//! going through the runs again. Runs that have started come first: their inputs are compared with their first inputs,
//! so that no later run starts with other inputs.

mod record;
mod variant;

use std::path::{Path, PathBuf};

use moh_checkpoint::RunDirectory;
use moh_checkpoint::run_directory::{KeyChange, RunLock, branch, changes, join_names};
use moh_files::TEMPORARY;
use moh_recipe::Recipe;
use moh_recipe::shell::command;
pub(crate) use record::RECORD;
pub use record::{Results, results};
use variant::SHARED;
pub use variant::Variant;

use crate::run::adopt_origin;
use crate::{ModelSource, Result};

/// The runs of a comparison.
#[derive(Debug)]
pub struct Comparison {
    directory: PathBuf,
    path: PathBuf,
    runs: Vec<PlannedRun>,
}

/// A run of a comparison.
#[derive(Debug, Clone)]
pub struct PlannedRun {
    /// The name of the run's directory in the comparison's directory.
    pub name: String,
    /// Its recipe, with its own `run.dir`.
    pub recipe: Recipe,
    /// The run that trains its first stages, if any are shared.
    pub parent: Option<RunDirectory>,
    /// The number of shared stages.
    pub num_shared: usize,
    /// The variant; `None` for shared stages.
    pub variant: Option<Variant>,
    /// The keys with other values than in the recipe.
    pub changes: Vec<KeyChange>,
    /// The command that trains its recipe alone, for errors that suggest a command.
    pub command: String,
}

impl PlannedRun {
    /// Returns the run's directory.
    pub fn directory(&self) -> RunDirectory {
        RunDirectory::new(&self.recipe.run.dir)
    }
}

impl Comparison {
    /// Plans the runs of `variants` of the recipe at `path`. `overrides` apply to all variants.
    ///
    /// # Errors
    /// Fails if a recipe is invalid, if two variants have the same name or are equal, or if a variant changes
    /// `run.dir`, `run.device` or `run.deterministic`.
    pub fn plan(path: &Path, overrides: &[String], variants: Vec<Variant>) -> Result<Self> {
        let base = Recipe::load(path, overrides)?;
        let mut recipes: Vec<Recipe> = Vec::new();
        for (index, variant) in variants.iter().enumerate() {
            let refuse = |reason: &str| Err(variant::refuse(&variant.name, reason));
            // On some file systems names that differ in case are the same.
            let is_same = |other: &&Variant| other.name.eq_ignore_ascii_case(&variant.name);
            if variants[..index].iter().find(is_same).is_some() {
                return refuse("is the name of an earlier variant");
            }
            let recipe = variant.load(path, overrides)?;
            if recipe.run.dir != base.run.dir {
                return refuse(
                    "run.dir is the directory of the whole comparison: change it with --set",
                );
            }
            let device = |recipe: &Recipe| (recipe.run.device, recipe.run.deterministic);
            if device(&recipe) != device(&base) {
                return refuse(
                    "run.device and run.deterministic are the same for all variants: change them with --set",
                );
            }
            if let Some(same) = recipes.iter().position(|other| *other == recipe) {
                return refuse(&format!("is the same as the variant {}", variants[same].name));
            }
            recipes.push(recipe);
        }
        let num_shared = shared_stages(&base, &recipes);
        let mut lengths = num_shared.clone();
        lengths.retain(|&length| length > 0);
        lengths.sort_unstable();
        lengths.dedup();
        let directory = base.run.dir.clone();
        let shared_name = |length: usize| format!("{SHARED}{}", base.stages[length - 1].name);
        let parent = |length: usize| {
            (length > 0).then(|| RunDirectory::new(directory.join(shared_name(length))))
        };
        let mut runs = Vec::new();
        let mut shorter = 0;
        for length in lengths {
            let (name, mut recipe) = (shared_name(length), base.clone());
            recipe.stages.truncate(length);
            recipe.run.dir = directory.join(&name);
            let (parent, num_shared) = (parent(shorter), shorter);
            runs.push(PlannedRun {
                name,
                recipe,
                parent,
                num_shared,
                variant: None,
                changes: Vec::new(),
                command: command(path, overrides),
            });
            shorter = length;
        }
        for ((variant, mut recipe), num_shared) in variants.into_iter().zip(recipes).zip(num_shared)
        {
            let changes = changes(&base, &recipe)?;
            let command = command(path, overrides.iter().chain(&variant.overrides));
            recipe.run.dir = directory.join(&variant.name);
            runs.push(PlannedRun {
                name: variant.name.clone(),
                recipe,
                parent: parent(num_shared),
                num_shared,
                variant: Some(variant),
                changes,
                command,
            });
        }
        Ok(Comparison { directory, path: path.to_owned(), runs })
    }

    /// Returns the directory of the comparison: `run.dir` of the recipe.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the runs, each after the run that it continues.
    pub fn runs(&self) -> &[PlannedRun] {
        &self.runs
    }

    /// Returns the indices of the runs in [`Self::runs`] in the order in which a command trains them. Runs that have
    /// started come first: they need no run that has not started.
    pub fn order(&self) -> Result<Vec<usize>> {
        let mut order = Vec::new();
        for (place, run) in self.runs.iter().enumerate() {
            order.push((!run.directory().has_completed_work()?, place));
        }
        order.sort_unstable();
        Ok(order.into_iter().map(|(_, place)| place).collect())
    }

    /// Returns the runs of the variants.
    pub fn variants(&self) -> impl Iterator<Item = &PlannedRun> {
        self.runs.iter().filter(|run| run.variant.is_some())
    }

    /// Returns whether a run must still be trained or checked. Shared stages are no longer needed once every run that
    /// continues them has started: their directory may then be removed.
    pub fn needs(&self, run: &PlannedRun) -> Result<bool> {
        if run.variant.is_some() {
            return Ok(true);
        }
        let directory = run.directory();
        let continuing = self.runs.iter().filter(|other| other.parent.as_ref() == Some(&directory));
        for other in continuing {
            if branch::is_free(&other.directory())? && self.needs(other)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the path of `comparison.json`.
    pub fn record(&self) -> PathBuf {
        self.directory.join(RECORD)
    }

    /// Locks the directory for this comparison, and writes its record. Rejects the directory of an earlier command with
    /// other variants or keys before anything is trained or changed. The first rank calls this, and keeps the lock
    /// until all runs have ended.
    ///
    /// # Errors
    /// Fails if the directory is not a comparison's or is locked by another process, or if a file cannot be read or
    /// written. Fails if a directory in it is another run's or a variant that is not named, or if a run was started
    /// with other keys.
    pub fn claim(&self) -> Result<RunLock> {
        let known = record::names(&self.record())?;
        if known.is_none() {
            self.check()?;
        }
        let lock = RunDirectory::new(&self.directory).lock()?;
        for name in known.unwrap_or_default() {
            let run = self.directory.join(&name);
            if self.runs.iter().all(|run| run.name != name) && run.exists() {
                let reason = "is a variant of this comparison that no --variant names: name it with the keys that \
                              it was started with, or move it away";
                return Err(moh_files::unusable(&run, reason).into());
            }
        }
        for run in &self.runs {
            check_begun(run, &self.path)?;
        }
        self.write_record()?;
        Ok(lock)
    }

    /// Writes `comparison.json` with the results of the variants that have finished.
    pub fn write_record(&self) -> Result<()> {
        record::write(&self.record(), &self.path, &self.runs)
    }

    /// Fails if the directory, which has no record, is neither missing nor empty.
    fn check(&self) -> Result<()> {
        let directory = RunDirectory::new(&self.directory);
        let unfinished = format!("{TEMPORARY}{RECORD}");
        let mut found = directory.occupants()?;
        found.retain(|name| !name.starts_with(&unfinished));
        if found.is_empty() {
            return Ok(());
        }
        let reason = format!(
            "is not the directory of a comparison, and holds {}: a comparison takes a directory that is new, empty or \
             its own, so choose another one, such as --set run.dir={}",
            join_names(&found),
            directory.free_sibling().display()
        );
        Err(moh_files::unusable(&self.directory, reason).into())
    }
}

/// Returns the number of first stages that each variant shares. A variant that changes no stage shares at most as many
/// stages as the other variants, and trains at least the last stage itself.
fn shared_stages(base: &Recipe, variants: &[Recipe]) -> Vec<usize> {
    let all = base.stages.len();
    let common: Vec<usize> = variants.iter().map(|variant| common_stages(base, variant)).collect();
    let most = common.iter().copied().filter(|&stages| stages < all).max();
    let most = most.unwrap_or(all.saturating_sub(1));
    common.into_iter().map(|stages| stages.min(most)).collect()
}

/// Returns the number of first stages after which both recipes have the same weights. It is 0 if the recipes differ
/// outside stages, logs and checkpoints: logs and checkpoints change no weight.
fn common_stages(base: &Recipe, variant: &Recipe) -> usize {
    let rest = |recipe: &Recipe| Recipe {
        stages: Vec::new(),
        log: base.log,
        checkpoint: base.checkpoint,
        ..recipe.clone()
    };
    match rest(base) == rest(variant) {
        true => base.stages.iter().zip(&variant.stages).take_while(|(a, b)| a == b).count(),
        false => 0,
    }
}

/// Rejects a run that was started with other values of keys that may not change. A run that does not keep its model is
/// compared later, when it is trained.
fn check_begun(run: &PlannedRun, path: &Path) -> Result<()> {
    let directory = run.directory();
    directory.check()?;
    if !directory.has_completed_work()? {
        return Ok(());
    }
    let mut recipe = run.recipe.clone();
    adopt_origin(&mut recipe, &directory)?;
    if !directory.keeps_model(&recipe)? {
        return Ok(());
    }
    let source = ModelSource::open_kept(&recipe, path, &directory.model())?;
    recipe.resolve(path, source.original_config())?;
    directory.check_recipe(&recipe, &run.command)?;
    // Other runs have continued the shared stages with their earlier lengths.
    let stored = directory.stored_recipe()?;
    let shared = stored.stages.iter().zip(&recipe.stages).take(run.num_shared);
    let grown = shared.filter(|(before, now)| before.tokens != now.tokens);
    let changes: Vec<KeyChange> = grown
        .map(|(before, now)| KeyChange {
            key: format!("stage.{}.tokens", now.name),
            before: Some(before.tokens.to_string()),
            now: Some(now.tokens.to_string()),
        })
        .collect();
    match changes.is_empty() {
        true => Ok(()),
        false => Err(directory.recipe_changed(&changes, None).into()),
    }
}

#[cfg(test)]
mod tests;
