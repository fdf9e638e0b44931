//! A keyed permutation of 0..n without a table: a Feistel network over the next even number of
//! bits, applied until the result lies inside (cycle walking; under four steps on average). It
//! makes the order of data a pure function of seed and sample number.

/// Rounds of the network. In theory four rounds give a good permutation. More rounds cost little, and help the smallest
/// ranges, with halves of one or two bits.
const ROUNDS: usize = 8;

/// A permutation of 0..n.
#[derive(Clone, Debug)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// Creates the permutation of 0..n with this key.
    pub fn new(n: u64, key: u64) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        let mut state = key;
        let keys = std::array::from_fn(|_| {
            state = state.wrapping_add(GOLDEN);
            scramble(state)
        });
        Self { n, half_bits: bits.div_ceil(2).max(1), keys }
    }

    /// Returns the image of an index below n.
    pub fn apply(&self, index: u64) -> u64 {
        assert!(index < self.n, "index {index} outside a permutation of {}", self.n);
        if self.n == 1 {
            return 0;
        }
        let mut value = self.network(index);
        // The network permutes a range that contains 0..n, so every cycle returns to it.
        while value >= self.n {
            value = self.network(value);
        }
        value
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (scramble(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// 2^64 over the golden ratio: the step of splitmix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Applies the output function of splitmix64: every bit of the result depends on every bit of `value`.
fn scramble(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Combines several integers to one key. Their order matters.
pub fn key_of(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |key, &part| {
        scramble(key.wrapping_add(GOLDEN) ^ scramble(part.wrapping_add(GOLDEN)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_number_appears_once(n in 1u64..3000, key: u64) {
            let permutation = Permutation::new(n, key);
            let mut seen: Vec<u64> = (0..n).map(|index| permutation.apply(index)).collect();
            seen.sort_unstable();
            prop_assert!(seen.iter().copied().eq(0..n));
        }
    }

    #[test]
    fn the_largest_range_works() {
        let permutation = Permutation::new(u64::MAX, 7);
        assert_ne!(permutation.apply(0), permutation.apply(u64::MAX - 1));
    }

    #[test]
    fn keys_give_different_orders() {
        let order = |key| {
            let permutation = Permutation::new(100, key);
            (0..100).map(|index| permutation.apply(index)).collect::<Vec<_>>()
        };
        assert_ne!(order(1), order(2));
        assert_ne!(order(1), (0..100).collect::<Vec<_>>());
        assert_ne!(key_of(&[1, 2]), key_of(&[2, 1]));
        assert_ne!(key_of(&[0]), key_of(&[0, 0]));
    }

    #[test]
    fn small_ranges_are_not_stuck() {
        // Over many keys, index 0 maps to each of five values about equally often.
        let mut counts = [0; 5];
        for key in 0..5000 {
            counts[Permutation::new(5, key_of(&[key])).apply(0) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }

    #[test]
    fn the_order_is_pinned() {
        // A changed order would silently alter runs that are resumed.
        let permutation = Permutation::new(10, 42);
        let order: Vec<u64> = (0..10).map(|index| permutation.apply(index)).collect();
        assert_eq!(order, PINNED);
    }

    const PINNED: [u64; 10] = [2, 9, 1, 5, 3, 7, 0, 4, 8, 6];
}
