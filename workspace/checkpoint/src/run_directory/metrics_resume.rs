//! The logs of a run that continues: cut back to the checkpoint's step, or started again if earlier lines
//! are lost. A log never prevents a run from using its weights.

use std::path::{Path, PathBuf};

use crate::RunState;
use crate::run_log::{metrics, routing_log};
use moh_files::first_free_suffixed;
use moh_recipe::Recipe;

use crate::{Error, Result, RunDirectory};

/// Prepares `metrics.jsonl` for the steps after `step`. If earlier lines are lost, renames the file, does not
/// remove it, and returns a warning.
pub fn resume(run: &RunDirectory, recipe: &Recipe, step: u64) -> Result<Option<String>> {
    let path = run.metrics();
    // A file that was started again starts after a later step than 0.
    let first = metrics::first(&path)?.and_then(|line| recipe.steps_before(&line.stage, line.step));
    if let Some(start) = first.or((step == 0).then_some(0)) {
        match metrics::cut_back(&path, step.saturating_sub(start)) {
            Err(Error::Lines(_)) => {}
            done => return done.map(|()| None),
        }
    }
    let shown = path.display();
    let lost = format!("{shown}: does not have the lines of all {step} steps: begun again");
    if path.symlink_metadata().is_err() {
        return Ok(Some(format!("{lost} after step {step}")));
    }
    let aside = archive_log(&path, run.root(), "metrics", step)?;
    Ok(Some(format!("{lost} after step {step}, the old file is {}", aside.display())))
}

/// Prepares `routing.jsonl` for the evaluations after `state`. If it cannot be read, renames the file, does not
/// remove it, and returns a warning.
pub fn resume_routing(run: &RunDirectory, state: &RunState) -> Result<Option<String>> {
    let (path, step) = (run.routing(), state.step);
    let is_evaluated = match step {
        0 => !state.evaluations.is_empty(),
        _ => state.unevaluated.is_none(),
    };
    match routing_log::cut_back(&path, step, is_evaluated) {
        Err(error @ Error::Lines(_)) => {
            let aside = archive_log(&path, run.root(), "routing", step)?;
            let aside = aside.display();
            Ok(Some(format!("{error}: begun again after step {step}, the old file is {aside}")))
        }
        done => done.map(|()| None),
    }
}

/// Renames a log that is started again after a step. Returns its new path.
fn archive_log(path: &Path, root: &Path, name: &str, step: u64) -> Result<PathBuf> {
    let aside =
        first_free_suffixed(|suffix| root.join(format!("{name}-before-step-{step}{suffix}.jsonl")));
    std::fs::rename(path, &aside).map_err(moh_files::io(path))?;
    Ok(aside)
}
