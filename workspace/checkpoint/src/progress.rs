//! How steps change the state of a run: shared by training and by the replay of a step.

use crate::run_log::SkippedStep;
use moh_kernels::{Backend, Element};
use moh_recipe::{GuardOptions, Schedule, Stage};
use moh_step::guard::SkipReason;
use moh_step::{OptimizerState, StepResult, Update};

use crate::{Error, RunState, steps_at};

impl RunState {
    /// Begins a stage with zero moments; the first one has the moments of the model's run, if there are any.
    pub fn begin_stage<B: Backend, M: Element>(
        &mut self,
        optimizer: &mut OptimizerState<B, M>,
        backend: &B,
    ) -> Result<(), Error> {
        if self.step > 0 || self.moment_steps == 0 {
            optimizer.reset(backend)?;
            self.moment_steps = 0;
        }
        Ok(())
    }

    /// How the next step, of `stage`, updates the weights.
    pub fn next_update(&self, stage: &Stage, guard: &GuardOptions) -> Update {
        let steps = steps_at(stage, &self.growth, self.step);
        let schedule = Schedule::new(stage.learning_rate, steps);
        Update {
            number: self.moment_steps + 1,
            learning_rate: schedule.learning_rate(self.stage_step + 1),
            limits: self.guard.limits(guard.factor),
        }
    }

    /// Counts a step of `sequences` samples, applied or not.
    pub fn count(
        &mut self,
        stage: &Stage,
        guard: &GuardOptions,
        result: &StepResult,
        sequences: u64,
    ) -> Option<SkippedStep> {
        let samples = [self.sample, (self.sample + sequences).saturating_sub(1)];
        self.step += 1;
        self.stage_step += 1;
        self.moment_steps += u64::from(result.skipped.is_none());
        self.tokens += stage.batch_tokens;
        self.sample += sequences;
        match result.skipped {
            // It says nothing about the model.
            Some(SkipReason::NoTargets) => self.guard.skipped += 1,
            skipped => {
                self.guard.count(skipped.is_some(), result.loss, result.grad_norm, guard.factor);
            }
        }
        result.skipped.map(|reason| SkippedStep { reason, samples })
    }

    /// Continues with the next stage.
    pub fn end_stage(&mut self) {
        self.stage += 1;
        self.stage_step = 0;
        self.guard.end_stage();
    }
}
