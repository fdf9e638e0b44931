//! A checkpoint of a run as the origin of a model: `RUN` or `RUN@STEP`.

use std::fmt;
use std::path::Path;

use crate::listing::exact_number;
use crate::{StoredCheckpoint, alone, newest_good, of_step, require};
use moh_hf::ConfigFile;
use moh_hf::config_file::CONFIG_FILE;
use moh_kernels::{Backend, DType};
use moh_model::ModelConfig;
use moh_recipe::shell::shell_word;
use moh_recipe::{ModelOptions, Recipe};
use moh_step::Ranks;
use serde_json::Value;

use crate::{Error, Result, RunDirectory};

/// The name of a checkpoint: a run directory and, after `@`, a step over all of its stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointName {
    /// The run.
    pub run: RunDirectory,
    /// The step. `None` stands for the run's newest good checkpoint.
    pub step: Option<u64>,
}

impl CheckpointName {
    /// Parses a name. Returns `None` if it does not name a run directory, which has a `recipe.toml` and
    /// `checkpoints/` and is not a model's directory.
    pub fn parse(name: &str) -> Option<Self> {
        let run = |path: &str| is_run(Path::new(path)).then(|| RunDirectory::new(path));
        if let Some(run) = run(name) {
            return Some(CheckpointName { run, step: None });
        }
        let (path, step) = split(name)?;
        Some(CheckpointName { run: run(path)?, step: Some(step) })
    }

    /// Returns the step. Without a step, returns the step of the newest checkpoint with good bytes. If the run has
    /// finished, its last checkpoint must be good. The ranks share the check of the hashes. Changes nothing.
    pub fn resolve<B: Backend>(&self, ranks: &mut Ranks<B>) -> Result<u64> {
        let run = &self.run;
        if let Some(step) = self.step {
            ranks.on_rank0(|| require(run, step))?;
            return Ok(step);
        }
        // 0 if the newest good checkpoint is wanted.
        let last = ranks.rank0_computes::<Error>(|| {
            let finished = run.is_finished()?;
            let steps = run.checkpoint_steps()?;
            Ok(steps.last().copied().filter(|_| finished).unwrap_or(0) as f64)
        })?;
        let found = match last > 0.0 {
            true => Some(of_step(run, ranks, last as u64)?),
            false => newest_good(run, ranks)?,
        };
        match found {
            Some(stored) => Ok(stored.manifest().state.step),
            None => Err(run.no_good_checkpoint()),
        }
    }

    /// Resolves the step as [`CheckpointName::resolve`] does, in a program of a single process.
    pub fn resolve_alone(self) -> Result<RunCheckpoint> {
        let step = self.resolve(&mut alone()?)?;
        Ok(RunCheckpoint { run: self.run, step })
    }
}

/// A checkpoint of a run.
#[derive(Debug, Clone)]
pub struct RunCheckpoint {
    /// The run.
    pub run: RunDirectory,
    /// The step, counted over all stages.
    pub step: u64,
}

impl RunCheckpoint {
    /// Returns the checkpoint named `RUN` or `RUN@STEP`, or `None` if `name` names no run. Without a step, returns
    /// the run's newest good checkpoint, which is read to check it.
    pub fn from_name(name: &str) -> Result<Option<Self>> {
        CheckpointName::parse(name).map(CheckpointName::resolve_alone).transpose()
    }

    /// Returns the element type of the run's own export.
    pub fn export_type(&self) -> Result<DType> {
        Ok(self.run.stored_recipe()?.run.dtype.dtype())
    }

    /// Returns a function that reads tensors by name, in f32, rounded to the element type of the run's export.
    pub fn exported(
        &self,
    ) -> Result<impl FnMut(&str, &mut [f32]) -> Result<(), Error> + Send + use<>, Error> {
        let (stored, dtype) = (self.run.stored(self.step)?, self.export_type()?);
        Ok(move |name: &str, values: &mut [f32]| stored.read_exported(dtype, name, values))
    }

    /// Returns the model's configuration at the step. Reads no tensor.
    pub fn config_file(&self) -> Result<ConfigFile> {
        require(&self.run, self.step)?;
        Ok(self.run.stored_model(self.step)?.1)
    }
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.run.root().display())?;
        self.step.map_or(Ok(()), |step| write!(f, "@{step}"))
    }
}

/// Returns the model's configuration in a checkpoint. Messages name its `directory`.
pub fn config_file(stored: &StoredCheckpoint, directory: &Path) -> Result<ConfigFile> {
    let fields = Value::Object(stored.manifest().config.clone());
    Ok(ConfigFile::from_value(fields, directory)?)
}

/// Returns the shape of a recipe's initial model before its vocabulary is padded, from the run in `model.from` or from
/// [`Recipe::model_config`]. Returns `None` for a repository of the hub. Messages name the recipe `path`.
pub fn local_model_config(recipe: &Recipe, path: &Path) -> Result<Option<ModelConfig>> {
    let ModelOptions { new, config, from, .. } = &recipe.model;
    if let (None, None, Some(name)) = (new, config, from.as_deref().and_then(CheckpointName::parse))
    {
        let newest = || name.run.checkpoint_steps().map(|steps| steps.last().copied().unwrap_or(0));
        let step = name.step.map_or_else(newest, Ok)?;
        return Ok(Some(RunCheckpoint { run: name.run, step }.config_file()?.config));
    }
    Ok(recipe.model_config(path)?)
}

/// Describes a run or a checkpoint, which is not a model. Returns `None` for any other directory.
pub fn not_a_model(directory: &Path) -> Option<String> {
    let has = |name: &str| directory.join(name).exists();
    let export = directory.join("export");
    if has(CONFIG_FILE) {
        None
    } else if export.join(CONFIG_FILE).is_file() {
        Some(format!("is a run, name its model: {}", export.display()))
    } else if has("checkpoints") && has("recipe.toml") {
        let run = directory.to_string_lossy();
        let command = format!("moh-convert --from {} --out DIR", shell_word(&run));
        Some(format!("is a run that has not finished, export its model: {command}"))
    } else if has("manifest.json") && has("manifest.json.b3") {
        Some(
            "is a checkpoint, not a model: name the export/ of its run, or export it: moh-convert \
             --from RUN@STEP --out DIR"
                .to_owned(),
        )
    } else {
        None
    }
}

/// Returns whether `name` is `run` with a step.
pub fn is_step_of(name: &str, run: &str) -> bool {
    split(name).is_some_and(|(path, _)| path == run)
}

/// Splits a name into a path and the step after its last `@`.
fn split(name: &str) -> Option<(&str, u64)> {
    let (path, step) = name.rsplit_once('@')?;
    Some((path, exact_number(step)?))
}

fn is_run(path: &Path) -> bool {
    let run = RunDirectory::new(path);
    run.checkpoints().is_dir() && run.recipe().is_file() && !path.join(CONFIG_FILE).exists()
}

#[cfg(test)]
mod tests {
    use moh_testkit::assert_refused;

    use super::*;

    #[test]
    fn a_run_has_a_recipe_and_checkpoints_and_a_number_after_it_is_a_step() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("a@7");
        let name = path.to_str().unwrap();
        assert_eq!(CheckpointName::parse(name), None);
        std::fs::create_dir_all(path.join("checkpoints")).unwrap();
        assert_eq!(CheckpointName::parse(name), None);
        std::fs::write(path.join("recipe.toml"), "").unwrap();
        let run = RunDirectory::new(&path);
        let named = |step| Some(CheckpointName { run: run.clone(), step });
        assert_eq!(CheckpointName::parse(name), named(None));
        assert_eq!(CheckpointName::parse(&format!("{name}@12")), named(Some(12)));
        assert_eq!(named(Some(12)).unwrap().to_string(), format!("{name}@12"));
        for bad in ["@", "@+1", "@012", "@1x", "@-1", "x@1", "@1@"] {
            assert_eq!(CheckpointName::parse(&format!("{name}{bad}")), None, "{bad}");
        }
        std::fs::write(path.join("config.json"), "{}").unwrap();
        assert_eq!(CheckpointName::parse(name), None);
        assert!(is_step_of("r@3", "r") && !is_step_of("r", "r") && !is_step_of("r@3", "s"));
    }

    #[test]
    fn a_run_without_a_good_checkpoint_is_no_origin() {
        let temporary = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(temporary.path());
        std::fs::create_dir_all(run.checkpoint(4)).unwrap();
        let name = CheckpointName { run, step: None };
        let none = "checkpoints: no checkpoint is good: moh-train checkpoints";
        assert_refused(name.clone().resolve_alone(), none);
        let error = CheckpointName { step: Some(3), ..name }.resolve_alone().unwrap_err();
        assert!(error.to_string().ends_with("step 3: name one of 4"), "{error}");
    }
}
