//! The errors of this crate.

/// An error of this crate. Its message is one sentence with the problem, its place and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// A hardware profile is invalid, with one line for each fault, or the number of ranks does not fit.
    #[error("{0}")]
    Invalid(String),
    /// A buffer cannot be counted.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
    /// The model is invalid, or the heads cannot be routed.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
    /// The training data is invalid.
    #[error(transparent)]
    Data(#[from] moh_data::Error),
    /// The buffers of steps and evaluations cannot be counted.
    #[error(transparent)]
    Step(#[from] moh_step::Error),
}
