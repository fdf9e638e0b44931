//! The replay of one step of a run, to find why its numbers are bad. It starts from the newest checkpoint before the
//! step, does not apply the step's update, and does not change the run directory.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use moh_checkpoint::run_directory::{RunDirectory, growth};
use moh_checkpoint::{RunState, StageExtension, StoredCheckpoint, steps_at};
use moh_comm::World;
use moh_data::TrainingData;
use moh_kernels::Backend;
use moh_kernels::open_device::{OnDevice, OpenDevice};
use moh_model::model_parallel::ModelParallel;
use moh_model::parameters::Shard;
use moh_model::router::RoutingStatistics;
use moh_model::{Activations, BlockMagnitudes, Model, ModelConfig, MohConfig, PassSlot, Recompute};
use moh_plan::step_config;
use moh_recipe::{ParallelOptions, Recipe, Stage};
use moh_step::guard::Limits;
use moh_step::{
    Observer, OptimizerState, StepGroups, StepResult, Stepper, TensorGradient, TensorKind,
};

use crate::calibration::{CalibrationRecord, attention_of};
use crate::run_data::RunData;
use crate::run_inputs::check_order;
use crate::teacher::Teachers;
use crate::trainer::{attention_before, initial_model, zeros_of_part};
use crate::{Error, ModelSource, Result};

/// A replayed step.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// Steps of the checkpoint from which the run was repeated; 0 for the initial model.
    pub from: u64,
    /// The step, over all stages.
    pub step: u64,
    /// Name of its stage.
    pub stage: String,
    /// The step within the stage, from 1.
    pub stage_step: u64,
    /// Its measurements.
    pub result: StepResult,
    /// Its learning rate.
    pub learning_rate: f64,
    /// The limits within which the step is applied.
    pub limits: Limits,
    /// The residual stream in each block, over all micro-batches.
    pub blocks: Vec<BlockMagnitudes>,
    /// The norm of each tensor's gradient, in the order of the model.
    pub gradients: Vec<TensorGradient>,
    /// Loads and entropy of the layers that route, over all micro-batches.
    pub routing: RoutingStatistics,
    /// Its samples, in order.
    pub samples: Vec<SampleSource>,
}

/// The place of a sample's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleSource {
    /// The sample's number.
    pub number: u64,
    /// The token file, without its endings.
    pub path: PathBuf,
    /// Positions of its tokens in the file. The last token is only a target.
    pub tokens: Range<u64>,
    /// The documents of the file that contain these tokens.
    pub documents: Range<u64>,
}

/// Replays step `step` of the run in `run`. Errors name its `recipe` by `path`. `directory` is the local directory of
/// `[model] from`. It is needed only if the step is replayed from the initial model, or if the run does not keep its
/// model.
///
/// One process does the work of all ranks. A run on several ranks sums in another order, so its values agree up to
/// rounding. Whole blocks are not recomputed, because their activations are measured.
///
/// # Errors
/// Fails if the run does not have the step, or mixes its sources in the order of another version. Fails if a file is
/// missing or damaged, or if the device fails, as when the model does not fit its memory.
pub fn replay(
    run: &RunDirectory,
    mut recipe: Recipe,
    path: &Path,
    directory: Option<&Path>,
    device: OpenDevice,
    step: u64,
) -> Result<Replay> {
    let steps = recipe.num_steps();
    if step == 0 || step > steps {
        return Err(no_such_step(run.root(), step, steps));
    }
    for stage in &mut recipe.stages {
        stage.parallel = ParallelOptions::default();
    }
    if recipe.memory.recompute == Recompute::Block {
        recipe.memory.recompute = Recompute::Norms;
    }
    let stored = newest_before(run, step)?;
    let source = match stored.is_some() && run.keeps_model(&recipe)? {
        true => ModelSource::open_kept(&recipe, path, &run.model())?,
        false => ModelSource::open(&recipe, path, directory)?,
    };
    recipe.resolve(path, source.original_config())?;
    // The run has accepted the tokenizer.
    let data = RunData::open(&recipe, &source)?;
    check_order(run, &data.training)?;
    let teachers = &Teachers::open(&recipe, path, &source)?;
    let growth = growth::read(&run.growth())?;
    let (recipe, source) = (&recipe, &source);
    let job = Job { run, recipe, source, teachers, data, growth, stored, step };
    device.run(job)
}

fn no_such_step(run: &Path, step: u64, steps: u64) -> Error {
    moh_files::unusable(run, format!("has no step {step}: use 1 to {steps}")).into()
}

/// Returns the step of the checkpoint from which [`replay`] starts; 0 for the initial model.
pub fn replay_from(run: &RunDirectory, step: u64) -> Result<u64> {
    let stored = newest_before(run, step)?;
    Ok(stored.map_or(0, |stored| stored.manifest().state.step))
}

/// Returns the newest checkpoint before a step. Its tensors are checked when they are read.
fn newest_before(run: &RunDirectory, step: u64) -> Result<Option<StoredCheckpoint>> {
    let found = run.checkpoint_steps()?.into_iter().rfind(|&found| found < step);
    Ok(found.map(|found| run.stored(found)).transpose()?)
}

/// The inputs of a replay.
struct Job<'a> {
    run: &'a RunDirectory,
    recipe: &'a Recipe,
    source: &'a ModelSource,
    teachers: &'a Teachers,
    data: RunData,
    growth: Vec<StageExtension>,
    stored: Option<StoredCheckpoint>,
    step: u64,
}

impl OnDevice for Job<'_> {
    type Output = Result<Replay>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let mut replayer = Replayer::new(backend, self)?;
        loop {
            if let Some(replay) = replayer.advance()? {
                return Ok(replay);
            }
        }
    }
}

/// A run that is repeated on one rank.
struct Replayer<'a, B: Backend> {
    job: Job<'a>,
    model: Model<B>,
    optimizer: OptimizerState<B>,
    state: RunState,
}

impl<'a, B: Backend + Clone> Replayer<'a, B> {
    /// Loads the checkpoint, or the initial model.
    fn new(backend: B, job: Job<'a>) -> Result<Self> {
        let (source, stored) = (job.source, &job.stored);
        let state = stored.as_ref().map(|stored| stored.manifest().state.clone());
        let mut state = state.unwrap_or_default();
        state.growth.clone_from(&job.growth);
        growth::reopen(&mut state, job.recipe);
        let mut config = source.config.clone();
        config.moh = attention_before(job.run, source, stored.as_ref())?;
        let (recipe, whole) = (job.recipe, ModelParallel::whole(&config));
        let Some(stored) = stored else {
            let (model, optimizer) =
                initial_model(backend, recipe, config, whole, Shard::WHOLE, source)?;
            state.moment_steps = source.moment_steps();
            return Ok(Replayer { job, model, optimizer, state });
        };
        let (mut model, mut optimizer) =
            zeros_of_part(backend, recipe, config, whole, Shard::WHOLE)?;
        moh_checkpoint::load(stored, &mut model, &mut optimizer, &[])
            .map_err(moh_checkpoint::Error::from)?;
        Ok(Replayer { job, model, optimizer, state })
    }

    /// Runs the steps of the current stage. If the replayed step is one of them, measures it and returns the replay.
    fn advance(&mut self) -> Result<Option<Replay>> {
        let recipe = self.job.recipe;
        // The step is one of the recipe's, so a stage remains.
        let Some(stage) = recipe.stages.get(self.state.stage) else {
            return Err(no_such_step(&recipe.run.dir, self.job.step, recipe.num_steps()));
        };
        if self.state.stage_step == 0 {
            self.convert(stage)?;
            self.state.begin_stage(&mut self.optimizer, self.model.backend())?;
        }
        let group = World::single().group().clone();
        let groups = StepGroups { all: group.clone(), data: group };
        let config = step_config(recipe, stage);
        self.model.set_teacher(None)?;
        let teacher = self.job.teachers.of_stage(self.state.stage).zip(config.distillation);
        if let Some((teacher, distillation)) = teacher {
            let (source, pass) = (self.job.source, config.pass_shape());
            let teacher = teacher.load(source, &self.model, pass, distillation)?;
            self.model.set_teacher(Some(teacher))?;
        }
        let mut stepper = Stepper::new(&self.model, config, groups)?;
        let steps = |state: &RunState| steps_at(stage, &state.growth, state.step);
        while self.state.stage_step < steps(&self.state) {
            if self.state.step + 1 == self.job.step {
                return self.measure(stage, &mut stepper).map(Some);
            }
            self.step(stage, &mut stepper)?;
        }
        self.state.end_stage();
        growth::reopen(&mut self.state, recipe);
        Ok(None)
    }

    /// Sets the attention with which a stage starts, and applies the result of its calibration.
    fn convert(&mut self, stage: &Stage) -> Result<()> {
        let Job { run, recipe, source, .. } = &self.job;
        let before = self.model.config().moh.clone();
        let moh = attention_of(recipe, self.state.stage, source, before.as_ref())?;
        let Some(given) = moh.as_ref().filter(|_| stage.calibration().is_some()) else {
            return self.set_attention(moh);
        };
        let record = CalibrationRecord::read(run, self.state.step)?;
        let record = record.filter(|record| record.calibration.stage == stage.name);
        let Some(record) = record else {
            let reason = format!(
                "the result of the calibration of stage {} is not there any more, and the steps before the stage's \
                 first checkpoint cannot be replayed without it",
                stage.name
            );
            return Err(moh_files::unusable(&run.calibration(self.state.step), reason).into());
        };
        let (moh, run) = (record.moh(given.router, self.model.config())?, *run);
        self.set_attention(Some(moh))?;
        record.apply(run, &mut self.model, &mut self.optimizer)
    }

    /// Sets another attention of the model. Matrices that its router adds are zeros.
    fn set_attention(&mut self, moh: Option<MohConfig>) -> Result<()> {
        let added = self.model.config().added_tensors(moh.as_ref())?;
        if added.is_empty() {
            return Ok(self.model.set_moh(moh)?);
        }
        let (before, state) = (&self.model, &self.optimizer);
        let config = ModelConfig { moh, ..before.config().clone() };
        let (backend, whole) = (before.backend().clone(), ModelParallel::whole(&config));
        let (mut model, mut optimizer) =
            zeros_of_part(backend.clone(), self.job.recipe, config, whole, Shard::WHOLE)?;
        let places: HashMap<&str, (usize, usize)> = before
            .layout()
            .segments()
            .map(|(flat, segment)| (segment.name.as_str(), (flat, segment.range.start)))
            .collect();
        optimizer.fill(&mut model, |kind, segment, part, values| {
            let Some(&(flat, start)) = places.get(segment.name.as_str()) else {
                values.fill(0.0);
                return Ok(());
            };
            let range = start + part.start..start + part.end;
            let found = match kind {
                TensorKind::Weight => state.exact_weights(before, flat, range)?,
                TensorKind::FirstMoment => state.first_moment.read_range(&backend, flat, range)?,
                TensorKind::SecondMoment => {
                    state.second_moment.read_range(&backend, flat, range)?
                }
            };
            values.copy_from_slice(&found);
            Ok::<(), Error>(())
        })?;
        (self.model, self.optimizer) = (model, optimizer);
        Ok(())
    }

    fn step(&mut self, stage: &Stage, stepper: &mut Stepper<B>) -> Result<()> {
        let guard = &self.job.recipe.guard;
        let update = self.state.next_update(stage, guard);
        let (read, first) = (self.job.data.sample_reader(self.state.stage), self.state.sample);
        let result = stepper.step(&mut self.model, &mut self.optimizer, read, first, update)?;
        self.state.count(stage, guard, &result, stepper.config().batch_sequences());
        Ok(())
    }

    fn measure(&mut self, stage: &Stage, stepper: &mut Stepper<B>) -> Result<Replay> {
        let update = self.state.next_update(stage, &self.job.recipe.guard);
        let (read, first) = (self.job.data.sample_reader(self.state.stage), self.state.sample);
        let mut seen = Seen {
            blocks: vec![BlockMagnitudes::default(); self.model.config().num_hidden_layers],
            routing: self.model.routing_statistics(),
        };
        let result = stepper.measure(&mut self.model, &self.optimizer, read, first, &mut seen)?;
        let gradients = stepper.gradient_norms(&self.model)?;
        let samples = first..first + stepper.config().batch_sequences();
        Ok(Replay {
            from: self.job.stored.as_ref().map_or(0, |stored| stored.manifest().state.step),
            step: self.job.step,
            stage: stage.name.clone(),
            stage_step: self.state.stage_step + 1,
            result: StepResult { skipped: result.check(&update.limits), ..result },
            learning_rate: update.learning_rate,
            limits: update.limits,
            blocks: seen.blocks,
            gradients,
            routing: seen.routing,
            samples: sources(&self.job.data.training[self.state.stage], samples)?,
        })
    }
}

struct Seen {
    blocks: Vec<BlockMagnitudes>,
    routing: RoutingStatistics,
}

impl<B: Backend> Observer<B> for Seen {
    fn forward_done(
        &mut self,
        model: &Model<B>,
        activations: &Activations<B>,
        slot: PassSlot,
    ) -> Result<(), moh_step::Error> {
        model.add_magnitudes(activations, slot, &mut self.blocks)?;
        Ok(model.add_routings(activations, slot, &mut self.routing)?)
    }
}

fn sources(data: &TrainingData, samples: Range<u64>) -> Result<Vec<SampleSource>> {
    let source = |number| {
        let (source, start) = data.locate(number);
        let file = &data.files()[source];
        let tokens = start..start + data.sequence_length() as u64 + 1;
        let documents = file.documents_of(tokens.clone())?;
        Ok(SampleSource { number, path: file.prefix().to_owned(), tokens, documents })
    };
    samples.map(source).collect()
}
