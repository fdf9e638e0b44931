//! The shared heads of every layer: the first heads, as in the paper's models, or a set for each layer.

use std::fmt;

use moh_kernels::router::SharedHeads;
use serde::{Deserialize, Serialize};

use crate::{Error, HeadCounts, Result};

/// The heads of each layer that every token computes. Sets of first heads equal their counts.
///
/// ```
/// use moh_model::SharedHeadSets;
///
/// let sets = SharedHeadSets::from_ids(&[vec![0, 1], vec![5, 2]])?;
/// assert_eq!(sets.counts().uniform(), Some(2));
/// assert_eq!(sets.ids(), Some(vec![vec![0, 1], vec![2, 5]]));
/// assert_eq!(SharedHeadSets::from_ids(&[vec![1, 0], vec![0, 1]])?, 2.into());
/// # Ok::<_, moh_model::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum SharedHeadSets {
    /// The first heads of each layer (`moh_shared_heads`).
    First(HeadCounts),
    /// A set for each layer (`moh_shared_head_ids`).
    Sets(Vec<SharedHeads>),
}

/// The choice of shared heads in a conversion by measurement, by its names in recipes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SharedChoice {
    /// Measurement chooses the shared heads; their number is given.
    #[default]
    Calibrated,
    /// Measurement chooses the shared heads and their number; the number of active heads is given.
    CalibratedNumber,
    /// The shared heads are given.
    Given,
}

impl SharedHeadSets {
    /// Returns the given sets of heads, one for each layer, with heads in any order.
    ///
    /// # Errors
    /// Fails if a layer names a head twice. Also fails if a layer names a head that is 256 or more heads after its
    /// first head that is not shared. The message names the layer, from 0.
    pub fn from_ids(layers: &[Vec<usize>]) -> Result<Self> {
        let of_layer = |(layer, heads): (usize, &Vec<usize>)| {
            let refuse = |reason: String| Error::Invalid(reason);
            let set = SharedHeads::from_heads(heads.iter().copied())
                .map_err(|error| refuse(format!("shared_head_ids of layer {layer}: {error}")))?;
            let twice = (heads.iter().enumerate())
                .find_map(|(at, head)| heads[..at].contains(head).then_some(head));
            match twice {
                None => Ok(set),
                Some(head) => Err(refuse(format!(
                    "shared_head_ids of layer {layer} has head {head} twice: name each head once"
                ))),
            }
        };
        layers.iter().enumerate().map(of_layer).collect()
    }

    /// Returns the shared heads of layer `layer`, from 0. Returns no heads if a list lacks the layer, which
    /// [`MohConfig::validate`](crate::MohConfig::validate) rejects.
    pub fn of_layer(&self, layer: usize) -> SharedHeads {
        match self {
            SharedHeadSets::First(counts) => SharedHeads::first(counts.of_layer(layer)),
            SharedHeadSets::Sets(sets) => sets.get(layer).copied().unwrap_or_default(),
        }
    }

    /// Returns the number of shared heads of each layer.
    pub fn counts(&self) -> HeadCounts {
        match self {
            SharedHeadSets::First(counts) => counts.clone(),
            SharedHeadSets::Sets(sets) => sets.iter().map(SharedHeads::len).collect(),
        }
    }

    /// Returns the shared heads of each layer in ascending order; `None` if every layer shares its first heads.
    pub fn ids(&self) -> Option<Vec<Vec<usize>>> {
        match self {
            SharedHeadSets::Sets(sets) if !self.are_first() => {
                Some(sets.iter().map(|set| set.heads().collect()).collect())
            }
            _ => None,
        }
    }

    fn are_first(&self) -> bool {
        match self {
            SharedHeadSets::First(_) => true,
            SharedHeadSets::Sets(sets) => sets.iter().all(|set| set.leading() == set.len()),
        }
    }
}

impl FromIterator<SharedHeads> for SharedHeadSets {
    fn from_iter<I: IntoIterator<Item = SharedHeads>>(sets: I) -> Self {
        SharedHeadSets::Sets(sets.into_iter().collect())
    }
}

impl From<HeadCounts> for SharedHeadSets {
    fn from(counts: HeadCounts) -> Self {
        SharedHeadSets::First(counts)
    }
}

impl From<usize> for SharedHeadSets {
    fn from(count: usize) -> Self {
        SharedHeadSets::First(count.into())
    }
}

impl PartialEq for SharedHeadSets {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (SharedHeadSets::Sets(a), SharedHeadSets::Sets(b)) => a == b,
            _ => self.are_first() && other.are_first() && self.counts() == other.counts(),
        }
    }
}

impl Eq for SharedHeadSets {}

/// Shows the number of shared heads, or the smallest and the largest number: `8`, `4-8`.
impl fmt::Display for SharedHeadSets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.counts().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_first_heads_are_counts() {
        let first = SharedHeadSets::from_ids(&[vec![1, 0], vec![0, 1]]).unwrap();
        assert_eq!(first, 2.into());
        assert_eq!(first.ids(), None);
        let by_layer = SharedHeadSets::from_ids(&[vec![], vec![0]]).unwrap();
        assert_eq!(by_layer, HeadCounts::Each(vec![0, 1]).into());
        let others = SharedHeadSets::from_ids(&[vec![0, 1], vec![1, 2]]).unwrap();
        assert!(others != 2.into() && others != first);
        assert_eq!(others.of_layer(1), SharedHeads::from_heads([1, 2]).unwrap());
        assert_eq!(others.of_layer(2), SharedHeads::first(0));
        assert_eq!(others.to_string(), "2");
    }

    #[test]
    fn heads_that_are_named_twice_or_too_far_apart_are_refused() {
        for (heads, expected) in [
            (vec![3, 1, 3], "shared_head_ids of layer 1 has head 3 twice"),
            (vec![400], "shared_head_ids of layer 1: shared_heads: head 400 cannot be shared"),
        ] {
            let message = SharedHeadSets::from_ids(&[vec![0], heads]).unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
