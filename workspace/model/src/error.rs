//! What can go wrong in this crate.

/// An error of this crate; its message is one sentence that says what, where and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The counts of shared and routed heads do not fit the model.
    #[error("{reason}")]
    Moh {
        /// What is wrong.
        reason: String,
    },
    /// Activations without a backward pass were used for training.
    #[error("the activations were planned without a backward pass")]
    NotPlannedForTraining,
    /// A sequence is longer than what it was planned for, or empty.
    #[error("a sequence of {tokens} tokens does not fit: there is room for 1 to {positions}")]
    TooLong {
        /// Its length.
        tokens: usize,
        /// What there is room for.
        positions: usize,
    },
    /// The next token could not be chosen.
    #[error("no token can be sampled from these logits: {reason}")]
    Sampling {
        /// Why.
        reason: String,
    },
    /// A pipeline has more stages than the model has blocks, or none.
    #[error("a model of {layers} layers has no pipeline of {stages} stages: use 1 to {layers}")]
    Pipeline {
        /// Stages.
        stages: usize,
        /// Blocks of the model.
        layers: usize,
    },
    /// The ranks that are to share a model's tensors cannot.
    #[error(
        "{ranks} ranks cannot share the tensors of a model of {heads} key/value heads: use a number \
         that divides them, at most the MLP's width and the vocabulary"
    )]
    Tensor {
        /// Ranks.
        ranks: usize,
        /// Key/value heads of the model.
        heads: usize,
    },
    /// What needs the whole model was asked of a rank that holds a part.
    #[error("this rank holds a part of the model: generate, and read logits, with all of it")]
    Divided,
    /// An operator refused its input.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
    /// An exchange with other ranks failed.
    #[error(transparent)]
    Comm(#[from] moh_comm::Error),
}
