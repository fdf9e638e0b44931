//! The training loop: stages in order, conversion between them, checkpoints, and exact resuming
//! after an interruption at any point.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use moh_comm::Layout;
use moh_data::Windows;
use moh_eval::{Evaluator, Sums};
use moh_kernels::{Backend, Element, span};
use moh_model::model_parallel::ModelParallel;
use moh_model::parameters::Shard;
use moh_model::{Model, ModelConfig};

use crate::checkpoint::{self, Evaluation, Moment, RunState, TensorKind};
use crate::event::{Event, Outcome};
use crate::export;
use crate::metrics::{MetricsWriter, StepMetrics, Validation};
use crate::metrics_resume;
use crate::optimizer::OptimizerState;
use crate::recipe::{Parallel, Stage};
use crate::run::check_resumable;
use crate::run_data::RunData;
use crate::source::ModelSource;
use crate::step::{StepGroups, StepPlan, Stepper};
use crate::summary::Summary;
use crate::trace::{StepTrace, TraceSteps};
use crate::{Error, Ranks, Recipe, RunDirectory, SourceEpochs, TensorBoard};

/// The inputs of a run beside the device and the other ranks.
#[derive(Clone)]
pub(crate) struct Inputs<'a> {
    pub recipe: &'a Recipe,
    pub source: &'a ModelSource,
    pub run: &'a RunDirectory,
    pub stop: &'a AtomicBool,
    pub trace: &'a TraceSteps,
}

/// A run in progress; `T` is the type of weights and activations, `G` of gradients, `M` of moments.
struct Trainer<'a, 'e, B: Backend, T: Element, G: Element, M: Element> {
    inputs: Inputs<'a>,
    ranks: Ranks<B>,
    /// The groups of ranks in the current stage.
    groups: StepGroups,
    /// The parallelism that the groups were created for.
    parallel: Parallel,
    events: &'e mut dyn FnMut(Event<'_>),
    model: Model<B, T>,
    optimizer: OptimizerState<B, M>,
    data: RunData,
    /// `Some` on the first rank.
    metrics: Option<MetricsWriter>,
    board: Option<TensorBoard>,
    state: RunState,
    gradients: std::marker::PhantomData<G>,
}

/// Trains until the recipe is complete or `stop` is set on any rank; only the first rank calls
/// `events`.
pub(crate) fn train<B: Backend + Clone, T: Element, G: Element, M: Element>(
    backend: B,
    ranks: Ranks<B>,
    inputs: Inputs<'_>,
    data: RunData,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, Error> {
    let mut silence = |_: Event<'_>| {};
    let events = if ranks.is_first() { events } else { &mut silence };
    for path in data.without_end_of_text() {
        let text = format!(
            "{}: its documents have no end-of-text token, so the model does not learn where a text ends: \
             to append one, prepare the text without --no-append-eos",
            path.display()
        );
        events(Event::Warning { text: &text });
    }
    let sources = SourceEpochs::of_run(inputs.recipe, &data.training);
    let mut sources = Some(sources.as_slice());
    let (mut ranks, mut data) = (ranks, data);
    loop {
        let (backend, inputs) = (backend.clone(), inputs.clone());
        let mut trainer = Trainer::<B, T, G, M>::start(backend, ranks, inputs, data, &mut *events)?;
        if let Some(sources) = sources.take() {
            (trainer.events)(Event::Sources(sources));
        }
        match trainer.run()? {
            Progress::Done => return trainer.finish(),
            Progress::Stopped => return Ok(Outcome::Stopped { step: trainer.state.step }),
            // The next stage uses a different layout of ranks and starts from the last checkpoint.
            Progress::Divided => (ranks, data) = (trainer.ranks, trainer.data),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Done,
    Stopped,
    Divided,
}

impl<'a, 'e, B: Backend + Clone, T: Element, G: Element, M: Element> Trainer<'a, 'e, B, T, G, M> {
    /// Loads the newest valid checkpoint, or else the recipe's initial model.
    fn start(
        backend: B,
        mut ranks: Ranks<B>,
        inputs: Inputs<'a>,
        data: RunData,
        events: &'e mut dyn FnMut(Event<'_>),
    ) -> Result<Self, Error> {
        let Inputs { recipe, source, run, .. } = inputs;
        let stored = checkpoint::newest(run, &mut ranks, &mut |path, error| {
            events(Event::DamagedCheckpoint { path, error });
        })?;
        // After damage to the last one there may be none.
        ranks.first_does(|| {
            check_resumable(run)?;
            run.remove_summary()
        })?;
        let state = stored
            .as_ref()
            .map_or_else(RunState::default, |stored| stored.manifest().state.clone());
        if state.stage > recipe.stages.len() {
            return Err(Error::Checkpoint {
                path: run.checkpoint(state.step),
                reason: format!("is of stage {}, which the recipe does not have", state.stage),
            });
        }
        let mut config = source.config().clone();
        config.moh = attention_before(recipe, source, &state)?;
        let parallel = parallel_at(recipe, state.stage);
        let divided = divide(&ranks, parallel, &config);
        let (groups, place) = ranks.agree(divided)?;
        let model = Model::<B, T>::of_part::<Error>(
            backend,
            config,
            recipe.data.sequence_length,
            place,
            groups.data.size(),
            |segment, values| match &stored {
                Some(stored) => stored.read_f32(TensorKind::Weight, &segment.name, values),
                None => source.fill(segment, values),
            },
        )?;
        let mut optimizer = OptimizerState::new(&model, Shard::of(&groups.data))?;
        if let Some(stored) = &stored {
            optimizer.fill(model.backend(), model.layout(), |kind, segment, values| {
                stored.read_f32(kind, &segment.name, values)
            })?;
            events(Event::Resumed { step: state.step });
        }
        let writers =
            if ranks.is_first() { open_writers(run, recipe, &state).map(Some) } else { Ok(None) };
        let (metrics, board) = match ranks.agree(writers)? {
            Some(Writers { metrics, board, warning }) => {
                if let Some(text) = warning {
                    events(Event::Warning { text: &text });
                }
                (Some(metrics), board)
            }
            None => (None, None),
        };
        Ok(Trainer {
            metrics,
            inputs,
            ranks,
            groups,
            parallel,
            events,
            model,
            optimizer,
            data,
            board,
            state,
            gradients: std::marker::PhantomData,
        })
    }

    fn run(&mut self) -> Result<Progress, Error> {
        if self.state.step == 0 && self.state.evaluations.is_empty() {
            let batch = self.inputs.recipe.stages.first().map_or(1, |stage| stage.micro_batch);
            self.evaluate_moment(Moment::Loaded, batch)?;
        }
        while let Some(stage) = self.inputs.recipe.stages.get(self.state.stage) {
            if stage.parallel != self.parallel {
                return Ok(Progress::Divided);
            }
            if self.run_stage(stage)? == Progress::Stopped {
                return Ok(Progress::Stopped);
            }
        }
        Ok(Progress::Done)
    }

    /// Trains the remaining steps of the current stage.
    fn run_stage(&mut self, stage: &Stage) -> Result<Progress, Error> {
        if self.state.stage_step == 0 {
            self.begin_stage(stage)?;
        }
        let steps = stage.num_steps();
        let plan = StepPlan::new(self.inputs.recipe, stage);
        let mut stepper = Stepper::<B, T, G>::new(&self.model, plan, self.groups.clone())?;
        let mut evaluator = self.evaluator(stage.micro_batch)?;
        let memory = self.model.backend().memory_info();
        let (model, done) = (self.model.config(), self.state.stage_step);
        (self.events)(Event::Stage { stage, model, done, memory });
        let tensor = self.model.parallel().part().tensor;
        if let Some(shared_heads) = tensor.uneven_shared_heads(self.model.config()) {
            (self.events)(Event::UnevenHeads { stage, shared_heads: &shared_heads });
        }
        let schedule = stage.schedule();
        while self.state.stage_step < steps {
            let trace = self.trace_next();
            let step = span::enter_numbered("step", self.state.step + 1);
            let started = Instant::now();
            let number = self.state.stage_step + 1;
            let taken = stepper.step(
                &mut self.model,
                &mut self.optimizer,
                |sample, window, document_start| {
                    Ok(self.data.training.sample(sample, window, document_start)?)
                },
                self.state.sample,
                (number, schedule.learning_rate(number)),
            );
            let taken = match taken {
                // All ranks have the same values; one of them reports the error.
                Err(Error::NotFinite { .. }) if !self.ranks.is_first() => {
                    return Err(Error::OtherRank { rank: 0 });
                }
                taken => taken?,
            };
            let seconds = started.elapsed().as_secs_f64();
            self.state.step += 1;
            self.state.stage_step = number;
            self.state.tokens += stage.batch_tokens;
            self.state.sample += stepper.plan().batch_sequences();
            let last = number == steps;
            let validation = match self.validation_is_due(last) {
                true => {
                    stepper.wait_for_weights(&mut self.model)?;
                    self.validate(&mut evaluator)?
                }
                false => None,
            };
            if let Some(Validation { loss, .. }) = validation
                && !loss.is_finite()
            {
                let stage = stage.name.clone();
                return Err(Error::NotFinite { stage, step: number, loss, norm: taken.grad_norm });
            }
            let metrics = StepMetrics {
                stage: stage.name.clone(),
                step: number,
                tokens: self.state.tokens,
                loss: taken.loss,
                balance_loss: taken.balance_loss,
                learning_rate: schedule.learning_rate(number),
                grad_norm: taken.grad_norm,
                tokens_per_second: stage.batch_tokens as f64 / seconds,
                validation,
            };
            self.report(&metrics, last)?;
            if last {
                self.end_stage(stage, validation);
            }
            let stopping = self.ranks.any(self.inputs.stop.load(Ordering::Relaxed))?;
            let every = self.inputs.recipe.checkpoint.every_steps;
            if last || stopping || (every > 0 && self.state.step.is_multiple_of(every)) {
                stepper.wait_for_weights(&mut self.model)?;
                self.save()?;
            }
            drop(step);
            if let Some(trace) = trace {
                trace.write(self.inputs.run, self.ranks.group())?;
            }
            if stopping && self.state.stage < self.inputs.recipe.stages.len() {
                return Ok(Progress::Stopped);
            }
            if last {
                break;
            }
        }
        Ok(Progress::Done)
    }

    /// Records the next step if it is to be traced.
    fn trace_next(&self) -> Option<StepTrace<B>> {
        let step = self.state.step + 1;
        let wanted = self.inputs.trace.contains(step);
        wanted.then(|| StepTrace::new(step, self.model.backend().clone()))
    }

    /// Sets the stage's attention and resets the moments; evaluates the model if its attention
    /// changed.
    fn begin_stage(&mut self, stage: &Stage) -> Result<(), Error> {
        let moh = stage.moh_config(self.inputs.source.original_config())?;
        self.optimizer.reset(self.model.backend())?;
        if moh != self.model.config().moh {
            self.model.set_moh(moh)?;
            let active_heads = self.model.config().active_heads();
            let moment = Moment::Converted { stage: stage.name.clone(), active_heads };
            self.evaluate_moment(moment, stage.micro_batch)?;
        }
        Ok(())
    }

    fn end_stage(&mut self, stage: &Stage, validation: Option<Validation>) {
        self.state.stage += 1;
        self.state.stage_step = 0;
        if let Some(Validation { loss, bits_per_byte }) = validation {
            let moment = Moment::Trained { stage: stage.name.clone() };
            self.record(Evaluation { moment, step: self.state.step, loss, bits_per_byte });
        }
    }

    fn record(&mut self, evaluation: Evaluation) {
        let heads = self.model.config().num_attention_heads;
        (self.events)(Event::Evaluated { evaluation: &evaluation, heads });
        self.state.evaluations.push(evaluation);
    }

    fn evaluator(&self, batch: usize) -> Result<Option<Evaluator<B, T>>, Error> {
        let length = self.inputs.recipe.data.sequence_length;
        let plan = |_: &Windows| Evaluator::new(&self.model, batch, length);
        Ok(self.data.validation.as_ref().map(plan).transpose()?)
    }

    /// Whether the validation loss is evaluated after this step.
    fn validation_is_due(&self, last: bool) -> bool {
        let validation = self.inputs.recipe.data.validation.as_ref();
        let every = validation.map_or(0, |validation| validation.every_steps);
        last || (every > 0 && self.state.step.is_multiple_of(every))
    }

    /// The validation loss, if the recipe asks for one.
    fn validate(
        &mut self,
        evaluator: &mut Option<Evaluator<B, T>>,
    ) -> Result<Option<Validation>, Error> {
        let (Some(evaluator), Some(windows)) = (evaluator, &self.data.validation) else {
            return Ok(None);
        };
        let _span = span::enter("evaluation");
        let count = validation_windows(self.inputs.recipe);
        let events = &mut self.events;
        let mut progress = |done, total| events(Event::Evaluating { done, total });
        let tokenizer = self.data.tokenizer.as_ref();
        let shard = Shard::of(&self.groups.data);
        let sums = evaluator.evaluate_share(
            &mut self.model,
            windows,
            count,
            tokenizer,
            shard,
            &mut progress,
        )?;
        // Counts of tokens and bytes, which f64 represents exactly.
        let [cross_entropy, tokens, bytes] =
            self.ranks.sum([sums.cross_entropy, sums.tokens as f64, sums.bytes as f64])?;
        let found = Sums { cross_entropy, tokens: tokens as u64, bytes: bytes as u64 }.loss();
        Ok(Some(Validation { loss: found.loss, bits_per_byte: found.bits_per_byte }))
    }

    fn evaluate_moment(&mut self, moment: Moment, batch: usize) -> Result<(), Error> {
        let mut evaluator = self.evaluator(batch)?;
        if let Some(Validation { loss, bits_per_byte }) = self.validate(&mut evaluator)? {
            self.record(Evaluation { moment, step: self.state.step, loss, bits_per_byte });
        }
        Ok(())
    }

    /// Writes a step's metrics; every n-th step also goes to the terminal and TensorBoard.
    fn report(&mut self, metrics: &StepMetrics, last: bool) -> Result<(), Error> {
        if let Some(writer) = &mut self.metrics {
            writer.write(metrics)?;
        }
        let every = self.inputs.recipe.log.every_steps.max(1);
        let due = last || metrics.validation.is_some() || self.state.step.is_multiple_of(every);
        if due && let Some(board) = &mut self.board {
            board.write(self.state.step, metrics)?;
        }
        (self.events)(Event::Step { metrics, step: self.state.step, due });
        Ok(())
    }

    fn save(&mut self) -> Result<(), Error> {
        let _span = span::enter("checkpoint");
        // Resuming from the checkpoint of step n requires n lines of metrics.
        if let Some(writer) = &mut self.metrics {
            writer.sync()?;
        }
        let config = self.inputs.source.config_file().to_json(self.model.config(), None);
        let Inputs { run, recipe, .. } = self.inputs;
        let path = checkpoint::write(
            run,
            &mut self.ranks,
            &self.state,
            config,
            &self.model,
            &self.optimizer,
        )?;
        self.ranks.first_does(|| {
            run.mark()?;
            checkpoint::prune(run, &recipe.checkpoint)
        })?;
        (self.events)(Event::Checkpoint { path: &path });
        Ok(())
    }

    /// Exports the model and writes the summary, which marks the run as finished.
    fn finish(mut self) -> Result<Outcome, Error> {
        let Inputs { run, source, recipe, .. } = self.inputs;
        let summary = Summary::new(&self.state, self.model.config());
        self.ranks.first_does(|| {
            export::write(run, source, recipe, &self.model, self.state.step)?;
            summary.write(&run.summary())
        })?;
        Ok(Outcome::Finished(summary))
    }
}

/// The parallelism of the recipe's stage `index`, or of the last stage if there is no such stage.
fn parallel_at(recipe: &Recipe, index: usize) -> Parallel {
    let last = recipe.stages.len().saturating_sub(1);
    recipe.stages.get(index.min(last)).map_or_else(Parallel::default, |stage| stage.parallel)
}

/// This rank's groups and part of the model.
fn divide<B: Backend>(
    ranks: &Ranks<B>,
    parallel: Parallel,
    config: &ModelConfig,
) -> Result<(StepGroups, ModelParallel), Error> {
    let all = ranks.group().clone();
    // Validated with the recipe; the model's own check would reject 1.
    let count = |count: usize| NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN);
    let layout = Layout::new(all.size(), count(parallel.tensor), count(parallel.pipeline))?;
    let groups = layout.groups(&all)?;
    let pipeline = (groups.pipeline, parallel.virtual_stages);
    let parallel = ModelParallel::new(config, pipeline, groups.tensor)?;
    Ok((StepGroups { all, data: groups.data }, parallel))
}

/// The first rank's logs.
struct Writers {
    metrics: MetricsWriter,
    board: Option<TensorBoard>,
    /// What is lost of the metrics.
    warning: Option<String>,
}

/// Opens the first rank's logs, truncated to the state's step.
fn open_writers(run: &RunDirectory, recipe: &Recipe, state: &RunState) -> Result<Writers, Error> {
    let warning = metrics_resume::resume(run, recipe, state.step)?;
    let board = (recipe.log.tensorboard)
        .then(|| TensorBoard::create(&run.tensorboard(), state.step))
        .transpose()?;
    Ok(Writers { metrics: MetricsWriter::append_to(&run.metrics())?, board, warning })
}

/// The windows of one evaluation.
fn validation_windows(recipe: &Recipe) -> u64 {
    let batches = recipe.data.validation.as_ref().map_or(0, |validation| validation.batches);
    let sequences = recipe.stages.first().map_or(1, |stage| stage.micro_batch);
    (batches as u64).saturating_mul(sequences as u64)
}

/// The attention of the model at the state's step: the current stage's, or, before the stage's
/// first step, the previous stage's.
fn attention_before(
    recipe: &Recipe,
    source: &ModelSource,
    state: &RunState,
) -> Result<Option<moh_model::MohConfig>, Error> {
    let stage = if state.stage_step > 0 { Some(state.stage) } else { state.stage.checked_sub(1) };
    match stage.and_then(|index| recipe.stages.get(index)) {
        Some(stage) => Ok(stage.moh_config(source.original_config())?),
        None => Ok(source.config().moh.clone()),
    }
}
