//! What a checkpoint says about itself.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The format that this program writes and reads.
pub(super) const FORMAT: u32 = 2;

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

    /// The file in which rank `rank` of `size` writes what it holds of such tensors.
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

/// One tensor of a checkpoint, or a part of one: of the numbers of a slice, one after the other, those
/// of a range.
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
    /// First and end index in each dimension.
    pub slice: Vec<[usize; 2]>,
    /// First and end of the slice's numbers, counted in the order of its rows, that the file holds: in
    /// the slice's shape where they are all of it, else as a list.
    pub range: [usize; 2],
    /// blake3 of the part's bytes.
    pub blake3: String,
}

impl TensorEntry {
    /// The shape in which the file holds the part; `None` where slice and range make no sense.
    pub(super) fn stored_shape(&self) -> Option<Vec<usize>> {
        if self.slice.len() != self.shape.len() {
            return None;
        }
        let extents = (self.slice.iter().zip(&self.shape))
            .map(|(&[from, to], &end)| (from <= to && to <= end).then(|| to - from))
            .collect::<Option<Vec<usize>>>()?;
        let numbers =
            extents.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent))?;
        match self.range {
            [0, end] if end == numbers => Some(extents),
            [from, to] if from <= to && to <= numbers => Some(vec![to - from]),
            _ => None,
        }
    }

    /// Puts the part's numbers where they belong in the whole tensor; returns how many they are.
    pub(super) fn place(&self, values: &[f32], whole: &mut [f32]) -> usize {
        // Rows of the last dimension; the others count as one.
        let columns = self.shape.last().copied().unwrap_or(1).max(1);
        let [first, end] = self.slice.last().copied().unwrap_or([0, 1]);
        let width = (end - first).max(1);
        let mut placed = 0;
        while placed < values.len() {
            let number = self.range[0] + placed;
            let (row, column) = (number / width, number % width);
            let count = (width - column).min(values.len() - placed);
            let start = self.row(row) * columns + first + column;
            whole[start..start + count].copy_from_slice(&values[placed..placed + count]);
            placed += count;
        }
        placed
    }

    /// The whole tensor's row, all dimensions but the last taken together, that is row `row` of the
    /// slice.
    fn row(&self, mut row: usize) -> usize {
        let (mut found, mut stride) = (0, 1);
        let outer = self.shape.len().saturating_sub(1);
        for (&[first, end], &extent) in self.slice[..outer].iter().zip(&self.shape).rev() {
            let width = (end - first).max(1);
            found += (first + row % width) * stride;
            row /= width;
            stride *= extent;
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(shape: &[usize], slice: &[[usize; 2]], range: [usize; 2]) -> TensorEntry {
        TensorEntry {
            name: "a".into(),
            kind: TensorKind::Weight,
            file: "f".into(),
            dtype: "F32".into(),
            shape: shape.to_vec(),
            slice: slice.to_vec(),
            range,
            blake3: String::new(),
        }
    }

    #[test]
    fn parts_of_slices_find_their_place() {
        let mut whole = [0.0; 12];
        let part = entry(&[3, 4], &[[1, 3], [1, 3]], [1, 4]);
        assert_eq!(part.stored_shape(), Some(vec![3]));
        assert_eq!(part.place(&[1.0, 2.0, 3.0], &mut whole), 3);
        assert_eq!(whole, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 3.0, 0.0]);

        let mut whole = [0.0; 8];
        let part = entry(&[2, 2, 2], &[[0, 2], [1, 2], [0, 2]], [0, 4]);
        assert_eq!(part.stored_shape(), Some(vec![2, 1, 2]));
        part.place(&[1.0, 2.0, 3.0, 4.0], &mut whole);
        assert_eq!(whole, [0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 4.0]);

        let mut whole = [0.0; 3];
        entry(&[3], &[[0, 3]], [1, 3]).place(&[1.0, 2.0], &mut whole);
        assert_eq!(whole, [0.0, 1.0, 2.0]);
    }

    #[test]
    fn slices_and_ranges_that_make_no_sense_have_no_shape() {
        for (slice, range) in [
            (&[[0, 4], [0, 4]][..], [0, 16]),
            (&[[2, 1], [0, 4]], [0, 0]),
            (&[[0, 3]], [0, 3]),
            (&[[0, 3], [0, 4]], [0, 13]),
            (&[[0, 3], [0, 4]], [5, 4]),
        ] {
            assert_eq!(entry(&[3, 4], slice, range).stored_shape(), None, "{slice:?} {range:?}");
        }
        let huge = usize::MAX / 2;
        assert_eq!(entry(&[huge, 3], &[[0, huge], [0, 3]], [0, 1]).stored_shape(), None);
    }
}
