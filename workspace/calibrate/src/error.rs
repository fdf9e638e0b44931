//! The errors of this crate.

/// An error of this crate. Its message is one sentence: the fault, its place, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The tokens or the numbers of heads cannot be used, or a layer has no fit.
    #[error("{0}")]
    Invalid(String),
    /// A fit of a layer failed; the message does not name the layer yet.
    #[error("{0}")]
    Fit(&'static str),
    /// The caller asked to stop.
    #[error("the calibration was stopped")]
    Stopped,
    /// The model could not be run.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
}

impl Error {
    pub(crate) const NOT_FINITE: Error = Error::Fit(
        "the heads' outputs have a value that is not finite: the model or its text cannot be used",
    );
    /// The heads' outputs do not determine a fit.
    pub(crate) const SINGULAR: Error = Error::Fit(
        "the heads' outputs are all zero or depend on each other: the output projection has no fit",
    );

    /// Returns the error with the layer's name in its message.
    pub(crate) fn in_layer(self, layer: usize) -> Self {
        match self {
            Error::Fit(reason) => Error::Invalid(format!("layer {layer}: {reason}")),
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
