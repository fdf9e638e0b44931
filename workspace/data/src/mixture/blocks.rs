//! Mixtures whose weights are thousandths. Every block of 1,000 samples contains each source in its
//! proportion (largest remainder), so the source of a sample, and the number of earlier samples of
//! that source, follow from the sample number alone. Inside a block the sources are shuffled with a
//! key of seed and block, or spread evenly.

use super::{MIXTURE_KEY, shares};
use crate::Order;
use crate::permutation::{Permutation, key_of};

/// Samples per block.
pub(super) const BLOCK: u64 = 1000;
/// Maximum difference between a source's samples in a block and its exact share, relative to the
/// share. The weights [1, 1, 1] are within it; a source of 0.15% would be off by a third.
const TOLERANCE: f64 = 0.01;

/// The samples of each source in a block.
#[derive(Debug)]
pub(crate) struct Blocks {
    counts: Vec<u64>,
    seed: u64,
    /// Source of each slot of a block, and earlier slots of that source; only for sequential order.
    spread: Option<Vec<(usize, u64)>>,
}

impl Blocks {
    /// The blocks of these weights, which are positive; `None` if thousandths do not fit them.
    pub(super) fn new(weights: &[f64], order: Order, seed: u64) -> Option<Self> {
        let counts = thousandths(weights)?;
        let spread = (order == Order::Sequential).then(|| spread(&counts));
        Some(Self { counts, seed, spread })
    }

    /// Whether each source has at least one sample of a block once its share is rounded.
    pub(super) fn could_round(weights: &[f64]) -> bool {
        rounded(weights).0.iter().all(|&count| count > 0)
    }

    /// See [`super::Mixture::locate`].
    pub(super) fn locate(&self, number: u64) -> (usize, u64) {
        let (block, slot) = (number / BLOCK, number % BLOCK);
        let (source, index) = match &self.spread {
            // `slot` is below BLOCK, the length of the table.
            Some(spread) => spread[slot as usize],
            None => self.shuffled(block, slot),
        };
        (source, block * self.counts[source] + index)
    }

    /// See [`super::Mixture::counts`].
    pub(super) fn counts(&self, samples: u64) -> Vec<u64> {
        let (blocks, rest) = (samples / BLOCK, samples % BLOCK);
        let mut counts: Vec<u64> =
            self.counts.iter().map(|count| blocks.saturating_mul(*count)).collect();
        for number in blocks * BLOCK..blocks * BLOCK + rest {
            counts[self.locate(number).0] += 1;
        }
        counts
    }

    /// Source of a slot of a shuffled block, and earlier slots of that source.
    fn shuffled(&self, block: u64, slot: u64) -> (usize, u64) {
        let permutation = Permutation::new(BLOCK, key_of(&[self.seed, MIXTURE_KEY, block]));
        let at = |slot| self.source_of(permutation.apply(slot));
        let source = at(slot);
        (source, (0..slot).filter(|&earlier| at(earlier) == source).count() as u64)
    }

    /// The source of a slot of an unshuffled block, in which each source has consecutive slots.
    fn source_of(&self, slot: u64) -> usize {
        let mut end = 0;
        self.counts
            .iter()
            .position(|count| {
                end += count;
                slot < end
            })
            // The counts add up to BLOCK, and every slot is below BLOCK.
            .unwrap_or(0)
    }
}

/// The samples of each source in a block, rounded by largest remainder, and its exact share of the
/// block.
fn rounded(weights: &[f64]) -> (Vec<u64>, Vec<f64>) {
    let exact: Vec<f64> = shares(weights).map(|share| share * BLOCK as f64).collect();
    let mut counts: Vec<u64> = exact.iter().map(|share| share.floor() as u64).collect();
    let mut by_remainder: Vec<usize> = (0..exact.len()).collect();
    // The sort is stable: equal remainders go to the first source.
    by_remainder.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let missing = BLOCK.saturating_sub(counts.iter().sum());
    for &source in by_remainder.iter().cycle().take(missing as usize) {
        counts[source] += 1;
    }
    (counts, exact)
}

/// The rounded samples of each source in a block; `None` if they are further from a source's share
/// than the tolerance.
fn thousandths(weights: &[f64]) -> Option<Vec<u64>> {
    let (counts, exact) = rounded(weights);
    let fits = |(&count, exact): (&u64, &f64)| {
        count > 0 && (count as f64 - exact).abs() <= TOLERANCE * exact
    };
    counts.iter().zip(&exact).all(fits).then_some(counts)
}

/// A block with the samples of each source spaced as evenly as possible.
fn spread(counts: &[u64]) -> Vec<(usize, u64)> {
    let mut slots: Vec<(f64, usize, u64)> = Vec::with_capacity(BLOCK as usize);
    for (source, &count) in counts.iter().enumerate() {
        for index in 0..count {
            slots.push(((index as f64 + 0.5) / count as f64, source, index));
        }
    }
    slots.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    slots.into_iter().map(|(_, source, index)| (source, index)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousandths_are_rounded_by_largest_remainder() {
        assert_eq!(thousandths(&[1.0, 1.0, 1.0]).unwrap(), [334, 333, 333]);
        assert_eq!(thousandths(&[0.7, 0.2, 0.1]).unwrap(), [700, 200, 100]);
        assert_eq!(thousandths(&[1e308, 1e308]).unwrap(), [500, 500]);
        assert_eq!(thousandths(&[1.0; 1000]).unwrap(), [1; 1000]);
    }

    #[test]
    fn weights_between_two_thousandths_do_not_fit() {
        for weights in [&[99.85, 0.15][..], &[2000.0, 1.0], &[1.0; 1001], &[1e300, 1e-300]] {
            assert!(thousandths(weights).is_none(), "{weights:?}");
        }
    }
}
