//! `comparison.json`: the variants of a comparison, what each changes and where it begins, and the results of
//! those that have finished. Its presence marks a directory as a comparison's.

use std::path::Path;

use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::{Evaluation, Summary, metrics};
use serde::{Deserialize, Serialize};

use super::PlannedRun;
use crate::Error;

/// The name of the file in the directory of a comparison.
pub(crate) const RECORD: &str = "comparison.json";
/// The version of the format.
const FORMAT: u32 = 1;
/// Maximum bytes of a record: thousands of variants.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Debug, Serialize)]
struct Record<'a> {
    format: u32,
    recipe: &'a Path,
    shared: Vec<SharedStages<'a>>,
    variants: Vec<VariantRecord<'a>>,
}

/// A run of stages that variants share.
#[derive(Debug, Serialize)]
struct SharedStages<'a> {
    name: &'a str,
    stages: Vec<&'a str>,
}

#[derive(Debug, Serialize)]
struct VariantRecord<'a> {
    name: &'a str,
    overrides: &'a [String],
    /// Its first stages, which are shared.
    shared_stages: Vec<&'a str>,
    changes: Vec<Change<'a>>,
    /// `None` until the variant has finished.
    results: Option<Results>,
}

#[derive(Debug, Serialize)]
struct Change<'a> {
    key: &'a str,
    recipe: Option<&'a str>,
    variant: Option<&'a str>,
}

/// The results of a variant.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Results {
    /// Steps, over all stages, also those that were shared.
    pub steps: u64,
    /// Tokens trained on, also in the shared stages.
    pub tokens: u64,
    /// Tokens per second of the last stage, without evaluations and checkpoints; `None` if the metrics do not
    /// say.
    pub tokens_per_second: Option<f64>,
    /// The fraction of the last conversion's loss that training recovered.
    pub recovered: Option<f64>,
    /// The losses at the moments of the run, in order.
    pub evaluations: Vec<Evaluation>,
}

/// The results of a run; `None` if it has not finished.
///
/// # Errors
/// Fails if its summary or its metrics cannot be read.
pub fn results(run: &RunDirectory) -> Result<Option<Results>, Error> {
    let Some(summary) = Summary::read(&run.summary())? else { return Ok(None) };
    Ok(Some(Results {
        steps: summary.steps,
        tokens: summary.tokens,
        tokens_per_second: tokens_per_second(run)?,
        recovered: summary.recovered(),
        evaluations: summary.evaluations,
    }))
}

/// Writes the record of `runs`, which compare variants of the `recipe`.
pub(super) fn write(path: &Path, recipe: &Path, runs: &[PlannedRun]) -> Result<(), Error> {
    let mut record = Record { format: FORMAT, recipe, shared: Vec::new(), variants: Vec::new() };
    for run in runs {
        let stages = |count| run.recipe.stages.iter().take(count).map(|stage| stage.name.as_str());
        let name = run.name.as_str();
        match &run.variant {
            None => {
                let stages = stages(usize::MAX).collect();
                record.shared.push(SharedStages { name, stages });
            }
            Some(variant) => record.variants.push(VariantRecord {
                name,
                overrides: &variant.overrides,
                shared_stages: stages(run.num_shared).collect(),
                changes: run.changes.iter().map(Change::new).collect(),
                results: results(&run.directory())?,
            }),
        }
    }
    let mut text =
        serde_json::to_vec_pretty(&record).map_err(|error| moh_files::io(path)(error.into()))?;
    text.push(b'\n');
    Ok(moh_files::write(path, &text).map_err(moh_files::io(path))?)
}

impl<'a> Change<'a> {
    fn new(change: &'a moh_checkpoint::run_directory::KeyChange) -> Self {
        let (recipe, variant) = (change.before.as_deref(), change.now.as_deref());
        Change { key: &change.key, recipe, variant }
    }
}

/// What is read of a record: the names of its variants.
#[derive(Debug, Deserialize)]
struct Known {
    format: u32,
    variants: Vec<KnownVariant>,
}

#[derive(Debug, Deserialize)]
struct KnownVariant {
    name: String,
}

/// The names of a record's variants; `None` if there is no record.
pub(super) fn names(path: &Path) -> Result<Option<Vec<String>>, Error> {
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

/// The mean speed of the steps of a run's last stage.
fn tokens_per_second(run: &RunDirectory) -> Result<Option<f64>, Error> {
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
