//! The errors of this crate.

use std::path::{Path, PathBuf};

/// An error of this crate. Its message is one sentence: the problem, the place, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// An option does not fit the model.
    #[error("{0}")]
    Option(String),
    /// The progress callback stopped the conversion. Nothing was written.
    #[error("interrupted: nothing was written")]
    Interrupted,
    /// A calibration was stopped after this number of layers, which a file keeps.
    #[error("interrupted: {} keeps the layers that were measured, {_0}; the same command goes on behind them", _1.display())]
    Kept(usize, PathBuf),
    /// A tokenizer could not be read, or cannot be used.
    #[error(transparent)]
    Text(#[from] moh_text::Error),
    /// A model could not be read or written.
    #[error(transparent)]
    Hf(#[from] moh_hf::Error),
    /// The card of a run could not be created.
    #[error(transparent)]
    Train(#[from] moh_train::Error),
    /// A run does not have the checkpoint, or the checkpoint could not be read or is damaged.
    #[error(transparent)]
    Checkpoint(#[from] moh_checkpoint::Error),
    /// The source could not be measured.
    #[error(transparent)]
    Calibrate(#[from] moh_calibrate::Error),
    /// The model is invalid, or the head counts do not fit it.
    #[error(transparent)]
    Model(#[from] moh_model::Error),
}

impl Error {
    pub(crate) fn file(path: &Path, reason: impl Into<String>) -> Error {
        moh_files::unusable(path, reason).into()
    }
}
