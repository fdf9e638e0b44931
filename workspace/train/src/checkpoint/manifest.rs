//! The manifest of a checkpoint.

use moh_model::HeadCounts;
use moh_model::slice::Slice;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The format version that this program writes and reads.
pub(super) const FORMAT: u32 = 3;

/// The manifest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format.
    pub format: u32,
    /// The state of the run.
    pub state: RunState,
    /// The model's `config.json`.
    pub config: Map<String, Value>,
    /// Every tensor.
    pub tensors: Vec<TensorEntry>,
}

/// The state of a run: everything that resuming needs besides the tensors.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Steps done, over all stages.
    pub step: u64,
    /// The stage of the next step, from 0; the number of stages when all are done.
    pub stage: usize,
    /// Steps done within that stage.
    pub stage_step: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Number of the next sample; it continues across stages.
    pub sample: u64,
    /// The evaluations so far, except those of single steps.
    pub evaluations: Vec<Evaluation>,
}

/// A loss at a moment of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// The moment.
    pub moment: Moment,
    /// Steps done at that moment, over all stages.
    pub step: u64,
    /// Mean cross-entropy, in nats per token.
    pub loss: f64,
    /// In bits per byte of the decoded targets; `None` without a tokenizer.
    pub bits_per_byte: Option<f64>,
}

/// A moment of a run at which the model is evaluated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// Before the first step.
    Loaded,
    /// At the start of a stage that changes the attention, before its first step.
    Converted {
        /// The stage's name.
        stage: String,
        /// Active heads per token from here on.
        active_heads: HeadCounts,
    },
    /// After a stage.
    Trained {
        /// The stage's name.
        stage: String,
    },
}

/// The kind of a checkpoint's tensor.
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

    /// The file of rank `rank` of `size` for its shard of these tensors.
    pub(super) fn file(self, rank: usize, size: usize) -> String {
        let name = match self {
            TensorKind::Weight => "weights",
            TensorKind::FirstMoment => "first_moment",
            TensorKind::SecondMoment => "second_moment",
        };
        match size {
            1 => format!("{name}.safetensors"),
            _ => format!("{name}-{:05}-of-{size:05}.safetensors", rank + 1),
        }
    }
}

/// One tensor of a checkpoint, or a rank's shard of one: a range of the elements of a slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: TensorKind,
    /// The file in the checkpoint's directory.
    pub file: String,
    /// Its dtype, as safetensors names it.
    pub dtype: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The slice's indices in each dimension: start and end of ranges, in ascending order.
    pub slice: Vec<Vec<[usize; 2]>>,
    /// Start and end of the file's elements within the slice, in row-major order. The file stores
    /// them in the slice's shape if they are the whole slice, and as a list otherwise.
    pub range: [usize; 2],
    /// blake3 of the shard's bytes.
    pub blake3: String,
}

impl TensorEntry {
    /// The slice of the tensor; `None` if it is invalid.
    pub(super) fn slice_of_tensor(&self) -> Option<Slice> {
        let ranges = |ranges: &Vec<[usize; 2]>| ranges.iter().map(|&[from, to]| from..to).collect();
        Slice::new(self.shape.clone(), self.slice.iter().map(ranges).collect())
    }

    /// The stored shape; `None` if slice and range are invalid.
    pub(super) fn stored_shape(&self) -> Option<Vec<usize>> {
        let slice = self.slice_of_tensor()?;
        match self.range {
            [0, end] if end == slice.len() => Some(slice.extents()),
            [from, to] if from <= to && to <= slice.len() => Some(vec![to - from]),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(shape: &[usize], slice: &[&[[usize; 2]]], range: [usize; 2]) -> TensorEntry {
        TensorEntry {
            name: "a".into(),
            kind: TensorKind::Weight,
            file: "f".into(),
            dtype: "F32".into(),
            shape: shape.to_vec(),
            slice: slice.iter().map(|ranges| ranges.to_vec()).collect(),
            range,
            blake3: String::new(),
        }
    }

    #[test]
    fn whole_slices_keep_their_shape_and_parts_of_them_are_lists() {
        let rows: &[&[[usize; 2]]] = &[&[[0, 1], [2, 3]], &[[1, 4]]];
        assert_eq!(entry(&[3, 4], rows, [0, 6]).stored_shape(), Some(vec![2, 3]));
        assert_eq!(entry(&[3, 4], rows, [1, 4]).stored_shape(), Some(vec![3]));
        assert_eq!(entry(&[3], &[&[[0, 3]]], [1, 3]).stored_shape(), Some(vec![2]));
    }

    #[test]
    fn slices_and_ranges_that_make_no_sense_have_no_shape() {
        let every: &[[usize; 2]] = &[[0, 4]];
        for (slice, range) in [
            (&[&[[0, 4]][..], every][..], [0, 16]),
            (&[&[[2, 1]], every], [0, 0]),
            (&[&[[0, 2], [1, 3]], every], [0, 12]),
            (&[&[[0, 3]]], [0, 3]),
            (&[&[[0, 3]], every], [0, 13]),
            (&[&[[0, 3]], every], [5, 4]),
        ] {
            assert_eq!(entry(&[3, 4], slice, range).stored_shape(), None, "{slice:?} {range:?}");
        }
        let huge = usize::MAX / 2;
        let slice: &[&[[usize; 2]]] = &[&[[0, huge]], &[[0, 3]]];
        assert_eq!(entry(&[huge, 3], slice, [0, 1]).stored_shape(), None);
    }
}
