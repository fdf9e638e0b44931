//! Random numbers for the stories: splitmix64, whose output for a seed never changes.

use crate::permutation::{GOLDEN, key_of, scramble};

/// A stream of random numbers.
#[derive(Debug)]
pub(super) struct Random {
    state: u64,
}

impl Random {
    /// The stream that these numbers name.
    pub(super) fn new(parts: &[u64]) -> Self {
        Self { state: key_of(parts) }
    }

    /// A number under `n`, or 0 when `n` is 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.state = self.state.wrapping_add(GOLDEN);
        // The high half of the product is under n.
        ((u128::from(scramble(self.state)) * n as u128) >> 64) as usize
    }
}
