//! Random numbers for the stories: splitmix64, whose output for a seed never changes.

/// 2^64 over the golden ratio: the step of splitmix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream of random numbers.
#[derive(Debug)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// The stream of these integers; their order matters.
    pub(crate) fn new(parts: &[u64]) -> Self {
        let state = parts.iter().fold(0u64, |key, &part| {
            scramble(key.wrapping_add(GOLDEN) ^ scramble(part.wrapping_add(GOLDEN)))
        });
        Self { state }
    }

    /// A random integer below `n`, or 0 if `n` is 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.state = self.state.wrapping_add(GOLDEN);
        // The high half of the product is below n.
        ((u128::from(scramble(self.state)) * n as u128) >> 64) as usize
    }
}

/// The output function of splitmix64: every bit of the result depends on every bit of `value`.
fn scramble(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
