//! The shared heads of a layer: a set, usually the first heads. Two values are equal if they are
//! the same set.

use crate::error::{Result, ensure};

/// Words of [`SharedHeads::others`].
const WORDS: usize = 4;
/// Heads after the leading run that may be shared.
const SPAN: usize = WORDS * u64::BITS as usize;

/// A set of heads that every token computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SharedHeads {
    /// The number of shared heads before the first head that is not shared.
    leading: usize,
    /// Bit i % 64 of word i / 64 is 1 if head `leading + i` is shared. The bit of i = 0 is always 0.
    others: [u64; WORDS],
}

impl SharedHeads {
    /// Returns the first `count` heads.
    pub const fn first(count: usize) -> Self {
        SharedHeads { leading: count, others: [0; WORDS] }
    }

    /// Creates the set of these heads, given in any order.
    ///
    /// # Errors
    /// Fails if a head is 256 or more heads after the first head that is not shared.
    pub fn from_heads(heads: impl IntoIterator<Item = usize>) -> Result<Self> {
        let mut heads: Vec<usize> = heads.into_iter().collect();
        heads.sort_unstable();
        heads.dedup();
        let leading = heads.iter().enumerate().take_while(|&(at, &head)| at == head).count();
        let mut shared = SharedHeads::first(leading);
        for &head in &heads[leading..] {
            let bit = head - leading;
            ensure("shared_heads", bit < SPAN, || {
                format!(
                    "head {head} cannot be shared: head {leading} is not, and shared heads are \
                     fewer than {SPAN} heads after the first one that is not"
                )
            })?;
            shared.others[bit / 64] |= 1 << (bit % 64);
        }
        Ok(shared)
    }

    /// Returns whether a head is shared.
    pub fn contains(&self, head: usize) -> bool {
        head.checked_sub(self.leading).is_none_or(|bit| self.has(bit))
    }

    fn has(&self, bit: usize) -> bool {
        self.others.get(bit / 64).is_some_and(|word| (word >> (bit % 64)) & 1 == 1)
    }

    /// Returns the number of shared heads.
    pub fn len(&self) -> usize {
        let others: u32 = self.others.iter().map(|word| word.count_ones()).sum();
        self.leading + others as usize
    }

    /// Returns whether no head is shared.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of shared heads before the first head that is not shared.
    pub fn leading(&self) -> usize {
        self.leading
    }

    /// Returns the shared heads in ascending order.
    pub fn heads(&self) -> impl DoubleEndedIterator<Item = usize> {
        let set = *self;
        let others = (0..SPAN).filter(move |&bit| set.has(bit)).map(move |bit| set.leading + bit);
        (0..self.leading).chain(others)
    }

    /// Returns the columns of shared heads in a routing's tables, as bits.
    #[cfg(gpu)]
    pub(crate) fn column_bits(&self) -> [u64; WORDS] {
        self.others
    }

    /// Rejects heads that a layer of `heads` heads does not have.
    pub(crate) fn check(&self, operator: &'static str, heads: usize) -> Result<()> {
        let last = self.heads().next_back();
        ensure(operator, last.is_none_or(|last| last < heads), || {
            let (count, last) = (self.len(), last.unwrap_or(0));
            format!("{count} shared heads, up to head {last}, of {heads} heads")
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_heads_are_a_set_without_others() {
        assert_eq!(SharedHeads::from_heads([]), Ok(SharedHeads::first(0)));
        assert_eq!(SharedHeads::from_heads([2, 0, 1, 0]), Ok(SharedHeads::first(3)));
        assert_eq!(SharedHeads::from_heads(0..1000), Ok(SharedHeads::first(1000)));
        assert!(SharedHeads::default().is_empty() && !SharedHeads::first(1).is_empty());
        let odd = SharedHeads::from_heads([0, 1, 5]).unwrap();
        assert_eq!((odd.leading(), odd.len()), (2, 3));
        assert!(odd != SharedHeads::first(3) && odd != SharedHeads::first(2));
    }

    #[test]
    fn heads_too_far_after_the_leading_ones_are_refused() {
        assert!(SharedHeads::from_heads([255]).is_ok());
        assert!(SharedHeads::from_heads((0..7).chain([262])).is_ok());
        for heads in [vec![256], (0..7).chain([263]).collect(), vec![0, usize::MAX]] {
            let message = SharedHeads::from_heads(heads).unwrap_err().to_string();
            assert!(message.contains("cannot be shared: head "), "{message}");
        }
    }

    #[test]
    fn heads_that_a_layer_lacks_are_refused() {
        let odd = SharedHeads::from_heads([0, 5]).unwrap();
        assert_eq!(
            (odd.check("test", 6), SharedHeads::first(6).check("test", 6)),
            (Ok(()), Ok(()))
        );
        assert_eq!(SharedHeads::first(0).check("test", 0), Ok(()));
        let message = odd.check("test", 5).unwrap_err().to_string();
        assert!(message.contains("2 shared heads, up to head 5, of 5 heads"), "{message}");
        assert!(SharedHeads::first(7).check("test", 6).is_err());
    }

    proptest! {
        #[test]
        fn it_contains_the_heads_that_it_was_made_of(
            leading in 0usize..300,
            others in prop::collection::btree_set(1usize..SPAN, 0..40),
        ) {
            let heads: BTreeSet<usize> =
                (0..leading).chain(others.iter().map(|other| leading + other)).collect();
            let shared = SharedHeads::from_heads(heads.iter().rev().copied()).unwrap();
            prop_assert_eq!((shared.leading(), shared.len()), (leading, heads.len()));
            prop_assert!(shared.heads().eq(heads.iter().copied()));
            for head in 0..leading + SPAN + 70 {
                prop_assert_eq!(shared.contains(head), heads.contains(&head));
            }
        }
    }
}
