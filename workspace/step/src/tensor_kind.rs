//! The tensors of the training state.

use serde::{Deserialize, Serialize};

/// The kind of a tensor of the training state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// The exact f32 weight.
    Weight,
    /// AdamW's first moment.
    FirstMoment,
    /// AdamW's second moment.
    SecondMoment,
}

impl TensorKind {
    /// All kinds.
    pub const ALL: [TensorKind; 3] =
        [TensorKind::Weight, TensorKind::FirstMoment, TensorKind::SecondMoment];
}
