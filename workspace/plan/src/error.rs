//! The errors of this crate.

use std::fmt;
use std::path::PathBuf;

use moh_recipe::KeyFault;

use crate::units::ranks as counted;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A hardware profile is invalid: one line for each fault.
    #[error("{}", lines(faults))]
    Hardware {
        /// All faults; never empty.
        faults: Vec<KeyFault>,
    },
    /// The number of ranks of a plan is not a multiple of a stage's tensor x pipeline.
    #[error(
        "{}: stage.{stage}.parallel: --ranks {ranks} is not a multiple of tensor x pipeline = {tensor} x \
         {pipeline}: use --ranks {nearest}, or --suggest for layouts of {}",
        path.display(), counted(*ranks)
    )]
    PlanRanks {
        /// The recipe.
        path: PathBuf,
        /// The stage.
        stage: String,
        /// Tensor-parallel ranks.
        tensor: usize,
        /// Pipeline stages.
        pipeline: usize,
        /// The requested number of ranks.
        ranks: usize,
        /// The nearest valid number of ranks.
        nearest: usize,
    },
    /// A buffer cannot be counted.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
    /// The model is invalid, or the heads cannot be routed.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
    /// The training data is invalid.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
    /// The buffers of evaluations cannot be counted.
    #[error(transparent)]
    Evaluation(#[from] moh_eval::Error),
    /// The buffers of steps cannot be counted.
    #[error(transparent)]
    Step(#[from] moh_step::Error),
}

fn lines<T: fmt::Display>(items: &[T]) -> String {
    let lines: Vec<String> = items.iter().map(T::to_string).collect();
    lines.join("\n")
}
