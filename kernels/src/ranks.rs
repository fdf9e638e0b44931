//! Tensor parallelism, as far as operators see it: which heads and which rows of the vocabulary a
//! rank holds, and the sum over the ranks in the middle of an operator.

use std::ops::Range;

use crate::backend::{Backend, ViewMut};
use crate::error::Result;

/// Adds up a table over the ranks that share an operator, in place. All of them call it as often, with
/// tables of one shape.
pub type AllReduce<'a, B> = &'a (dyn Fn(ViewMut<'_, B, f64>) -> Result<()> + Sync);

/// The query heads of a layer, and which of them are held here: all, or those of every `ranks`-th
/// key/value head from the `rank`-th on. Dealt out like this, shared heads, which come first, fall to
/// all ranks alike where their key/value heads divide by the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Heads of the layer.
    pub count: usize,
    /// Query heads of a key/value head.
    pub group_size: usize,
    /// This rank's number.
    pub rank: usize,
    /// Ranks that share the layer.
    pub ranks: usize,
}

impl Heads {
    /// All heads of a layer.
    pub fn all(count: usize) -> Self {
        Heads { count, group_size: 1, rank: 0, ranks: 1 }
    }

    /// How many are held here.
    pub fn held(&self) -> usize {
        self.count / self.ranks
    }

    /// The number in the layer of head `held` of those held here; they keep their order.
    pub fn index(&self, held: usize) -> usize {
        let group = held / self.group_size * self.ranks + self.rank;
        group * self.group_size + held % self.group_size
    }

    /// How many of the layer's first `shared` heads are held here, where they come first too.
    pub fn held_below(&self, shared: usize) -> usize {
        (0..self.held()).take_while(|&held| self.index(held) < shared).count()
    }

    /// Whether they divide as they should.
    pub(crate) fn are_sound(&self) -> bool {
        let &Heads { count, group_size, rank, ranks } = self;
        rank < ranks && group_size > 0 && count.is_multiple_of(ranks * group_size)
    }
}

/// The share of rank `rank` of `ranks` in `count` things: consecutive ones, as many as the others' or one
/// fewer.
pub fn share(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    rank * count / ranks..(rank + 1) * count / ranks
}

/// The rows of a vocabulary's table that are held here: all, or a rank's share of consecutive ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabularyRows {
    /// Rows of the whole vocabulary.
    pub vocab_size: usize,
    /// The first that is held.
    pub first: usize,
    /// How many are.
    pub count: usize,
}

impl VocabularyRows {
    /// All rows.
    pub fn all(vocab_size: usize) -> Self {
        VocabularyRows { vocab_size, first: 0, count: vocab_size }
    }

    /// The share of rank `rank` of `ranks`.
    pub fn of_rank(vocab_size: usize, rank: usize, ranks: usize) -> Self {
        let held = share(vocab_size, rank, ranks);
        VocabularyRows { vocab_size, first: held.start, count: held.len() }
    }

    /// The place of a token's row among those held; `None` for one that is elsewhere.
    pub fn place(&self, id: u32) -> Option<usize> {
        (id as usize).checked_sub(self.first).filter(|&row| row < self.count)
    }
}

/// What a vocabulary's head needs whose rows are divided among ranks.
pub struct HeadRanks<'a, B: Backend> {
    /// Those held here.
    pub rows: VocabularyRows,
    /// This rank's number, and how many there are.
    pub rank: (usize, usize),
    /// Room for [`Backend::cross_entropy_sums`] numbers.
    pub sums: ViewMut<'a, B, f64>,
    /// The sum over the ranks.
    pub all_reduce: AllReduce<'a, B>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_hold_equal_numbers_of_shared_heads_where_groups_allow_it() {
        // 8 key/value heads of 4 query heads; the first 16 heads are shared.
        let held = |rank, ranks| {
            let heads = Heads { count: 32, group_size: 4, rank, ranks };
            let indices: Vec<usize> = (0..heads.held()).map(|head| heads.index(head)).collect();
            assert!(indices.is_sorted());
            (indices, heads.held_below(16))
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
            [2, 3, 6, 7, u32::MAX].map(|id| rows.place(id)),
            [None, Some(0), Some(3), None, None]
        );
    }
}
