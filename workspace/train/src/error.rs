//! What can go wrong in this crate.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::recipe::Fault;

/// An error of this crate; its message says what, where and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A recipe, or an override of it, is wrong: one line for each fault.
    #[error("{}", lines(faults))]
    Recipe {
        /// Everything that is wrong with it; never empty.
        faults: Vec<Fault>,
    },
    /// A hardware profile is wrong: one line for each fault.
    #[error("{}", lines(faults))]
    Hardware {
        /// Everything that is wrong with it; never empty.
        faults: Vec<Fault>,
    },
    /// A plan's ranks do not make whole copies of the model.
    #[error(
        "{}: stage.{stage}.parallel: --ranks {ranks} is no multiple of tensor x pipeline = {tensor} x \
         {pipeline}: use --ranks {nearest}, or --suggest for layouts of {ranks} ranks", path.display()
    )]
    PlanRanks {
        /// The recipe.
        path: PathBuf,
        /// The stage.
        stage: String,
        /// Ranks that divide each block.
        tensor: usize,
        /// Ranks that divide the blocks.
        pipeline: usize,
        /// Ranks that were asked for.
        ranks: usize,
        /// A number of ranks nearby that would do.
        nearest: usize,
    },
    /// A run directory was started with another recipe.
    #[error(
        "{}: this run was started with another recipe, and would not continue as it began:\n{}\n\
         give it the recipe it was started with, or another run.dir",
        path.display(), lines(changes)
    )]
    RecipeChanged {
        /// The recipe that the run directory holds.
        path: PathBuf,
        /// The keys that differ; never empty.
        changes: Vec<KeyChange>,
    },
    /// Another process trains in this run directory.
    #[error("{}: another process is training in this run directory", path.display())]
    Locked {
        /// The run directory.
        path: PathBuf,
    },
    /// Steps to trace are not written as such.
    #[error("{text:?}: {reason}")]
    TraceSteps {
        /// The part of the list that is wrong.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A line of a metrics file is not what the trainer writes.
    #[error("{}:{line}: {reason}", path.display())]
    MetricsLine {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// What is wrong in it.
        reason: String,
    },
    /// A metrics file holds fewer steps than its checkpoint.
    #[error(
        "{}: holds {found} complete lines, and the checkpoint was made at step {expected}: \
         restore the file, or continue from an earlier checkpoint", path.display()
    )]
    MetricsShort {
        /// The file.
        path: PathBuf,
        /// Complete lines in it.
        found: u64,
        /// Steps that it should hold.
        expected: u64,
    },
    /// A checkpoint, or a file of a finished run, is not whole.
    #[error("{}: {reason}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// The loss or the gradient is not a number any more.
    #[error(
        "stage {stage}, step {step}: the loss is {loss} and the gradient's norm {norm}: lower \
         learning_rate.max or lengthen its warm-up, and run the recipe in another run.dir"
    )]
    NotFinite {
        /// The stage.
        stage: String,
        /// The step within it.
        step: u64,
        /// The loss of the step.
        loss: f64,
        /// The global norm of its gradient.
        norm: f64,
    },
    /// The recipe names no model that is on this machine.
    #[error("{}: model.from: there is no such directory, and nothing was downloaded", path.display())]
    NoModel {
        /// The recipe.
        path: PathBuf,
    },
    /// The model is not what the recipe says of it.
    #[error("{}: {key}: {reason}", path.display())]
    ModelDiffers {
        /// The recipe.
        path: PathBuf,
        /// The key that does not fit.
        key: String,
        /// What differs.
        reason: String,
    },
    /// The recipe wants a device that is missing or unfit, or that this program was built without.
    #[error("{}: run.device = \"cuda\": {source}, or use --set run.device=cpu", path.display())]
    Device {
        /// The recipe.
        path: PathBuf,
        /// What is wrong with it.
        source: moh_device::Error,
    },
    /// Several GPUs in a build that cannot connect them.
    #[cfg(all(feature = "cuda", not(feature = "nccl")))]
    #[error(
        "several processes were started, and this program was built without NCCL: build it with \
         --features nccl, or start one process"
    )]
    NoNccl,
    /// The ranks cannot be arranged as a stage wants.
    #[error(
        "{}: stage.{stage}.parallel = {{ tensor = {tensor}, pipeline = {pipeline} }}: {ranks} ranks were \
         started: start a multiple of {}, or change the two",
        path.display(), tensor.saturating_mul(*pipeline)
    )]
    Parallel {
        /// The recipe.
        path: PathBuf,
        /// The stage of the recipe.
        stage: String,
        /// Ranks that share each tensor.
        tensor: usize,
        /// Stages of the pipeline.
        pipeline: usize,
        /// Ranks.
        ranks: usize,
    },
    /// Another rank reports an error, which ends the run on this one too.
    #[error("rank {rank} failed, and tells why")]
    OtherRank {
        /// It.
        rank: usize,
    },
    /// Ranks lost each other.
    #[error(transparent)]
    Comm(#[from] moh_comm::Error),
    /// The device failed, or an operator refused its input.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
    /// The model is wrong.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
    /// The data is wrong.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
    /// An evaluation failed.
    #[error(transparent)]
    Evaluation(#[from] moh_eval::Error),
    /// The model could not be read, its vocabulary not grow, or its export not be written.
    #[error(transparent)]
    Hf(#[from] moh_hf::Error),
}

impl Error {
    /// An input or output error at `path`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }
}

/// A key whose value differs between two recipes; `None` where one of them lacks it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyChange {
    /// The full key, stages by name.
    pub key: String,
    /// The value that the run was started with.
    pub before: Option<String>,
    /// The value asked for now.
    pub now: Option<String>,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".to_string());
        let (before, now) = (value(&self.before), value(&self.now));
        write!(f, "  {}: was {before}, now {now}", self.key)
    }
}

fn lines<T: fmt::Display>(items: &[T]) -> String {
    let lines: Vec<String> = items.iter().map(T::to_string).collect();
    lines.join("\n")
}
