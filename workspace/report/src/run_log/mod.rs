//! Reads a run from its directory, at any moment of the run, without locking, changing or waiting for a file. Files
//! that a young run does not have yet are absent here. A line that cannot be read is omitted with a remark. A file that
//! cannot be read is an error, so that no data is silently omitted.

mod lines;
mod routing;
mod routing_history;
mod steps;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, bail};
pub use lines::LeftOut;
use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::{Evaluation, EvaluationPoint, Machine, StepMetrics, Summary};
use moh_recipe::Recipe;
pub use routing::RoutingEvaluation;
pub use routing_history::{Loads, RoutingHistory, Spread, load};
pub use steps::{StageSteps, Step, StepValue, Steps};

use crate::chart::printable;

const MAX_RECIPE_BYTES: u64 = 1 << 20;

#[derive(Debug)]
pub struct RunLog {
    pub root: PathBuf,
    /// A short name of the run, from its directory.
    pub name: String,
    /// The recipe, if this version can read it.
    pub recipe: Option<Recipe>,
    /// The recipe's text, or why it is missing.
    pub recipe_text: Result<String, String>,
    /// The name of the first validation set, which summaries report; `validation` if no recipe names it.
    pub first_set: String,
    pub steps: Steps,
    /// Steps of the run before the first step of `steps`.
    pub steps_before: u64,
    /// The results; of an unfinished run, the results of its newest checkpoint.
    pub summary: Summary,
    pub is_finished: bool,
    /// The use of routed heads in evaluations: the newest of each set, and evaluations after no step.
    pub routing: Vec<RoutingEvaluation>,
    /// The changes of this use: the first set, then the others by name.
    pub routing_histories: Vec<RoutingHistory>,
    /// The run's machine; missing for runs of earlier versions.
    pub machine: Option<Machine>,
    /// When the last step was written.
    pub written: Option<SystemTime>,
    /// The lines that cannot be read, by file.
    pub left_out: Vec<LeftOut>,
}

impl RunLog {
    /// Reads the directory `root`.
    ///
    /// # Errors
    /// Fails if it is not a run directory, or if a file in it cannot be read or is damaged. Lines that cannot be read
    /// are omitted.
    pub fn read(root: &Path) -> anyhow::Result<Self> {
        let run = RunDirectory::new(root);
        if !is_run(root) {
            bail!(
                "{}: is not a run directory, which has a recipe.toml and a metrics.jsonl: name the run.dir of \
                 a recipe",
                root.display()
            );
        }
        let (recipe, recipe_text) = read_recipe(&run)?;
        let first_set = recipe.as_ref().and_then(|recipe| recipe.data.validation.first());
        let first_set = printable(first_set.map_or("validation", |set| &set.name));
        let (mut steps, mut left_out) = (Steps::default(), Vec::new());
        steps.lines = lines::for_each(&run.metrics(), &mut left_out, |line, text| {
            let metrics: StepMetrics = serde_json::from_slice(text).map_err(lines::reason)?;
            steps.push(line, &metrics, &first_set);
            Ok(())
        })?;
        let first = recipe.as_ref().zip(steps.stages.first()).zip(steps.all.first());
        let before = first.and_then(|((recipe, stage), step)| {
            let before = recipe.steps_before(&stage.name, steps.first_number)?;
            before.checked_sub(step.line - 1)
        });
        let finished = Summary::read(&run.summary())?;
        let is_finished = finished.is_some();
        let summary = match finished {
            Some(summary) => summary,
            None => of_newest_checkpoint(&run)?,
        };
        let (routing, mut routing_histories) = routing::read(&run.routing(), &mut left_out)?;
        routing_histories.sort_by(|a, b| {
            (a.set != first_set).cmp(&(b.set != first_set)).then_with(|| a.set.cmp(&b.set))
        });
        Ok(RunLog {
            name: name(root),
            root: root.to_owned(),
            recipe,
            recipe_text,
            steps,
            steps_before: before.unwrap_or(0),
            first_set,
            summary: printable_names(summary),
            is_finished,
            routing,
            routing_histories,
            machine: Machine::read(&run.machine())?,
            written: std::fs::metadata(run.metrics()).and_then(|data| data.modified()).ok(),
            left_out,
        })
    }

    /// Returns the number of a step over all stages, from 1.
    pub fn number(&self, step: &Step) -> u64 {
        self.steps_before.saturating_add(step.line)
    }

    pub fn steps_done(&self) -> u64 {
        self.steps_before.saturating_add(self.steps.lines).max(self.summary.steps)
    }

    /// Returns the tokens trained on after `step` steps over all stages, if the log has the step.
    pub fn tokens_after(&self, step: u64) -> Option<f64> {
        if step == 0 {
            return Some(0.0);
        }
        let known = self.steps.of_line(step.checked_sub(self.steps_before)?);
        let known = known.map(|step| step.tokens);
        known.or_else(|| (step == self.summary.steps).then_some(self.summary.tokens as f64))
    }

    /// Returns the losses of each validation set by tokens, the first set first. At the same tokens, the loss before a
    /// conversion comes before the loss after it.
    pub fn validation(&self) -> Vec<(String, Vec<(f64, f64)>)> {
        let mut sets: BTreeMap<&str, Vec<(f64, bool, f64)>> = BTreeMap::new();
        for (name, losses) in &self.steps.validation {
            let of_steps = losses.iter().filter_map(|(index, validation)| {
                Some((self.steps.all.get(*index)?.tokens, false, validation.loss))
            });
            sets.entry(name).or_default().extend(of_steps);
        }
        for evaluation in &self.summary.evaluations {
            let Some(tokens) = self.tokens_after(evaluation.step) else { continue };
            let is_converted = matches!(evaluation.moment, EvaluationPoint::Converted { .. });
            let mut add = |name, loss| {
                sets.entry(name).or_default().push((tokens, is_converted, loss));
            };
            add(evaluation.set.as_deref().unwrap_or(&self.first_set), evaluation.loss);
            for (name, validation) in &evaluation.other_sets {
                add(name, validation.loss);
            }
        }
        let mut sets: Vec<(String, Vec<(f64, f64)>)> =
            sets.into_iter().map(|(name, losses)| (name.to_owned(), in_order(losses))).collect();
        // The sort is stable, so that the other sets stay in the order of their names.
        sets.sort_by_key(|(name, _)| *name != self.first_set);
        sets
    }
}

/// Returns whether `root` is a run directory. It is marked, or has two of a run's recipe, metrics, summary and
/// checkpoints, as a copy without the mark. A single such name may have another origin.
pub fn is_run(root: &Path) -> bool {
    let run = RunDirectory::new(root);
    let files = [run.recipe(), run.metrics(), run.summary()].map(|path| path.is_file());
    let has_checkpoints = run.checkpoint_steps().is_ok_and(|steps| !steps.is_empty());
    let found = files.into_iter().chain([has_checkpoints]).filter(|&is_there| is_there).count();
    // If the directory cannot be read, reading its files will name it.
    found >= 2 || run.is_run().unwrap_or(true)
}

/// Returns losses by tokens. A loss that both a step and the end of its stage have is there once.
fn in_order(mut losses: Vec<(f64, bool, f64)>) -> Vec<(f64, f64)> {
    losses.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    losses.dedup_by(|b, a| a.0 == b.0 && a.1 == b.1 && a.2.total_cmp(&b.2).is_eq());
    losses.into_iter().map(|(tokens, _, loss)| (tokens, loss)).collect()
}

/// Returns the recipe, if it can be read, and its text. If another version wrote the recipe, only its names are lost.
fn read_recipe(run: &RunDirectory) -> anyhow::Result<(Option<Recipe>, Result<String, String>)> {
    let path = run.recipe();
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok((None, Err("the run directory has no recipe.toml".to_owned())));
        }
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let mut bytes = Vec::new();
    file.take(MAX_RECIPE_BYTES)
        .read_to_end(&mut bytes)
        .with_context(|| path.display().to_string())?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok((Recipe::parse_stored(&text, &path, &[]).ok(), Ok(text)))
}

/// Returns the results so far, of the newest checkpoint with a readable manifest. Checkpoints may be removed and
/// replaced at any time, and a damaged checkpoint is the concern of the run.
fn of_newest_checkpoint(run: &RunDirectory) -> anyhow::Result<Summary> {
    let steps = run.checkpoint_steps()?;
    let Some(stored) = steps.iter().rev().find_map(|&step| run.stored(step).ok()) else {
        let (evaluations, calibrations) = (Vec::new(), Vec::new());
        return Ok(Summary { steps: 0, tokens: 0, heads: 0, evaluations, calibrations });
    };
    let manifest = stored.manifest();
    let heads = manifest.config.get("num_attention_heads").and_then(|heads| heads.as_u64());
    Ok(Summary {
        steps: manifest.state.step,
        tokens: manifest.state.tokens,
        heads: heads.and_then(|heads| heads.try_into().ok()).unwrap_or(0),
        evaluations: manifest.state.evaluations.clone(),
        calibrations: manifest.state.calibrations.clone(),
    })
}

/// Returns the last part of a path, or the whole path if it has no last part, such as `..`.
fn name(root: &Path) -> String {
    let known = root.canonicalize().unwrap_or_else(|_| root.to_owned());
    let name = known.file_name().unwrap_or(root.as_os_str());
    printable(&name.to_string_lossy())
}

fn printable_names(mut summary: Summary) -> Summary {
    for Evaluation { moment, set, other_sets, texts, .. } in &mut summary.evaluations {
        *set = set.take().map(|name| printable(&name));
        if let EvaluationPoint::Converted { stage, .. } | EvaluationPoint::Trained { stage } =
            moment
        {
            *stage = printable(stage);
        }
        *other_sets = std::mem::take(other_sets)
            .into_iter()
            .map(|(name, validation)| (printable(&name), validation))
            .collect();
        *texts = std::mem::take(texts)
            .into_iter()
            .map(|(name, text)| (printable(&name), text))
            .collect();
    }
    for calibration in &mut summary.calibrations {
        calibration.stage = printable(&calibration.stage);
    }
    summary
}

#[cfg(test)]
mod tests;
