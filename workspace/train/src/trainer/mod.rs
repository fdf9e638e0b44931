//! The training loop: stages in order, conversion between them, checkpoints, and exact resuming
//! after an interruption at any point.

mod evaluation;
mod save_clock;
mod saving;
mod stage;
mod start;
mod stop_checks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use evaluation::Evaluated;
use moh_checkpoint::RunState;
use moh_checkpoint::run_directory::{RunDirectory, growth};
use moh_checkpoint::run_log::{
    EvaluationPoint, MetricsWriter, PartTimes, RoutingWriter, Summary, TensorBoard, TraceSteps,
};
use moh_kernels::Backend;
use moh_kernels::span::Lane;
use moh_model::{Model, MohConfig};
use moh_plan::SourceEpochs;
use moh_recipe::{ParallelOptions, Recipe};
use moh_step::{OptimizerState, Ranks, StepGroups};
use saving::Saving;
pub(crate) use start::{
    attention_before, check_resumable, initial_model, warn_of_edited, zeros_of_part,
};

use crate::export::{self, Exported};
use crate::run_data::RunData;
use crate::teacher::Teachers;
use crate::{Error, Event, ModelSource, Outcome, Result, TimeLimit};

/// The inputs of a run besides the device and the other ranks.
#[derive(Clone)]
pub(crate) struct Inputs<'a> {
    pub recipe: &'a Recipe,
    pub source: &'a ModelSource,
    pub teachers: &'a Teachers,
    pub run: &'a RunDirectory,
    pub stop: &'a AtomicBool,
    pub trace: &'a TraceSteps,
    /// See [`crate::RunOptions`].
    pub time_limit: Option<TimeLimit>,
    /// The checkpoint to start from instead of the newest.
    pub resume_step: Option<u64>,
    /// The state of the trainer before, if a stage needs another layout of ranks or other tensors.
    pub left: Option<Left>,
}

/// The state that a trainer passes to the next trainer before a stage starts.
#[derive(Clone)]
pub(crate) struct Left {
    /// The state of the last checkpoint, possibly with an evaluation that the checkpoint lacks.
    state: RunState,
    /// The attention of the stage, if the model must be created with the matrices of its router.
    gets_matrices: Option<MohConfig>,
}

/// A run in progress.
struct Trainer<'a, 'e, B: Backend> {
    inputs: Inputs<'a>,
    ranks: Ranks<B>,
    /// The groups of ranks in the current stage.
    groups: StepGroups,
    /// The parallelism that the groups were created for.
    parallel: ParallelOptions,
    events: &'e mut dyn FnMut(Event<'_>),
    /// The attention with which the weights were trained, until a stage starts with another attention.
    attention: Option<MohConfig>,
    model: Model<B>,
    optimizer: OptimizerState<B>,
    data: RunData,
    /// `Some` on the first rank.
    metrics: Option<MetricsWriter>,
    board: Option<TensorBoard>,
    /// `Some` on the first rank.
    routing: Option<RoutingWriter>,
    part_times: Arc<PartTimes>,
    background: Arc<Lane>,
    state: RunState,
    saving: Saving,
}

/// Trains until the recipe is complete, `stop` is set on any rank or the time limit ends. Only the first rank calls
/// `events`.
pub(crate) fn train<B: Backend + Clone>(
    backend: B,
    ranks: Ranks<B>,
    inputs: Inputs<'_>,
    data: RunData,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome> {
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
    let (mut ranks, mut data, mut is_first_start) = (ranks, data, true);
    let (mut resume_step, mut left) = (inputs.resume_step, None);
    loop {
        let (step, before) = (resume_step.take(), left.take());
        let inputs = Inputs { resume_step: step, left: before, ..inputs.clone() };
        let backend = backend.clone();
        let mut trainer = Trainer::start(backend, ranks, inputs, data, &mut *events)?;
        if std::mem::take(&mut is_first_start) {
            let sources = SourceEpochs::of_run(trainer.inputs.recipe, &trainer.data.training);
            (trainer.events)(Event::Sources(&sources));
        }
        // Another layout of ranks and a model with more tensors start from the last checkpoint.
        let gets_matrices = match trainer.run()? {
            Progress::Done => return trainer.finish(),
            Progress::Stopped => return Ok(trainer.stopped()),
            Progress::LayoutChanged => None,
            Progress::GetsMatrices(moh) => Some(*moh),
        };
        left = Some(Left { state: trainer.state, gets_matrices });
        (ranks, data) = (trainer.ranks, trainer.data);
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Progress {
    Done,
    Stopped,
    /// The next stage has another layout of ranks.
    LayoutChanged,
    /// The next stage has this attention. Its router has matrices that the model lacks.
    GetsMatrices(Box<MohConfig>),
}

impl<B: Backend + Clone> Trainer<'_, '_, B> {
    fn run(&mut self) -> Result<Progress> {
        if self.state.step == 0 && self.state.evaluations.is_empty() {
            let batch = self.inputs.recipe.stages.first().map_or(1, |stage| stage.micro_batch);
            if self.evaluate_at(EvaluationPoint::Loaded, batch)? == Evaluated::Stopped {
                return Ok(Progress::Stopped);
            }
        }
        while let Some(stage) = self.inputs.recipe.stages.get(self.state.stage) {
            let progress = match stage.parallel == self.parallel {
                true => self.run_stage(stage)?,
                false => Progress::LayoutChanged,
            };
            if progress != Progress::Done {
                self.finish_saving()?;
                return Ok(progress);
            }
            growth::reopen(&mut self.state, self.inputs.recipe);
        }
        self.finish_saving()?;
        Ok(Progress::Done)
    }

    /// Returns the outcome of a run that was asked to stop. Before the first step there is no checkpoint.
    fn stopped(&self) -> Outcome {
        match self.state.step {
            0 => Outcome::StoppedBeforeTraining,
            step => Outcome::Stopped { step },
        }
    }

    /// Exports the model and writes the summary, which marks the run as finished.
    fn finish(mut self) -> Result<Outcome> {
        // The export would recreate a directory that was moved or removed.
        self.ranks.on_rank0::<_, Error>(|| Ok(self.inputs.run.check_mark()?))?;
        self.check_loss()?;
        if self.export()? == Exported::Stopped {
            return Ok(self.stopped());
        }
        let summary = Summary {
            steps: self.state.step,
            tokens: self.state.tokens,
            heads: self.model.config().num_attention_heads,
            evaluations: self.state.evaluations.clone(),
            calibrations: self.state.calibrations.clone(),
        };
        let path = self.inputs.run.summary();
        self.ranks.on_rank0(|| Ok::<_, Error>(summary.write(&path)?))?;
        Ok(Outcome::Finished(summary))
    }

    /// Exports the model on the first rank. If a rank is asked to stop meanwhile, there is no new export, and the last
    /// checkpoint has the model.
    fn export(&mut self) -> Result<Exported> {
        let Trainer { ranks, model, state, events, .. } = self;
        let Inputs { run, source, recipe, stop, .. } = self.inputs;
        let is_asked = || stop.load(Ordering::Relaxed);
        if ranks.is_first() {
            // Called before each tensor.
            let mut go_on = || Ok(!ranks.any_of([is_asked(), false])?[0]);
            let written = export::keep_foreign(run, state.step).and_then(|kept| {
                if let Some(aside) = kept {
                    let (export, aside) = (run.export(), aside.display());
                    let text = format!(
                        "{} holds not only an export, and is kept as {aside}",
                        export.display()
                    );
                    events(Event::Warning { text: &text });
                }
                export::write(run, source, recipe, model, state, &mut go_on)
            });
            if matches!(written, Ok(Exported::Stopped)) {
                return Ok(Exported::Stopped);
            }
            ranks.any_of([false, true])?;
            return ranks.agree(written);
        }
        loop {
            let [stops, ends] = ranks.any_of([is_asked(), false])?;
            if ends {
                return ranks.agree(Ok(Exported::Complete));
            }
            if stops {
                return Ok(Exported::Stopped);
            }
        }
    }
}
