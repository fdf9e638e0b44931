//! The errors of this crate.

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Reading the samples of a step or the windows of an evaluation failed with this error.
    #[error(transparent)]
    Samples(Box<dyn std::error::Error + Send + Sync>),
    /// Another rank failed, which also ends the run on this rank.
    #[error("rank {rank} failed; see its output")]
    OtherRank {
        /// The rank that failed.
        rank: usize,
    },
    /// Communication with another rank failed.
    #[error(transparent)]
    Comm(#[from] moh_comm::Error),
    /// The device failed, or an operator rejected its input.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
    /// The model is invalid.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
}

impl Error {
    /// Wraps the error of a function that reads samples, for `map_err`.
    pub fn samples(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Samples(error.into())
    }
}

/// A result of this crate.
pub type Result<V, E = Error> = std::result::Result<V, E>;
