//! The events of a run, and its outcome.

use std::path::Path;

use moh_checkpoint::StageExtension;
use moh_checkpoint::run_log::{Evaluation, SkippedStep, StageCalibration, StepMetrics, Summary};
use moh_kernels::MemoryInfo;
use moh_model::ModelConfig;
use moh_plan::SourceEpochs;
use moh_recipe::Stage;

/// An event of a run.
#[derive(Debug)]
pub enum Event<'a> {
    /// A checkpoint was damaged and has been moved aside.
    DamagedCheckpoint {
        /// Its new path.
        path: &'a Path,
        /// The damage.
        error: &'a moh_checkpoint::Error,
    },
    /// The run resumes from an earlier checkpoint, and this later checkpoint has been moved aside.
    LaterCheckpoint {
        /// Its new path.
        path: &'a Path,
    },
    /// A stage is longer than before, from a step on.
    StageExtended {
        /// The step from which the stage is longer, and its tokens before and after.
        extension: &'a StageExtension,
    },
    /// A fact about the run that its user should know, such as a checkpoint that could not be written.
    Warning {
        /// One sentence.
        text: &'a str,
    },
    /// The run resumes after this step.
    Resumed {
        /// Steps done, over all stages.
        step: u64,
    },
    /// The progress of reading a token file for ids outside the vocabulary, before training.
    CheckingIds {
        /// The file's path without its endings.
        path: &'a Path,
        /// Tokens read.
        done: u64,
        /// Tokens of the file.
        total: u64,
    },
    /// The token files of the run; sent once.
    Sources(&'a [SourceEpochs]),
    /// A stage starts, or is resumed.
    Stage {
        /// The stage.
        stage: &'a Stage,
        /// The model, with the stage's attention.
        model: &'a ModelConfig,
        /// Its completed steps.
        done: u64,
        /// The device's memory after all buffers of the stage are allocated, if the device has its
        /// own.
        memory: Option<MemoryInfo>,
    },
    /// The tensor-parallel ranks of a stage have different numbers of shared heads.
    UnevenHeads {
        /// The stage.
        stage: &'a Stage,
        /// Shared heads of each rank, in the first layer where they differ.
        shared_heads: &'a [usize],
    },
    /// A step was completed.
    Step {
        /// Its measurements.
        metrics: &'a StepMetrics,
        /// Its number, over all stages.
        step: u64,
        /// Whether the recipe's log settings show it.
        due: bool,
    },
    /// A step was not applied.
    Skipped {
        /// Its number, over all stages.
        step: u64,
        /// Its measurements.
        metrics: &'a StepMetrics,
        /// The reason, and its samples.
        skipped: &'a SkippedStep,
    },
    /// The progress of a calibration, which measures the layers of a model before a stage converts it.
    Calibrating {
        /// Layers done.
        done: u64,
        /// Layers in total.
        total: u64,
    },
    /// A model was calibrated, or uses the result of an earlier calibration.
    Calibrated(&'a StageCalibration),
    /// The progress of an evaluation.
    Evaluating {
        /// Windows done.
        done: u64,
        /// Windows in total.
        total: u64,
    },
    /// The model was evaluated at a point of the run.
    Evaluated {
        /// The point and the loss.
        evaluation: &'a Evaluation,
        /// Query heads of the model.
        heads: usize,
    },
    /// A checkpoint is complete. It was written while training continued, so later steps may have been reported before.
    Checkpoint {
        /// Its directory.
        path: &'a Path,
        /// Its step, over all stages.
        step: u64,
        /// The time since its step.
        seconds: f64,
    },
}

/// The outcome of a run.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// All stages are done and the model is exported.
    Finished(Summary),
    /// The run had already finished.
    AlreadyFinished(Summary),
    /// The run was asked to stop before its first step, or while its inputs were checked. Earlier checkpoints are
    /// unchanged.
    StoppedBeforeTraining,
    /// The run was asked to stop and wrote a checkpoint.
    Stopped {
        /// Steps done, over all stages.
        step: u64,
    },
}
