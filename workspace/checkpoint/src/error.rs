//! The errors of this crate.

use std::path::PathBuf;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A file of a checkpoint is missing on some ranks and not on others.
    #[error(
        "{source}, but other ranks see the checkpoint: put the run directory on a file system that all \
         ranks share"
    )]
    NotShared {
        /// The missing file.
        source: Box<Error>,
    },
    /// The run has no checkpoint of the requested step.
    #[error("{}: the run has no checkpoint of step {step}: {}", path.display(), listed(found))]
    NoCheckpoint {
        /// The run directory.
        path: PathBuf,
        /// The requested step.
        step: u64,
        /// The steps of its checkpoints, ascending.
        found: Vec<u64>,
    },
    /// Another rank failed, or the device.
    #[error(transparent)]
    Step(#[from] moh_step::Error),
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
    /// Communication with another rank failed.
    #[error(transparent)]
    Comm(#[from] moh_comm::Error),
    /// The model is invalid.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
}

/// The steps of checkpoints, for messages.
fn listed(steps: &[u64]) -> String {
    let texts: Vec<String> = steps.iter().map(u64::to_string).collect();
    match texts.is_empty() {
        true => "it has none".to_owned(),
        false => format!("name one of {}", texts.join(", ")),
    }
}
