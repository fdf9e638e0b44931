//! The errors of this crate.

/// An error of this crate. Its message is one sentence with the problem, its place and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory could not be read or written, or the run cannot continue with it.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A variant of a comparison, or this build of the program, cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// The run's checkpoints and its export do not fit on the file system.
    #[error("{message}")]
    NoRoom {
        /// The bytes that the run still writes.
        needed: u64,
        /// The bytes of one checkpoint.
        checkpoint: u64,
        /// The message.
        message: String,
    },
    /// The run directory cannot be used, or a checkpoint or a log of the run is missing or damaged, or cannot be
    /// written.
    #[error(transparent)]
    Checkpoint(moh_checkpoint::Error),
    /// The training data cannot be opened.
    #[error(transparent)]
    Plan(#[from] moh_plan::Error),
    /// A step or another rank failed.
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
    /// The model could not be read, or its export could not be written.
    #[error(transparent)]
    Hf(#[from] moh_hf::Error),
}

/// Another rank's error is [`Error::Step`], wherever it occurred.
impl From<moh_checkpoint::Error> for Error {
    fn from(error: moh_checkpoint::Error) -> Self {
        match error {
            moh_checkpoint::Error::Step(error) => Error::Step(error),
            error => Error::Checkpoint(error),
        }
    }
}

/// A result of this crate.
pub type Result<V, E = Error> = std::result::Result<V, E>;
