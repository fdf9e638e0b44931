//! The errors of this crate.

/// An error of this crate. Its message is one sentence: the fault, its place, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model, its heads, its division among ranks, or tokens for it are invalid.
    #[error("{0}")]
    Invalid(String),
    /// An operator rejected its input.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
    /// Communication with another rank failed.
    #[error(transparent)]
    Comm(#[from] moh_comm::Error),
}

impl Error {
    pub(crate) fn invalid(sentence: &str) -> Self {
        Error::Invalid(sentence.to_owned())
    }

    /// Returns the error of a sequence that is empty or longer than `positions`.
    pub fn too_long(tokens: usize, positions: usize) -> Self {
        Error::Invalid(format!(
            "a sequence of {tokens} tokens is too short or too long: use 1 to {positions}"
        ))
    }

    /// Returns the error of a pipeline without stages, or with more stages than the model has blocks.
    pub fn undivided(layers: usize, stages: usize) -> Self {
        Error::Invalid(format!(
            "a model of {layers} layers cannot be divided into {stages} pipeline stages: use 1 to {layers}"
        ))
    }

    /// Returns the error of an operation on a part of a model that requires the whole model.
    pub(crate) fn divided() -> Self {
        Error::invalid(
            "generation and logits need the unsharded model, but this rank has a part of it",
        )
    }

    /// Returns the error of logits from which the next token cannot be chosen.
    pub(crate) fn no_token(reason: &str) -> Self {
        Error::Invalid(format!("no token can be sampled from these logits: {reason}"))
    }

    /// Returns the error of a row of logits with a NaN or an infinite logit.
    pub fn not_finite() -> Self {
        Error::no_token("one is not finite")
    }
}

/// A result of this crate.
pub type Result<V, E = Error> = std::result::Result<V, E>;
