//! The errors of this crate.

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A fit has more unknowns for each output than tokens.
    #[error(
        "{tokens} calibration tokens: a fit of {width} inputs, the width of all query heads, needs at least \
         as many: give more text, or more --calibration-tokens"
    )]
    TooFewTokens {
        /// Tokens of all windows.
        tokens: usize,
        /// Width of all query heads.
        width: usize,
    },
    /// A window is longer than the model's context, or has fewer than two tokens.
    #[error("windows of {length} tokens: must be 2 to {context}, the model's context length")]
    Length {
        /// Tokens of a window.
        length: usize,
        /// `max_position_embeddings`.
        context: usize,
    },
    /// A sum over tokens is not finite.
    #[error(
        "the heads' outputs have a value that is not finite: the model or its text cannot be used"
    )]
    NotFinite,
    /// The heads' outputs do not determine a fit.
    #[error(
        "the heads' outputs are all zero or depend on each other: the output projection has no fit"
    )]
    Singular,
    /// A number of active heads that the layers cannot have together.
    #[error(
        "{total} active heads in {layers} layers: must be a multiple of {unit}, at least {unit} a layer and at most \
         all heads"
    )]
    Total {
        /// Active heads.
        total: usize,
        /// Layers.
        layers: usize,
        /// Heads in whose multiples the router makes them active.
        unit: usize,
    },
    /// An error in a layer.
    #[error("layer {layer}: {error}")]
    Layer {
        /// The layer, from 0.
        layer: usize,
        /// The error.
        error: Box<Error>,
    },
    /// The model could not be run.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
}

impl Error {
    /// The same, which names the layer.
    pub(crate) fn in_layer(self, layer: usize) -> Self {
        match self {
            Error::NotFinite | Error::Singular => Error::Layer { layer, error: Box::new(self) },
            other => other,
        }
    }
}

impl From<moh_kernels::Error> for Error {
    fn from(error: moh_kernels::Error) -> Self {
        moh_model::Error::from(error).into()
    }
}

/// A result of this crate.
pub type Result<V, E = Error> = std::result::Result<V, E>;
