//! What a run tells whoever watches it, and how it ends.

use std::path::Path;

use moh_kernels::MemoryInfo;

use crate::Error;
use crate::checkpoint::Evaluation;
use crate::metrics::StepMetrics;
use crate::recipe::Stage;
use crate::summary::Summary;

/// News of a run.
#[derive(Debug)]
pub enum Event<'a> {
    /// A checkpoint was damaged and set aside.
    DamagedCheckpoint {
        /// Where it lies now.
        path: &'a Path,
        /// What is wrong in it.
        error: &'a Error,
    },
    /// The run continues after this step.
    Resumed {
        /// Steps done, over all stages.
        step: u64,
    },
    /// A stage begins, or is continued.
    Stage {
        /// The stage.
        stage: &'a Stage,
        /// Its steps that are done.
        done: u64,
        /// The device's memory with all of the stage's buffers in it, where it has its own.
        memory: Option<MemoryInfo>,
    },
    /// A stage's ranks share tensors, and do not hold equal numbers of shared heads.
    UnevenHeads {
        /// The stage.
        stage: &'a Stage,
        /// Shared heads of each rank, in the first layer where they differ.
        shared_heads: &'a [usize],
    },
    /// A step was done.
    Step {
        /// What it measured.
        metrics: &'a StepMetrics,
        /// Its number, over all stages.
        step: u64,
        /// Whether the recipe wants it shown.
        due: bool,
    },
    /// An evaluation goes on.
    Evaluating {
        /// Windows done.
        done: u64,
        /// Windows in all.
        total: u64,
    },
    /// The model was evaluated at a moment of the run.
    Evaluated(&'a Evaluation),
    /// A checkpoint was written.
    Checkpoint {
        /// Its directory.
        path: &'a Path,
    },
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// All stages are done and the model is exported.
    Finished(Summary),
    /// It had finished before.
    AlreadyFinished(Summary),
    /// It was asked to stop and wrote a checkpoint.
    Stopped {
        /// Steps done, over all stages.
        step: u64,
    },
}
