//! The errors of this crate.

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The counts of shared and routed heads do not fit the model.
    #[error("{reason}")]
    Moh {
        /// The problem.
        reason: String,
    },
    /// Activations without a backward pass were used for training.
    #[error("the activations were planned without a backward pass")]
    NotPlannedForTraining,
    /// Activations of each block were wanted of passes that recompute whole blocks.
    #[error("activations that recompute whole blocks do not keep each block's")]
    NotSaved,
    /// A sequence is empty or longer than planned.
    #[error("a sequence of {tokens} tokens is too short or too long: use 1 to {positions}")]
    TooLong {
        /// Its length, in tokens.
        tokens: usize,
        /// The maximum length, in tokens.
        positions: usize,
    },
    /// Sequences that are computed together differ in length.
    #[error(
        "sequence {sequence} has {tokens} tokens, but sequence 0 has {expected}: pad them at the end, \
         or compute them one by one"
    )]
    Ragged {
        /// The first sequence that differs.
        sequence: usize,
        /// Its length, in tokens.
        tokens: usize,
        /// The length of sequence 0, in tokens.
        expected: usize,
    },
    /// Several sequences cannot be generated in this way.
    #[error("{reason}")]
    Generation {
        /// The problem.
        reason: String,
    },
    /// The pool has too few free blocks for the tokens of a pass.
    #[error(
        "the cache of keys and values has {free} free blocks, and the next tokens need {needed}: remove \
         sequences, or make it larger"
    )]
    NoBlocks {
        /// Blocks that are needed.
        needed: usize,
        /// Blocks that nobody uses.
        free: usize,
    },
    /// The next token could not be chosen.
    #[error("no token can be sampled from these logits: {reason}")]
    Sampling {
        /// The cause.
        reason: String,
    },
    /// A pipeline has no stages, or more stages than the model has blocks.
    #[error(
        "a model of {layers} layers cannot be divided into {stages} pipeline stages: use 1 to {layers}"
    )]
    Pipeline {
        /// Stages.
        stages: usize,
        /// Blocks of the model.
        layers: usize,
    },
    /// The number of tensor-parallel ranks does not divide the model.
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
    /// A teacher does not fit the model that it teaches, or is missing.
    #[error("{reason}")]
    Teacher {
        /// The problem.
        reason: String,
    },
    /// An operation that requires the whole model was called on a part of it.
    #[error("generation and logits need the unsharded model, but this rank has a part of it")]
    Divided,
    /// An operator rejected its input.
    #[error(transparent)]
    Kernel(#[from] moh_kernels::Error),
    /// Communication with another rank failed.
    #[error(transparent)]
    Comm(#[from] moh_comm::Error),
}

impl Error {
    /// The error of a row of logits without a token: one is not a number, or infinite.
    pub fn not_finite() -> Self {
        Error::Sampling { reason: "one is not finite".to_owned() }
    }
}
