//! Changes of a run's state by its steps, shared by training and by the replay of a step.

use crate::run_log::SkippedStep;
use moh_kernels::Backend;
use moh_recipe::{GuardOptions, Recipe, Schedule, Stage};
use moh_step::guard::SkipReason;
use moh_step::{OptimizerState, StepResult, Update};

use crate::{Result, RunState, steps_at};

impl RunState {
    /// Starts a stage with zero moments. The first stage keeps the moments that the initial model brought from its run.
    pub fn begin_stage<B: Backend>(
        &mut self,
        optimizer: &mut OptimizerState<B>,
        backend: &B,
    ) -> Result<()> {
        if self.step > 0 || self.moment_steps == 0 {
            optimizer.reset(backend)?;
            self.moment_steps = 0;
        }
        Ok(())
    }

    /// Returns the update of the next step, which is a step of `stage`.
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
            // Such a step says nothing about the model.
            Some(SkipReason::NoTargets) => self.guard.skipped += 1,
            skipped => {
                self.guard.count(skipped.is_some(), result.loss, result.grad_norm, guard.factor);
            }
        }
        result.skipped.map(|reason| SkippedStep { reason, samples })
    }

    /// Compares the counters with the counters of a run of `recipe` at this stage and step.
    ///
    /// # Errors
    /// Fails with the name of a counter that such a run cannot have.
    pub fn check(&self, recipe: &Recipe) -> Result<(), String> {
        let &RunState { stage, stage_step, .. } = self;
        let all = recipe.stages.len();
        let Some(earlier) = recipe.stages.get(..stage) else {
            return Err(format!("is of stage {stage}, but the recipe has {all}"));
        };
        let steps = earlier.iter().map(|stage| (stage, stage.num_steps()));
        let current = recipe.stages.get(stage).map(|stage| (stage, stage_step));
        let mut expected = [0u64; 3];
        for (stage, steps) in steps.chain(current) {
            let of_step = [1, stage.batch_tokens, recipe.batch_sequences(stage)];
            let sums = expected.iter_mut().zip(of_step);
            sums.for_each(|(sum, count)| *sum = sum.saturating_add(steps.saturating_mul(count)));
        }
        let found = [("step", self.step), ("tokens", self.tokens), ("sample", self.sample)];
        for ((name, found), expected) in found.into_iter().zip(expected) {
            if found != expected {
                return Err(format!(
                    "has {name} = {found} after step {stage_step} of stage {stage}, not {expected}"
                ));
            }
        }
        // Between stages the moments are the previous stage's. The first stage may start with another run's moments.
        let most = match (stage_step, recipe.model.moments && stage <= 1) {
            (_, true) => u64::MAX,
            (0, false) => self.step,
            (steps, false) => steps,
        };
        let least = stage_step.saturating_sub(self.guard.skipped);
        match (least..=most).contains(&self.moment_steps) {
            true => Ok(()),
            false => {
                Err(format!("has moment_steps = {}, expected {least} to {most}", self.moment_steps))
            }
        }
    }

    /// Continues with the next stage.
    pub fn end_stage(&mut self) {
        self.stage += 1;
        self.stage_step = 0;
        self.guard.end_stage();
    }
}
