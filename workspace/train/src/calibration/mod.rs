//! The calibration of a stage that converts a dense model. Before the stage's first step, crate `moh-calibrate` chooses
//! the shared heads, refits the output projections, and fits the matrices of a learned router. It measures sequences
//! that the stage does not train on.
//!
//! The first rank alone measures. It reads the weights by their names, from the initial model or from the last
//! checkpoint of the stage before. Its result is two files of the run directory: the layers (`layer_log.rs`), from
//! which each rank reads its part, and the choices (`record.rs`). A run that is interrupted before the second file is
//! written resumes after the layers that it has measured. After the stage's first checkpoint the run does not need the
//! files.

mod layer_log;
mod record;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

pub use layer_log::LayerLog;
use moh_calibrate::{CalibrationTokens, FoundLayer, LayerStore, Watch, calibrate};
use moh_checkpoint::{RunDirectory, RunState, StoredCheckpoint};
use moh_data::TrainingData;
use moh_kernels::Backend;
use moh_model::{ModelConfig, ModelLayout, MohConfig, Segment};
use moh_recipe::{CalibrationOptions, Recipe, Stage};
use moh_step::{Ranks, TensorKind};
pub(crate) use record::CalibrationRecord;
pub use record::calibrated_layer;

use crate::source::parts_identity;
use crate::{Error, Event, ModelSource, Result};

/// The time between two exchanges of the ranks that wait for a calibration: far below the time limit of an operation.
const EXCHANGE_EVERY: Duration = Duration::from_secs(1);

/// The calibration of a stage, before the stage starts.
pub(crate) struct StageMeasurement<'a> {
    recipe: &'a Recipe,
    run: &'a RunDirectory,
    source: &'a ModelSource,
    stage: &'a str,
    /// Steps before the stage, over all stages.
    step: u64,
    /// The model before the conversion.
    dense: ModelConfig,
    options: moh_calibrate::CalibrationOptions,
    tokens: CalibrationTokens,
}

/// The source of the measured weights.
enum Weights<'a> {
    /// The initial model, and its tensors.
    Initial(&'a ModelSource, HashMap<String, Segment>),
    Checkpoint(Box<StoredCheckpoint>),
}

impl<'a> StageMeasurement<'a> {
    /// Returns the calibration of the stage that `state` starts, or `None` if the stage has no calibration; `data` is
    /// the stage's.
    ///
    /// # Errors
    /// Fails if the tokens cannot be read, or are too few.
    pub fn new(
        recipe: &'a Recipe,
        run: &'a RunDirectory,
        source: &'a ModelSource,
        state: &RunState,
        data: &TrainingData,
    ) -> Result<Option<Self>> {
        let Some(stage) = recipe.stages.get(state.stage) else { return Ok(None) };
        let Some(calibration) = stage.calibration() else { return Ok(None) };
        let Some(moh) = stage.moh_config(source.original_config())? else { return Ok(None) };
        let dense = ModelConfig { moh: None, ..source.config.clone() };
        // Samples after the stage's own: a training loss on fitted samples says little.
        let own = stage.num_steps().saturating_mul(recipe.batch_sequences(stage));
        let ids = first_tokens(data, state.sample.saturating_add(own), &calibration)?;
        let tokens =
            CalibrationTokens::new(ids, data.sequence_length(), calibration.search_tokens, &dense)
                .map_err(|source| error(recipe, &stage.name, source))?;
        let CalibrationOptions { shared, refit, .. } = calibration;
        // Training continues with f32 values.
        let options = moh_calibrate::CalibrationOptions { moh, shared, refit, stored: None };
        let (stage, step) = (stage.name.as_str(), state.step);
        Ok(Some(StageMeasurement { recipe, run, source, stage, step, dense, options, tokens }))
    }

    /// Returns the result. An earlier result is used if it is for the same weights, tokens and options. Otherwise the
    /// first rank measures, and writes a new result into the run directory. Returns `None` if `is_asked`, whether this
    /// rank is asked to stop, becomes true on any rank.
    pub fn result<B: Backend + Clone>(
        &self,
        backend: &B,
        ranks: &mut Ranks<B>,
        is_asked: &dyn Fn() -> bool,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<Option<CalibrationRecord>> {
        let known = ranks.on_rank0(|| self.known(&self.weights()?))?;
        let mut known = known.flatten();
        let is_known = known.is_some();
        if !ranks.any(is_known)? {
            let measured = self.on_first_rank(backend, ranks, is_asked, events);
            known = ranks.agree(measured)?;
        }
        let path = self.run.calibration(self.step);
        let text = known.map(|record| record.text(&path)).transpose();
        let text = ranks.agree(text)?;
        let text = ranks.first_that_has(text)?;
        text.map(|text| CalibrationRecord::parse(&text, &path)).transpose()
    }

    /// Returns the routing of a result.
    pub fn moh(&self, record: &CalibrationRecord) -> Result<MohConfig> {
        Ok(record.moh(self.options.moh.router, &self.dense)?)
    }

    /// Returns the result in the run directory, if it is complete and for the same weights, tokens and options.
    fn known(&self, weights: &Weights<'_>) -> Result<Option<CalibrationRecord>> {
        let identity = self.identity(weights);
        let record = CalibrationRecord::read(self.run, self.step)?;
        let record = record.filter(|record| record.identity == identity);
        Ok(record.filter(|record| record.has_layers(self.run)))
    }

    fn weights(&self) -> Result<Weights<'a>> {
        if self.step > 0 {
            return Ok(Weights::Checkpoint(Box::new(self.run.stored(self.step)?)));
        }
        let layout = ModelLayout::new(&self.dense);
        let segments =
            layout.segments().map(|(_, segment)| (segment.name.clone(), segment.clone()));
        Ok(Weights::Initial(self.source, segments.collect()))
    }

    /// Returns the identity of the calibration.
    fn identity(&self, weights: &Weights<'_>) -> String {
        let weights = match weights {
            Weights::Checkpoint(stored) => parts_identity(stored),
            Weights::Initial(source, _) => {
                source.identity().unwrap_or_else(|| format!("seed {}", self.recipe.run.seed))
            }
        };
        let weights = format!("{weights} of stage {}", self.stage);
        calibration_identity(&weights, &self.dense, &self.options, &self.tokens)
    }

    /// Measures on the first rank, in a thread. Meanwhile the ranks exchange whether any rank was asked to stop.
    /// Returns `None` on the other ranks.
    fn on_first_rank<B: Backend + Clone>(
        &self,
        backend: &B,
        ranks: &mut Ranks<B>,
        is_asked: &dyn Fn() -> bool,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<Option<CalibrationRecord>> {
        if !ranks.is_first() {
            while !ranks.any_of([is_asked(), false])?[1] {}
            return Ok(None);
        }
        let stops = AtomicBool::new(false);
        let (sender, layers) = mpsc::channel();
        std::thread::scope(|scope| {
            let (backend, stops) = (backend.clone(), &stops);
            let work = scope.spawn(move || {
                let mut progress = |done: usize, total: usize| {
                    // The receiver may have failed.
                    let _ = sender.send((done as u64, total as u64));
                };
                let is_stopped = || stops.load(Ordering::Relaxed);
                let watch = Watch { progress: &mut progress, is_stopped: &is_stopped };
                self.measure(&backend, watch)
            });
            loop {
                match layers.recv_timeout(EXCHANGE_EVERY) {
                    Ok((done, total)) => events(Event::Calibrating { done, total }),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                match ranks.any_of([is_asked(), false]) {
                    Ok([asked, _]) => stops.fetch_or(asked, Ordering::Relaxed),
                    Err(error) => {
                        stops.store(true, Ordering::Relaxed);
                        return Err(error.into());
                    }
                };
            }
            ranks.any_of([false, true])?;
            work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Measures the layers, and writes the result.
    fn measure<B: Backend + Clone>(
        &self,
        backend: &B,
        watch: Watch<'_>,
    ) -> Result<Option<CalibrationRecord>> {
        let weights = self.weights()?;
        let identity = self.identity(&weights);
        let mut log = LayerLog::open(&self.run.calibrated_layers(self.step), identity.clone())?;
        let found = calibrate::<B, Failure>(
            backend,
            &self.dense,
            &self.options,
            &self.tokens,
            &mut |name, values| Ok(self.read(&weights, name, values)?),
            &mut log,
            watch,
        );
        let found = found.map_err(|failure| match failure {
            Failure::Run(error) => error,
            Failure::Calibration(source) => error(self.recipe, self.stage, source),
        })?;
        let Some(found) = found else { return Ok(None) };
        let (place, refit) = ((self.stage, self.step), self.options.refit);
        let record = CalibrationRecord::new(identity, place, &self.tokens, &found, refit);
        let path = self.run.calibration(self.step);
        moh_files::write(&path, &record.text(&path)?).map_err(moh_files::io(&path))?;
        Ok(Some(record))
    }

    /// Reads a tensor of the measured model.
    fn read(&self, weights: &Weights<'_>, name: &str, values: &mut [f32]) -> Result<()> {
        match weights {
            Weights::Checkpoint(stored) => Ok(stored.read_f32(TensorKind::Weight, name, values)?),
            Weights::Initial(source, segments) => match segments.get(name) {
                Some(segment) => source.fill(segment, values),
                None => {
                    let reason = format!("the run's model has no {name}");
                    Err(moh_files::unusable(self.run.root(), reason).into())
                }
            },
        }
    }
}

impl<E: From<Error>> LayerStore<E> for LayerLog {
    fn known(&mut self, layer: usize) -> Result<Option<FoundLayer>, E> {
        Ok(self.layer(layer)?)
    }

    fn keep(&mut self, found: FoundLayer) -> Result<(), E> {
        Ok(LayerLog::keep(self, &found)?)
    }
}

/// Returns the identity of a calibration: a hash of the dense model, the options, the tokens, and `weights`, a text
/// that differs where the weights differ.
pub fn calibration_identity(
    weights: &str,
    dense: &ModelConfig,
    options: &moh_calibrate::CalibrationOptions,
    tokens: &CalibrationTokens,
) -> String {
    let moh_calibrate::CalibrationOptions { moh, shared, refit, stored } = options;
    let ids: Vec<u8> = tokens.ids().iter().flat_map(|id| id.to_le_bytes()).collect();
    let described = serde_json::json!({
        "weights": weights,
        "config": moh_hf::ConfigFile::new(dense).fields,
        "router": moh.router.name(),
        "heads": (0..dense.num_hidden_layers)
            .map(|layer| moh.layer(layer))
            .map(|heads| (heads.shared.heads().collect::<Vec<_>>(), heads.top_k))
            .collect::<Vec<_>>(),
        "shared": format!("{shared:?}"),
        "refit": refit,
        "stored": stored.map(|dtype| dtype.name()),
        "length": tokens.length(),
        "search": tokens.search_tokens(),
        "tokens": blake3::hash(&ids).to_hex().as_str(),
    });
    blake3::hash(described.to_string().as_bytes()).to_hex().to_string()
}

enum Failure {
    Run(Error),
    Calibration(moh_calibrate::Error),
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::Run(error.into())
    }
}

impl From<moh_calibrate::Error> for Failure {
    fn from(error: moh_calibrate::Error) -> Self {
        match error {
            moh_calibrate::Error::Model(error) => Failure::Run(error.into()),
            error => Failure::Calibration(error),
        }
    }
}

fn error(recipe: &Recipe, stage: &str, source: moh_calibrate::Error) -> Error {
    let reason = format!("stage.{stage}.moh.calibration: {source}");
    moh_files::unusable(&recipe.run.dir, reason).into()
}

/// Returns the tokens of the calibration's samples, from sample `first` on, without each sample's final target.
fn first_tokens(
    data: &TrainingData,
    first: u64,
    calibration: &CalibrationOptions,
) -> Result<Vec<u32>> {
    let length = data.sequence_length();
    let mut window = vec![0; length + 1];
    let mut ids = Vec::new();
    for number in first..first.saturating_add(calibration.sequences(length)) {
        data.sample(number, &mut window, None)?;
        ids.extend_from_slice(&window[..length]);
    }
    Ok(ids)
}

/// Returns the attention of stage `index`, from the recipe. `before` is the model's attention until then. Heads that an
/// earlier stage has calibrated are kept. If the stage itself is calibrated, this is its attention without the
/// calibration. Fails if the recipe's heads do not fit the model.
pub(crate) fn attention_of(
    recipe: &Recipe,
    index: usize,
    source: &ModelSource,
    before: Option<&MohConfig>,
) -> Result<Option<MohConfig>> {
    let Some(stage) = recipe.stages.get(index) else { return Ok(before.cloned()) };
    let moh = stage.moh_config(source.original_config())?;
    let calibrated = recipe.calibrated_stage(index).filter(|of| of.name != stage.name);
    let calibration = calibrated.and_then(Stage::calibration);
    Ok(match (moh, before, calibration) {
        // The recipe has the same numbers for both stages.
        (Some(_), Some(before), Some(calibration)) if calibration.chooses_numbers() => {
            Some(before.clone())
        }
        (Some(moh), Some(before), Some(_)) => {
            Some(MohConfig { shared_heads: before.shared_heads.clone(), ..moh })
        }
        (moh, ..) => moh,
    })
}
