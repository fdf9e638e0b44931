//! The errors of this crate.

/// An error of this crate. Its message is one sentence: the problem, the place, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// The run has no checkpoint of the requested step.
    #[error("{0}")]
    NoCheckpoint(String),
    /// A log has an invalid line, or fewer lines than the checkpoint's steps.
    #[error("{0}")]
    Lines(String),
    /// A recipe is invalid.
    #[error(transparent)]
    Recipe(#[from] moh_recipe::Error),
    /// The configuration of a model cannot be used, or an export cannot be read.
    #[error(transparent)]
    Hf(#[from] moh_hf::Error),
    /// Another rank or the device failed.
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

/// A result of this crate.
pub type Result<V, E = Error> = std::result::Result<V, E>;
