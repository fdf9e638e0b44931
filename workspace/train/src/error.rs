//! The errors of this crate.

use std::path::PathBuf;

use moh_files::units::{bytes, counted};
use moh_step::guard::SkipReason;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A variant of a comparison cannot be used.
    #[error("--variant {name}: {reason}")]
    Variant {
        /// The variant, by its name or as it was given.
        name: String,
        /// The problem, and what to do.
        reason: String,
    },
    /// A comparison's directory has files that are not a comparison's.
    #[error(
        "{}: is not the directory of a comparison, and holds {found}: a comparison takes a directory that is \
         new, empty or its own, so choose another one, such as --set run.dir={}",
        path.display(), instead.display()
    )]
    NotComparison {
        /// The directory.
        path: PathBuf,
        /// Some of its files.
        found: String,
        /// Another directory.
        instead: PathBuf,
    },
    /// A comparison has trained a variant that is not named any more.
    #[error(
        "{}: is a variant of this comparison that no --variant names: name it with the keys that it was \
         started with, or move it away",
        path.display()
    )]
    VariantLeftOut {
        /// The variant's run directory.
        path: PathBuf,
    },
    /// A file that the run reads has other content than when the run was started.
    #[error(
        "{}: {key} is not the file that the run was started with ({difference}), as {} records: put that \
         file back or name its path, or use another run.dir",
        path.display(), record.display()
    )]
    InputChanged {
        /// The file.
        path: PathBuf,
        /// Its key in the recipe.
        key: String,
        /// How it differs.
        difference: String,
        /// The run's record of its inputs.
        record: PathBuf,
    },
    /// The run's checkpoints and its export do not fit on the file system.
    #[error(
        "{}: the run writes {} beside what is there, for {num_checkpoints} checkpoints of {} and the export, \
         but the file system has {} free: free some, lower checkpoint.keep{}, or choose another run.dir",
        path.display(), bytes(*needed), bytes(*checkpoint), bytes(*free),
        if *keeps_for_good { " or raise checkpoint.keep_every" } else { "" }
    )]
    NoRoom {
        /// The run directory.
        path: PathBuf,
        /// The bytes that the run still writes.
        needed: u64,
        /// The bytes that can be written.
        free: u64,
        /// The bytes of one checkpoint.
        checkpoint: u64,
        /// The most checkpoints at one time.
        num_checkpoints: u64,
        /// Whether some are never removed.
        keeps_for_good: bool,
    },
    /// A run that has completed checkpoints or has finished has none left to resume from.
    #[error(
        "{}: the run has completed checkpoints, and none of them is left to resume from: put one back \
         into {}, or give --begin-anew, which moves the run's files aside and begins again",
        path.display(), path.join("checkpoints").display()
    )]
    NoneLeft {
        /// The run directory.
        path: PathBuf,
    },
    /// The run has no such step.
    #[error("{}: has no step {step}: use 1 to {steps}", path.display())]
    NoSuchStep {
        /// The run directory.
        path: PathBuf,
        /// The step, over all stages.
        step: u64,
        /// Steps of all stages.
        steps: u64,
    },
    /// The guard has refused as many steps in a row as the recipe's patience.
    #[error(
        "{0}: {count} steps in a row up to step {step} were not applied, the last one because its {reason}; {1}: to \
         skip more, raise guard.patience, which a resumed run may change, or start another run from an earlier \
         checkpoint with a lower learning_rate.max or another run.seed: --set model.from={0}@STEP --set run.dir=DIR",
        path.display(), last_good_checkpoint(*last_good)
    )]
    Diverged {
        /// The run directory.
        path: PathBuf,
        /// The number of steps that were not applied.
        count: u64,
        /// The last of them, over all stages.
        step: u64,
        /// Why it was not applied.
        reason: SkipReason,
        /// Step of the newest complete checkpoint, from which the run resumes.
        last_good: Option<u64>,
    },
    /// The checkpoint with which a run stops, ends, or goes on in another layout of ranks or with a router's new
    /// matrices could not be written.
    #[error(
        "{}: the checkpoint could not be written: {cause}; {}: make room or repair the file system, and run \
         the same command again",
        path.display(), last_good_checkpoint(*last_good)
    )]
    NotSaved {
        /// The checkpoint.
        path: PathBuf,
        /// The cause.
        cause: String,
        /// Step of the newest complete checkpoint, from which the run resumes.
        last_good: Option<u64>,
    },
    /// A token file was prepared with another tokenizer than the model's.
    #[error(
        "{}: prepared with another tokenizer than {}: {difference}: use the tokenizer of the token file, prepare the \
         text again with this one, or accept it if it gives the same ids on a sample of the text: {command}",
        prefix.display(), tokenizer.display()
    )]
    OtherTokenizer {
        /// The token file, without endings.
        prefix: PathBuf,
        /// The model's tokenizer.
        tokenizer: PathBuf,
        /// What it has otherwise.
        difference: String,
        /// The command that accepts it.
        command: String,
    },
    /// The recipe's model is not on this machine.
    #[error(
        "{}: model.from: no such directory, and the model is not downloaded: correct the path or id",
        path.display()
    )]
    NoModel {
        /// The recipe.
        path: PathBuf,
    },
    /// A run that resumes without its initial weights needs them.
    #[error(
        "{}: the run begins with its initial model, and a run that resumes does not read its weights: give the same \
         command again, which reads them",
        path.display()
    )]
    InitialModelNotRead {
        /// The recipe.
        path: PathBuf,
    },
    /// The recipe's device is missing or unsuitable, or this program was built without support for
    /// it.
    #[error("{}: run.device = \"cuda\": {source}, or use --set run.device=cpu", path.display())]
    Device {
        /// The recipe.
        path: PathBuf,
        /// The device's error.
        source: moh_kernels::open_device::Error,
    },
    /// Several GPUs in a build without NCCL.
    #[cfg(all(feature = "cuda", not(feature = "nccl")))]
    #[error(
        "several processes were started, but this program was built without NCCL: build it with \
         --features nccl, or start one process"
    )]
    NoNccl,
    /// The number of ranks is not a multiple of a stage's tensor x pipeline.
    #[error(
        "{}: stage.{stage}.parallel = {{ tensor = {tensor}, pipeline = {pipeline} }}: {} \
         started: start a multiple of {}, or change the two",
        path.display(),
        format_args!(
            "{} {}", counted(*ranks as u64, "rank"), if *ranks == 1 { "was" } else { "were" }
        ),
        tensor.saturating_mul(*pipeline)
    )]
    Parallel {
        /// The recipe.
        path: PathBuf,
        /// The stage.
        stage: String,
        /// Tensor-parallel ranks.
        tensor: usize,
        /// Pipeline stages.
        pipeline: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// The run directory cannot be used.
    #[error(transparent)]
    RunDirectory(moh_checkpoint::run_directory::Error),
    /// A checkpoint is missing or damaged, or cannot be written.
    #[error(transparent)]
    Checkpoint(moh_checkpoint::Error),
    /// A file of the run's logs cannot be read or written.
    #[error(transparent)]
    RunLog(#[from] moh_checkpoint::run_log::Error),
    /// The training data cannot be opened.
    #[error(transparent)]
    Plan(#[from] moh_plan::Error),
    /// A step failed, or another rank.
    #[error(transparent)]
    Step(#[from] moh_step::Error),
    /// A recipe is invalid, or its model differs from it.
    #[error(transparent)]
    Recipe(#[from] moh_recipe::Error),
    /// Communication with another rank failed.
    #[error(transparent)]
    Comm(#[from] moh_comm::Error),
    /// The device failed, or an operator rejected its input.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
    /// The model is invalid.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
    /// The data is invalid.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
    /// The heads of a stage could not be measured.
    #[error("{}: stage.{stage}.moh.calibration: {source}", path.display())]
    Calibration {
        /// The recipe, or the run directory.
        path: PathBuf,
        /// The stage.
        stage: String,
        /// The error.
        source: Box<moh_calibrate::Error>,
    },
    /// A run has no result of a calibration that a step follows.
    #[error(
        "{}: the result of the calibration of stage {stage} is not there any more, and the steps before the \
         stage's first checkpoint cannot be replayed without it",
        path.display()
    )]
    NoCalibration {
        /// The file with the result.
        path: PathBuf,
        /// The stage.
        stage: String,
    },
    /// The model could not be read, or its export could not be written.
    #[error(transparent)]
    Hf(#[from] moh_hf::Error),
}

/// An error of another rank is [`Error::Step`], wherever it was met.
impl From<moh_checkpoint::Error> for Error {
    fn from(error: moh_checkpoint::Error) -> Self {
        match error {
            moh_checkpoint::Error::Step(error) => Error::Step(error),
            error => Error::Checkpoint(error),
        }
    }
}

/// An error has one variant here, whichever crate met it.
impl From<moh_checkpoint::run_directory::Error> for Error {
    fn from(error: moh_checkpoint::run_directory::Error) -> Self {
        match error {
            moh_checkpoint::run_directory::Error::Recipe(error) => Error::Recipe(error),
            moh_checkpoint::run_directory::Error::Checkpoint(error) => Error::Checkpoint(error),
            moh_checkpoint::run_directory::Error::RunLog(error) => Error::RunLog(error),
            moh_checkpoint::run_directory::Error::Step(error) => Error::Step(error),
            moh_checkpoint::run_directory::Error::Hf(error) => Error::Hf(error),
            error => Error::RunDirectory(error),
        }
    }
}

/// A clause that says which checkpoint is the newest complete one.
pub(crate) fn last_good_checkpoint(step: Option<u64>) -> String {
    match step {
        Some(step) => format!("the last good checkpoint is of step {step}"),
        None => "there is no good checkpoint yet".to_owned(),
    }
}
