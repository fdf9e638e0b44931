//! The errors of this crate.

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The samples of a step or the windows of an evaluation could not be read: the error of what reads them.
    #[error(transparent)]
    Samples(Box<dyn std::error::Error + Send + Sync>),
    /// Another rank failed, which ends the run on this rank too.
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
    /// For `map_err`: the error of a function that reads samples.
    pub fn samples(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Samples(error.into())
    }
}

/// A result of this crate.
pub type Result<V, E = Error> = std::result::Result<V, E>;
