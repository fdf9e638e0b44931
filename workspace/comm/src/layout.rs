//! The arrangement of ranks: data x pipeline x tensor.
//!
//! The order is Megatron's default, tp-dp-pp. The tensor dimension varies fastest, so that its
//! ranks, which communicate most, share a node. Data varies next, and the pipeline slowest:
//! `rank = tensor + T (data + D pipeline)`.

use crate::{Error, Group, Result};

/// The sizes of the three parallel dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankLayout {
    /// The tensor-parallel size.
    pub tensor: usize,
    /// The data-parallel size.
    pub data: usize,
    /// The pipeline-parallel size.
    pub pipeline: usize,
}

/// A rank's coordinate in each dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// The position among the ranks that shard the same tensors.
    pub tensor: usize,
    /// The position among the data-parallel replicas.
    pub data: usize,
    /// The position among the stages of the pipeline.
    pub pipeline: usize,
}

/// The groups of a rank. Its rank in each group is its coordinate.
#[derive(Debug, Clone)]
pub struct Groups {
    /// The ranks with shards of the same tensors.
    pub tensor: Group,
    /// The ranks with the same shards and different data.
    pub data: Group,
    /// The pipeline's stages.
    pub pipeline: Group,
}

impl RankLayout {
    /// Arranges `size` ranks. The data dimension is `size / (tensor * pipeline)`.
    ///
    /// # Errors
    /// Fails unless `tensor * pipeline` divides `size`.
    pub fn new(size: usize, tensor: usize, pipeline: usize) -> Result<Self> {
        match tensor.checked_mul(pipeline) {
            Some(model) if size > 0 && size.is_multiple_of(model) => {
                Ok(RankLayout { tensor, data: size / model, pipeline })
            }
            _ => Err(Error::Call(format!(
                "{size} ranks cannot be arranged as tensor = {tensor} x pipeline = {pipeline}: \
                 start a multiple of {} ranks, or change the two",
                tensor.saturating_mul(pipeline)
            ))),
        }
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.tensor * self.data * self.pipeline
    }

    /// Returns the coordinates of `rank`. If `rank` is not below the size, the pipeline coordinate is out of
    /// range.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        Coordinates {
            tensor: rank % self.tensor,
            data: rank / self.tensor % self.data,
            pipeline: rank / (self.tensor * self.data),
        }
    }

    /// Returns the rank at these coordinates.
    pub fn rank(&self, at: Coordinates) -> usize {
        at.tensor + self.tensor * (at.data + self.data * at.pipeline)
    }

    /// Splits the group of all ranks. Every rank must call it.
    pub fn groups(&self, all: &Group) -> Result<Groups> {
        if all.size() != self.size() {
            return Err(Error::Call(format!(
                "a layout of {} ranks cannot split a group of {}",
                self.size(),
                all.size()
            )));
        }
        let at = self.coordinates(all.rank());
        // Ranks that differ only in this coordinate have the same colour.
        let group = |name, origin: Coordinates, key| {
            let group = all.split(name, Some(self.rank(origin)), key)?;
            group.ok_or_else(|| Error::Call(format!("no group {name} for rank {}", all.rank())))
        };
        Ok(Groups {
            tensor: group("tensor", Coordinates { tensor: 0, ..at }, at.tensor)?,
            data: group("data", Coordinates { data: 0, ..at }, at.data)?,
            pipeline: group("pipeline", Coordinates { pipeline: 0, ..at }, at.pipeline)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_varies_fastest_then_data_then_pipeline() {
        let layout = RankLayout::new(12, 2, 3).unwrap();
        assert_eq!((layout.tensor, layout.data, layout.pipeline), (2, 2, 3));
        let at = |tensor, data, pipeline| Coordinates { tensor, data, pipeline };
        let found = [0, 1, 2, 4, 11].map(|rank| layout.coordinates(rank));
        assert_eq!(found, [at(0, 0, 0), at(1, 0, 0), at(0, 1, 0), at(0, 0, 1), at(1, 1, 2)]);
        for rank in 0..12 {
            assert_eq!(layout.rank(layout.coordinates(rank)), rank);
        }
    }

    #[test]
    fn sizes_that_do_not_divide_are_refused_with_the_multiple() {
        let expected = "6 ranks cannot be arranged as tensor = 2 x pipeline = 2: start a multiple of 4 ranks, \
                        or change the two";
        assert_eq!(RankLayout::new(6, 2, 2).unwrap_err().to_string(), expected);
        assert!(RankLayout::new(0, 1, 1).is_err());
        assert!(RankLayout::new(6, 0, 1).is_err());
        assert!(RankLayout::new(6, usize::MAX, usize::MAX).is_err());
    }
}
