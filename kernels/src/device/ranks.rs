//! Tensor parallelism in operators: the heads and rows of the vocabulary that are local to a rank,
//! and the sum over the ranks in the middle of an operator.

use std::ops::Range;

use crate::{Result, ViewMut};

/// Sums a table over the ranks that share an operator, in place. All ranks call it the same
/// number of times, with tables of the same shape.
pub type AllReduce<'a, M> = &'a (dyn Fn(ViewMut<'_, M, f64>) -> Result<()> + Sync);

/// The query heads of a layer, and the heads that are local to this rank: all, or the heads of every
/// `ranks`-th key/value head, starting with the `rank`-th. Shared heads come first. If the number of their key/value
/// heads is a multiple of `ranks`, all ranks have the same number of shared heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Heads of the layer.
    pub count: usize,
    /// Query heads of a key/value head.
    pub group_size: usize,
    /// This rank's index among `ranks`.
    pub rank: usize,
    /// Ranks that share the layer.
    pub ranks: usize,
}

impl Heads {
    /// Returns all heads of a layer, local to one rank.
    pub fn all(count: usize) -> Self {
        Heads { count, group_size: 1, rank: 0, ranks: 1 }
    }

    /// Returns the number of local heads.
    pub fn local(&self) -> usize {
        self.count / self.ranks
    }

    /// Returns the layer's index of the local head `local`. Local heads keep their order.
    pub fn index(&self, local: usize) -> usize {
        let group = local / self.group_size * self.ranks + self.rank;
        group * self.group_size + local % self.group_size
    }

    /// Returns how many of the layer's first `shared` heads are local; they are also the first local
    /// heads.
    pub fn local_below(&self, shared: usize) -> usize {
        (0..self.local()).take_while(|&local| self.index(local) < shared).count()
    }

    /// Returns whether the heads divide among the ranks.
    pub(crate) fn are_sound(&self) -> bool {
        let &Heads { count, group_size, rank, ranks } = self;
        rank < ranks && group_size > 0 && count.is_multiple_of(ranks * group_size)
    }
}

/// Returns the range of `count` items that belongs to rank `rank` of `ranks`. The lengths of two ranks' ranges differ
/// by at most one.
pub fn share(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    rank * count / ranks..(rank + 1) * count / ranks
}

/// The rows of a vocabulary's table that are local to this rank: all, or a range of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabularyRows {
    /// Rows of the whole vocabulary.
    pub vocab_size: usize,
    /// The first local row.
    pub first: usize,
    /// The number of local rows.
    pub count: usize,
}

impl VocabularyRows {
    /// Returns all rows, local to one rank.
    pub fn all(vocab_size: usize) -> Self {
        VocabularyRows { vocab_size, first: 0, count: vocab_size }
    }

    /// Returns the share of rank `rank` of `ranks`.
    pub fn of_rank(vocab_size: usize, rank: usize, ranks: usize) -> Self {
        let local = share(vocab_size, rank, ranks);
        VocabularyRows { vocab_size, first: local.start, count: local.len() }
    }

    /// Returns the index of a token's row among the local rows; `None` if the row is not local.
    pub fn local(&self, id: u32) -> Option<usize> {
        (id as usize).checked_sub(self.first).filter(|&row| row < self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_hold_equal_numbers_of_shared_heads_where_groups_allow_it() {
        // 8 key/value heads of 4 query heads. The first 16 heads are shared.
        let held = |rank, ranks| {
            let heads = Heads { count: 32, group_size: 4, rank, ranks };
            let indices: Vec<usize> = (0..heads.local()).map(|head| heads.index(head)).collect();
            assert!(indices.is_sorted());
            (indices, heads.local_below(16))
        };
        for ranks in [1, 2, 4, 8] {
            let mut all: Vec<usize> = (0..ranks).flat_map(|rank| held(rank, ranks).0).collect();
            all.sort_unstable();
            assert_eq!(all, (0..32).collect::<Vec<_>>());
        }
        assert_eq!(held(1, 4).0, [4, 5, 6, 7, 20, 21, 22, 23]);
        assert_eq!((0..4).map(|rank| held(rank, 4).1).collect::<Vec<_>>(), [4; 4]);
        assert_eq!(
            (0..8).map(|rank| held(rank, 8).1).collect::<Vec<_>>(),
            [4, 4, 4, 4, 0, 0, 0, 0]
        );
        assert!(!Heads { count: 32, group_size: 4, rank: 0, ranks: 3 }.are_sound());
    }

    #[test]
    fn rows_of_ranks_follow_each_other_with_any_remainder() {
        for ranks in 1..9 {
            let shares = (0..ranks).map(|rank| VocabularyRows::of_rank(517, rank, ranks));
            let end = shares.fold(0, |end, share| {
                assert_eq!((share.first, share.vocab_size), (end, 517));
                assert!((517 / ranks..=517 / ranks + 1).contains(&share.count));
                end + share.count
            });
            assert_eq!(end, 517);
        }
        let rows = VocabularyRows { vocab_size: 10, first: 3, count: 4 };
        assert_eq!(
            [2, 3, 6, 7, u32::MAX].map(|id| rows.local(id)),
            [None, Some(0), Some(3), None, None]
        );
    }
}
