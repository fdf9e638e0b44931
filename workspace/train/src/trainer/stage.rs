//! The steps of a stage.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use moh_checkpoint::run_log::{EvaluationPoint, RoutingMoment, Speed, StepMetrics, StepTrace};
use moh_checkpoint::steps_at;
use moh_kernels::{Backend, span};
use moh_plan::step_config;
use moh_recipe::Stage;
use moh_step::guard::SkipReason;
use moh_step::{Evaluator, StepConfig, Stepper};

use super::evaluation::{Evaluated, Losses};
use super::{Inputs, Progress, Trainer};
use crate::calibration::{CalibrationRecord, StageMeasurement, attention_of};
use crate::step_speed::Rates;
use crate::{Error, Event, Result, TimeLimit};

/// The buffers of a stage's steps.
struct Work<'a, B: Backend> {
    stage: &'a Stage,
    rates: Rates,
    stepper: Stepper<B>,
    /// `None` without validation data.
    evaluator: Option<Evaluator<B>>,
}

impl<B: Backend + Clone> Trainer<'_, '_, B> {
    /// Trains the remaining steps of the current stage.
    pub(super) fn run_stage(&mut self, stage: &Stage) -> Result<Progress> {
        if self.state.stage_step == 0 {
            // A calibration reads the last checkpoint of the stage before.
            if stage.calibration().is_some() {
                self.finish_saving()?;
            }
            let progress = self.begin_stage(stage)?;
            if progress != Progress::Done {
                return Ok(progress);
            }
        }
        let config = step_config(self.inputs.recipe, stage);
        self.set_teacher(&config)?;
        let stepper = Stepper::new(&self.model, config, self.groups.clone())?;
        let evaluator = self.evaluator(stage.micro_batch)?;
        let teacher = self.inputs.teachers.of_stage(self.state.stage);
        let mut work = Work {
            stage,
            rates: Rates::new(
                self.inputs.recipe,
                stage,
                self.model.config(),
                teacher.map(|teacher| &teacher.config),
                self.model.backend(),
                self.ranks.group().size(),
            ),
            stepper,
            evaluator,
        };
        let memory = self.model.backend().memory_info();
        let (model, done) = (self.model.config(), self.state.stage_step);
        (self.events)(Event::Stage { stage, model, done, memory });
        let tensor = self.model.parallel().part().tensor;
        if let Some(shared_heads) = tensor.uneven_shared_heads(self.model.config()) {
            (self.events)(Event::UnevenHeads { stage, shared_heads: &shared_heads });
        }
        let _listening = self.metrics.is_some().then(|| span::listen(self.part_times.clone()));
        let index = self.state.stage;
        if let Some(metrics) = self.state.unevaluated.take() {
            let progress = self.end_step(&mut work, *metrics)?;
            if progress != Progress::Done {
                return Ok(progress);
            }
        }
        while self.state.stage == index {
            let trace = self.trace_next();
            let progress = self.step(&mut work)?;
            if let Some(trace) = trace {
                let run = self.inputs.run;
                trace.write(|step, rank| run.trace(step, rank), self.ranks.group())?;
            }
            if progress != Progress::Done {
                return Ok(progress);
            }
        }
        Ok(Progress::Done)
    }

    /// Loads the teacher of the current stage, in place of an earlier stage's.
    fn set_teacher(&mut self, config: &StepConfig) -> Result<()> {
        let Inputs { teachers, source, .. } = self.inputs;
        // Two teachers would not fit the planned memory.
        self.model.set_teacher(None)?;
        let teacher = teachers.of_stage(self.state.stage).zip(config.distillation);
        let teacher = teacher.map(|(teacher, distillation)| {
            teacher.load(source, &self.model, config.pass_shape(), distillation)
        });
        let teacher = self.ranks.agree(teacher.transpose())?;
        Ok(self.model.set_teacher(teacher)?)
    }

    /// Runs the next step, and ends it.
    fn step(&mut self, work: &mut Work<'_, B>) -> Result<Progress> {
        let _step = span::enter_numbered("step", self.state.step + 1);
        let stage = work.stage;
        self.saving.step_begins();
        let (guard, norms) = (&self.inputs.recipe.guard, self.inputs.recipe.log.norms_every_steps);
        let is_due = norms > 0 && (self.state.step + 1).is_multiple_of(norms);
        work.stepper.measure_block_norms(is_due);
        // Time that a checkpoint or another rank has taken since the step before is not part of this step.
        let checkpoint = self.part_times.take().checkpoint;
        let started = Instant::now();
        let update = self.state.next_update(stage, guard);
        let learning_rate = update.learning_rate;
        let (read, first) = (self.data.sample_reader(self.state.stage), self.state.sample);
        let (model, optimizer) = (&mut self.model, &mut self.optimizer);
        let result = work.stepper.step(model, optimizer, read, first, update)?;
        let seconds = started.elapsed().as_secs_f64();
        let times = Speed { seconds, checkpoint, ..self.part_times.take() };
        let sequences = work.stepper.config().batch_sequences();
        let skipped = self.state.count(stage, guard, &result, sequences);
        let metrics = StepMetrics {
            stage: stage.name.clone(),
            step: self.state.stage_step,
            tokens: self.state.tokens,
            loss: result.loss,
            targets: result.targets,
            auxiliary: result.auxiliary,
            learning_rate,
            grad_norm: result.grad_norm,
            tokens_per_second: stage.batch_tokens as f64 / times.seconds,
            skipped,
            block_norms: work.stepper.take_block_norms(),
            speed: self.metrics.is_some().then(|| work.rates.speed(self.model.backend(), times)),
            ..StepMetrics::default()
        };
        self.end_step(work, metrics)
    }

    /// Ends a step with updated weights: evaluates and writes a checkpoint, where due. A run that is stopped in the
    /// evaluation keeps the metrics in its state, and ends the step when it resumes.
    fn end_step(&mut self, work: &mut Work<'_, B>, mut metrics: StepMetrics) -> Result<Progress> {
        let stage = work.stage;
        // The step has been counted already.
        let before = self.state.step.saturating_sub(1);
        let last = self.state.stage_step >= steps_at(stage, &self.state.growth, before);
        let Some(losses) = self.validate_after(work, last)? else {
            self.state.unevaluated = Some(Box::new(metrics));
            if !self.is_saved() {
                self.save()?;
            }
            return Ok(Progress::Stopped);
        };
        if let Some(speed) = &mut metrics.speed {
            speed.evaluation = self.part_times.take().evaluation;
        }
        let first = self.inputs.recipe.data.validation.first();
        metrics.validation = first.and_then(|first| losses.get(&first.name).copied());
        metrics.validation_sets = losses;
        self.report(&metrics, last);
        if let Some(skipped) = &metrics.skipped
            && self.state.guard.in_a_row >= self.inputs.recipe.guard.patience
        {
            return Err(self.diverged(skipped.reason)?);
        }
        if last {
            self.state.end_stage();
            let point = EvaluationPoint::Trained { stage: stage.name.clone() };
            self.record(point, metrics.validation_sets);
        }
        let agreed = self.agree_after_step()?;
        let every = self.inputs.recipe.checkpoint.every_steps;
        let by_number = every > 0 && self.state.step.is_multiple_of(every);
        let is_due = last || agreed.stop || agreed.save || by_number;
        // A run that was stopped in the evaluation has the step's checkpoint.
        if is_due && !self.is_saved() {
            work.stepper.wait_for_weights(&mut self.model)?;
            self.save()?;
        }
        match agreed.stop && self.state.stage < self.inputs.recipe.stages.len() {
            true => Ok(Progress::Stopped),
            false => Ok(Progress::Done),
        }
    }

    /// Returns the error of a run that has not applied `guard.patience` steps in a row; `reason` is the last step's.
    /// Waits for the checkpoint in flight.
    fn diverged(&mut self, reason: SkipReason) -> Result<Error> {
        self.wait_for_checkpoint()?;
        self.warn_of_failure("when the run resumes");
        if !self.ranks.is_first() {
            return Ok(moh_step::Error::OtherRank { rank: 0 }.into());
        }
        let (root, count, step) =
            (self.inputs.run.root(), self.state.guard.in_a_row, self.state.step);
        let message = format!(
            "{count} steps in a row up to step {step} were not applied, the last one because its {reason}; {}: to skip \
             more, raise guard.patience, which a resumed run may change, or start another run from an earlier \
             checkpoint with a lower learning_rate.max or another run.seed: --set model.from={}@STEP --set run.dir=DIR",
            self.last_good(),
            root.display()
        );
        Ok(moh_files::unusable(root, message).into())
    }

    /// Returns the losses of the validation sets that are due after the step; `None` if a rank was asked to stop.
    fn validate_after(&mut self, work: &mut Work<'_, B>, last: bool) -> Result<Option<Losses>> {
        let sets = &self.inputs.recipe.data.validation;
        let due: Vec<bool> = sets.iter().map(|set| self.is_due(set, last)).collect();
        if !due.contains(&true) {
            return Ok(Some(Losses::new()));
        }
        work.stepper.wait_for_weights(&mut self.model)?;
        self.validate(&mut work.evaluator, &due, RoutingMoment::Step, Some(&work.stage.name))
    }

    fn trace_next(&self) -> Option<StepTrace<B>> {
        let step = self.state.step + 1;
        let wanted = self.inputs.trace.contains(step);
        let times = self.metrics.is_some().then(|| self.part_times.clone());
        let backend = self.model.backend().clone();
        wanted.then(|| StepTrace::new(step, backend, times, self.background.clone()))
    }

    /// Sets the stage's attention and its initial moments, and evaluates the model if its attention changed. If a rank
    /// was asked to stop meanwhile, or if the model needs more tensors, the stage has not started.
    fn begin_stage(&mut self, stage: &Stage) -> Result<Progress> {
        let Inputs { recipe, source, run, .. } = self.inputs;
        let before = self.attention.clone();
        let mut moh = attention_of(recipe, self.state.stage, source, before.as_ref())?;
        let mut calibration = None;
        let data = &self.data.training[self.state.stage];
        let measurement = StageMeasurement::new(recipe, run, source, &self.state, data);
        if let Some(measurement) = self.ranks.agree(measurement)? {
            let Some(record) = self.calibrate(&measurement)? else {
                return Ok(Progress::Stopped);
            };
            moh = Some(measurement.moh(&record)?);
            calibration = Some(record);
        }
        if let Some(moh) = &moh
            && !self.model.config().added_tensors(Some(moh))?.is_empty()
        {
            return Ok(Progress::GetsMatrices(Box::new(moh.clone())));
        }
        if let Some(record) = &calibration {
            let applied = record.apply(run, &mut self.model, &mut self.optimizer);
            self.ranks.agree(applied)?;
            (self.events)(Event::Calibrated(&record.calibration));
        }
        if moh != before {
            self.model.set_moh(moh.clone())?;
            let active_heads = self.model.config().active_heads();
            let point = EvaluationPoint::Converted { stage: stage.name.clone(), active_heads };
            if self.evaluate_at(point, stage.micro_batch)? == Evaluated::Stopped {
                // If the last checkpoint must be written again, it is the earlier stage's. If output projections were
                // refitted, or matrices added, it is complete.
                if !self.is_saved() {
                    self.model.set_moh(before)?;
                }
                return Ok(Progress::Stopped);
            }
        }
        self.attention = moh;
        self.state.calibrations.extend(calibration.map(|record| record.calibration));
        self.state.begin_stage(&mut self.optimizer, self.model.backend())?;
        Ok(Progress::Done)
    }

    /// Returns the result of a calibration; `None` if a rank was asked to stop, or if the time limit ends.
    fn calibrate(
        &mut self,
        measurement: &StageMeasurement<'_>,
    ) -> Result<Option<CalibrationRecord>> {
        let _span = span::enter("calibration");
        // An earlier stage's teacher is no longer needed, and the calibration may need its memory.
        self.model.set_teacher(None)?;
        let backend = self.model.backend().clone();
        let Inputs { stop, time_limit, .. } = self.inputs;
        // Only the first rank's clock counts. No time is reserved for a step.
        let limit = time_limit.filter(|_| self.ranks.is_first());
        let is_up = |limit: TimeLimit| limit.is_up(Instant::now(), Duration::ZERO, None);
        let is_asked = || stop.load(Ordering::Relaxed) || limit.is_some_and(is_up);
        measurement.result(&backend, &mut self.ranks, &is_asked, &mut *self.events)
    }

    /// Writes a step's metrics. Every n-th step also goes to the terminal and TensorBoard.
    fn report(&mut self, metrics: &StepMetrics, last: bool) {
        self.write_line(metrics);
        let every = self.inputs.recipe.log.every_steps.max(1);
        let due =
            last || !metrics.validation_sets.is_empty() || self.state.step.is_multiple_of(every);
        if due
            && let Some(board) = &mut self.board
            && let Err(error) = board.write(self.state.step, metrics)
        {
            self.give_up_board(&error);
        }
        let step = self.state.step;
        (self.events)(Event::Step { metrics, step, due });
        if let Some(skipped) = &metrics.skipped {
            (self.events)(Event::Skipped { step, metrics, skipped });
        }
    }

    /// Writes a line of metrics. Lines that cannot be written are kept and retried: a log does not end a run.
    fn write_line(&mut self, metrics: &StepMetrics) {
        let Some(writer) = &mut self.metrics else { return };
        let was_behind = writer.is_behind();
        if let Err(error) = writer.write(metrics)
            && !was_behind
        {
            let text = format!(
                "{error}: the lines from step {} on are kept in memory until they can be written",
                self.state.step
            );
            (self.events)(Event::Warning { text: &text });
        }
    }
}
