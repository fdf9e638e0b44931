//! `comparison.json`: the variants of a comparison, with their changes, their shared stages, and the results of
//! finished variants. Its presence marks a directory as a comparison's.

use std::path::Path;

use moh_checkpoint::run_directory::{KeyChange, RunDirectory};
use moh_checkpoint::run_log::{Evaluation, Summary, metrics};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::PlannedRun;
use crate::{Error, Result};

/// The name of the file in the directory of a comparison.
pub(crate) const RECORD: &str = "comparison.json";
const FORMAT: u32 = 1;
/// Maximum bytes of a record: thousands of variants.
const MAX_BYTES: u64 = 64 << 20;

/// The results of a variant.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Results {
    /// Steps over all stages, including shared stages.
    pub steps: u64,
    /// Tokens trained on, including shared stages.
    pub tokens: u64,
    /// Tokens per second of the last stage, without evaluations and checkpoints; `None` if the metrics do not have it.
    pub tokens_per_second: Option<f64>,
    /// The fraction of the last conversion's loss that training recovered.
    pub recovered: Option<f64>,
    /// The losses at the moments of the run, in order.
    pub evaluations: Vec<Evaluation>,
}

/// Returns the results of a run; `None` if it has not finished.
pub fn results(run: &RunDirectory) -> Result<Option<Results>> {
    let Some(summary) = Summary::read(&run.summary())? else { return Ok(None) };
    Ok(Some(Results {
        steps: summary.steps,
        tokens: summary.tokens,
        tokens_per_second: tokens_per_second(run)?,
        recovered: summary.recovered(),
        evaluations: summary.evaluations,
    }))
}

/// Writes the record of `runs`, which compare variants of `recipe`. Each variant has its changes, its shared first
/// stages, and its results, null until the variant has finished.
pub(super) fn write(path: &Path, recipe: &Path, runs: &[PlannedRun]) -> Result<()> {
    let recipe = serde_json::to_value(recipe).map_err(|error| moh_files::io(path)(error.into()))?;
    let (mut shared, mut variants) = (Vec::new(), Vec::new());
    for run in runs {
        let stages = run.recipe.stages.iter().map(|stage| stage.name.as_str());
        let name = run.name.as_str();
        let Some(variant) = &run.variant else {
            shared.push(json!({ "name": name, "stages": stages.collect::<Vec<_>>() }));
            continue;
        };
        let change = |change: &KeyChange| json!({ "key": change.key, "recipe": change.before, "variant": change.now });
        variants.push(json!({
            "name": name,
            "overrides": variant.overrides,
            "shared_stages": stages.take(run.num_shared).collect::<Vec<_>>(),
            "changes": run.changes.iter().map(change).collect::<Vec<_>>(),
            "results": results(&run.directory())?,
        }));
    }
    let record =
        json!({ "format": FORMAT, "recipe": recipe, "shared": shared, "variants": variants });
    Ok(moh_files::write(path, format!("{record:#}\n").as_bytes()).map_err(moh_files::io(path))?)
}

/// The fields of a record that are read: the names of its variants.
#[derive(Debug, Deserialize)]
struct Known {
    format: u32,
    variants: Vec<KnownVariant>,
}

#[derive(Debug, Deserialize)]
struct KnownVariant {
    name: String,
}

/// Returns the names of a record's variants; `None` if there is no record.
pub(super) fn names(path: &Path) -> Result<Option<Vec<String>>> {
    let bytes = moh_files::read_bounded_if_any(path, MAX_BYTES, "the record of a comparison")?;
    let Some(bytes) = bytes else { return Ok(None) };
    let refuse = |reason: String| Error::from(moh_files::unusable(path, reason));
    let known: Known = serde_json::from_slice(&bytes)
        .map_err(|error| refuse(format!("not the record of a comparison: {error}")))?;
    match known.format {
        FORMAT => Ok(Some(known.variants.into_iter().map(|variant| variant.name).collect())),
        other => Err(refuse(format!(
            "format {other}, but this version reads {FORMAT}: use the version that wrote it"
        ))),
    }
}

/// Returns the mean speed of the steps of a run's last stage.
fn tokens_per_second(run: &RunDirectory) -> Result<Option<f64>> {
    let (mut stage, mut before) = (String::new(), None);
    let (mut tokens, mut seconds) = (0.0, 0.0);
    metrics::for_each(&run.metrics(), |step| {
        if step.stage != stage {
            stage.clone_from(&step.stage);
            (tokens, seconds) = (0.0, 0.0);
        }
        let known = before.unwrap_or(if step.step == 1 { 0 } else { step.tokens });
        let own = step.tokens.saturating_sub(known) as f64;
        before = Some(step.tokens);
        if step.tokens_per_second > 0.0 {
            tokens += own;
            seconds += own / step.tokens_per_second;
        }
    })?;
    Ok(Some(tokens / seconds).filter(|rate| rate.is_finite()))
}
