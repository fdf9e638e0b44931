//! The steps of `metrics.jsonl`, in little memory: a run may have a million steps.

use std::collections::BTreeMap;

use moh_checkpoint::run_log::{SkippedStep, Speed, StepMetrics, Validation};
use moh_model::AuxiliaryLosses;

use crate::chart::printable;

/// The numbers of a step; a missing number is NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The number of its line in the file, from 1. The step's own number is the same, plus the steps before the file.
    pub line: u64,
    /// Tokens trained on since the start of the run.
    pub tokens: f64,
    /// Mean cross-entropy, in nats.
    pub loss: f64,
    /// The auxiliary losses, unweighted.
    pub auxiliary: AuxiliaryLosses<f64>,
    pub learning_rate: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    pub tokens_per_second: f64,
    pub mfu: f64,
}

/// A number of each step.
pub type StepValue = dyn Fn(&Step) -> f64;

#[derive(Debug, Clone, PartialEq)]
pub struct StageSteps {
    pub name: String,
    /// Index of its first step in [`Steps::all`].
    pub first: usize,
    pub count: usize,
    /// The number of its steps with times.
    pub timed: usize,
    /// Sums of their times and rates, and the maximum of their memory.
    pub speed: Speed,
    /// Sum of their tokens per second.
    pub rate: f64,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Steps {
    pub all: Vec<Step>,
    pub stages: Vec<StageSteps>,
    /// Steps that were not applied, with their indices in `all`.
    pub skipped: Vec<(usize, SkippedStep)>,
    /// The evaluations after steps, by set: the index of the step, and the losses.
    pub validation: BTreeMap<String, Vec<(usize, Validation)>>,
    /// The stage's own number of the first step; 0 without steps.
    pub first_number: u64,
    /// Lines of the file, including omitted lines.
    pub lines: u64,
}

impl Steps {
    /// Adds the step of a line. `first_set` is the name of the first validation set, which earlier versions did not
    /// write.
    pub(super) fn push(&mut self, line: u64, metrics: &StepMetrics, first_set: &str) {
        let index = self.all.len();
        if index == 0 {
            self.first_number = metrics.step;
        }
        self.skipped.extend(metrics.skipped.map(|skipped| (index, skipped)));
        self.add_validation(index, metrics, first_set);
        self.add_to_stage(index, metrics);
        self.all.push(Step {
            line,
            tokens: metrics.tokens as f64,
            loss: metrics.loss,
            auxiliary: metrics.auxiliary.map(|loss| loss.unwrap_or(f64::NAN)),
            learning_rate: metrics.learning_rate,
            grad_norm: metrics.grad_norm,
            tokens_per_second: metrics.tokens_per_second,
            mfu: metrics.speed.and_then(|speed| speed.mfu).unwrap_or(f64::NAN),
        });
    }

    fn add_validation(&mut self, index: usize, metrics: &StepMetrics, first_set: &str) {
        let mut add = |name: &str, validation| {
            self.validation.entry(printable(name)).or_default().push((index, validation));
        };
        for (name, validation) in &metrics.validation_sets {
            add(name, *validation);
        }
        if let Some(validation) = metrics.validation.filter(|_| metrics.validation_sets.is_empty())
        {
            add(first_set, validation);
        }
    }

    fn add_to_stage(&mut self, first: usize, metrics: &StepMetrics) {
        let name = printable(&metrics.stage);
        if self.stages.last().is_none_or(|stage| stage.name != name) {
            let speed = Speed::default();
            self.stages.push(StageSteps { name, first, count: 0, timed: 0, speed, rate: 0.0 });
        }
        let Some(stage) = self.stages.last_mut() else { return };
        stage.count += 1;
        if let Some(speed) = &metrics.speed {
            stage.timed += 1;
            stage.rate += metrics.tokens_per_second;
            add(&mut stage.speed, speed);
        }
    }

    pub(super) fn of_line(&self, line: u64) -> Option<&Step> {
        let found = self.all.binary_search_by_key(&line, |step| step.line);
        found.ok().and_then(|index| self.all.get(index))
    }

    pub fn curve(&self, value: impl Fn(&Step) -> f64) -> Vec<(f64, f64)> {
        self.all.iter().map(|step| (step.tokens, value(step))).collect()
    }

    pub fn has(&self, value: impl Fn(&Step) -> f64) -> bool {
        self.all.iter().any(|step| value(step).is_finite())
    }
}

/// Adds the times of a step to sums.
fn add(sum: &mut Speed, speed: &Speed) {
    sum.seconds += speed.seconds;
    sum.data += speed.data;
    sum.forward += speed.forward;
    sum.backward += speed.backward;
    sum.exchange += speed.exchange;
    sum.gradient_norm += speed.gradient_norm;
    sum.optimizer += speed.optimizer;
    sum.evaluation += speed.evaluation;
    sum.checkpoint += speed.checkpoint;
    sum.tflops += speed.tflops;
    sum.mfu = speed.mfu.map_or(sum.mfu, |mfu| Some(sum.mfu.unwrap_or(0.0) + mfu));
    sum.peak_resident_bytes = sum.peak_resident_bytes.max(speed.peak_resident_bytes);
    sum.device_bytes = sum.device_bytes.max(speed.device_bytes);
}
