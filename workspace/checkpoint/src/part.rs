//! The part of a checkpoint that one rank has written: its shards of tensors, and its files.

use moh_model::slice::Slice;
use moh_step::TensorKind;
use serde::{Deserialize, Serialize};

use super::manifest::rank_file_name;

/// The shards and files that a rank has written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankPart {
    /// The file and the dtype of the weights, and of the first and the second moments.
    pub files: [TensorFile; 3],
    /// The rank's shards of tensors.
    pub tensors: Vec<TensorEntry>,
}

/// A safetensors file with one kind of a rank's tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorFile {
    /// The name of the file in the checkpoint's directory.
    pub file: String,
    /// The dtype of the tensors, as safetensors names it.
    pub dtype: String,
}

/// A rank's shard of a tensor: a range of the elements of a slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The tensor's name.
    pub name: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The slice's indices in each dimension: start and end of ranges, ascending. Empty for
    /// the whole tensor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slice: Vec<Vec<[usize; 2]>>,
    /// Start and end of the shard's elements within the slice, in row-major order. If the shard is the
    /// whole slice, the files store the elements in the slice's shape, otherwise as a list.
    pub range: [usize; 2],
    /// blake3 of the shard's bytes in each of the part's files.
    pub blake3: [String; 3],
}

impl RankPart {
    /// Returns the file name of the part of rank `rank` of `size`.
    pub(super) fn file_name(rank: usize, size: usize) -> String {
        rank_file_name("tensors", "json", rank, size)
    }

    pub(super) fn file(&self, kind: TensorKind) -> &TensorFile {
        &self.files[kind as usize]
    }
}

impl TensorEntry {
    /// Returns the slice of the tensor, or `None` if the slice is invalid.
    pub(super) fn slice_of_tensor(&self) -> Option<Slice> {
        if self.slice.is_empty() {
            self.shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent))?;
            return Some(Slice::whole(self.shape.clone()));
        }
        let ranges = |ranges: &Vec<[usize; 2]>| ranges.iter().map(|&[from, to]| from..to).collect();
        Slice::new(self.shape.clone(), self.slice.iter().map(ranges).collect())
    }

    /// Returns the stored shape, or `None` if the slice or the range is invalid.
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
            shape: shape.to_vec(),
            slice: slice.iter().map(|ranges| ranges.to_vec()).collect(),
            range,
            blake3: Default::default(),
        }
    }

    #[test]
    fn without_indices_a_slice_is_the_whole_tensor() {
        assert_eq!(entry(&[3, 4], &[], [0, 12]).stored_shape(), Some(vec![3, 4]));
        assert_eq!(entry(&[3, 4], &[], [5, 12]).stored_shape(), Some(vec![7]));
        assert_eq!(entry(&[3, 4], &[], [0, 13]).stored_shape(), None);
        assert_eq!(entry(&[usize::MAX, 2], &[], [0, 1]).stored_shape(), None);
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
