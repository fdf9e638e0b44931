//! What a checkpoint says about itself.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The format that this program writes and reads.
pub(super) const FORMAT: u32 = 1;

/// The manifest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format.
    pub format: u32,
    /// Where the run stands.
    pub state: RunState,
    /// The model's `config.json`.
    pub config: Map<String, Value>,
    /// Every tensor.
    pub tensors: Vec<TensorEntry>,
}

/// Where a run stands: all that continuing needs beside the tensors.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Steps done, over all stages.
    pub step: u64,
    /// The stage in which the next step is, from 0; the number of stages when all are done.
    pub stage: usize,
    /// Steps done within it.
    pub stage_step: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Number of the next sample; it runs on across stages.
    pub sample: u64,
    /// The evaluations so far that are not those of a step.
    pub evaluations: Vec<Evaluation>,
}

/// A loss at a moment of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// When.
    pub moment: Moment,
    /// Steps done by then, over all stages.
    pub step: u64,
    /// Mean cross-entropy, in nats per token.
    pub loss: f64,
    /// In bits over the bytes of the decoded targets; `None` without a tokenizer.
    pub bits_per_byte: Option<f64>,
}

/// A moment of a run at which the model is evaluated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// Before the first step.
    Loaded,
    /// At the beginning of a stage that changes the attention, before its first step.
    Converted {
        /// The stage's name.
        stage: String,
        /// Heads that a token computes from here on.
        active_heads: usize,
    },
    /// After a stage.
    Trained {
        /// The stage's name.
        stage: String,
    },
}

/// What a tensor of a checkpoint is.
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
    /// All of them.
    pub const ALL: [TensorKind; 3] =
        [TensorKind::Weight, TensorKind::FirstMoment, TensorKind::SecondMoment];

    /// The file that holds such tensors.
    pub(super) fn file(self) -> &'static str {
        match self {
            TensorKind::Weight => "weights.safetensors",
            TensorKind::FirstMoment => "first_moment.safetensors",
            TensorKind::SecondMoment => "second_moment.safetensors",
        }
    }
}

/// One tensor of a checkpoint, or a slice of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: TensorKind,
    /// The file in the checkpoint's directory.
    pub file: String,
    /// Its type as safetensors calls it.
    pub dtype: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The part that the file holds: first and end index in each dimension.
    pub slice: Vec<[usize; 2]>,
    /// blake3 of the part's bytes.
    pub blake3: String,
}
