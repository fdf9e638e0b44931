//! The source of the n-th sample, and the number of earlier samples of that source. Every block of
//! 1,000 samples contains each source in its exact proportion (largest remainder), so both follow
//! from the sample number alone. Inside a block the sources are shuffled with a key of seed and
//! block, or spread evenly; the samples of one source always keep their own order.

use std::path::Path;

use crate::permutation::{Permutation, key_of};
use crate::{Error, Order, Result};

/// Samples per block.
pub(crate) const BLOCK: u64 = 1000;
/// Separates the mixture's keys from the windows' keys.
const MIXTURE_KEY: u64 = 0x6d69_7874;

/// The proportions of the sources.
#[derive(Debug)]
pub(crate) struct Mixture {
    counts: Vec<u64>,
    seed: u64,
    /// Source and rank of each slot of a block; only for sequential order.
    spread: Option<Vec<(usize, u64)>>,
}

impl Mixture {
    /// Computes the proportions of these sources.
    ///
    /// Fails if there is no source, or if a weight is not a positive number or is too small for one
    /// sample per block.
    pub(crate) fn new(sources: &[(&Path, f64)], order: Order, seed: u64) -> Result<Self> {
        if sources.is_empty() {
            return Err(Error::Empty { reason: "no data source: name at least one".to_owned() });
        }
        let refuse = |&(path, weight): &(&Path, f64), reason| Error::Weight {
            path: path.to_path_buf(),
            weight,
            reason,
        };
        for source in sources {
            if !(source.1.is_finite() && source.1 > 0.0) {
                return Err(refuse(source, "must be a positive number"));
            }
        }
        let counts = shares(sources);
        if let Some(at) = counts.iter().position(|&count| count == 0) {
            return Err(refuse(
                &sources[at],
                "too small relative to the others, must be at least a thousandth of their sum",
            ));
        }
        let spread = (order == Order::Sequential).then(|| spread(&counts));
        Ok(Self { counts, seed, spread })
    }

    /// The source of sample `number`, and the number of earlier samples of that source.
    pub(crate) fn locate(&self, number: u64) -> (usize, u64) {
        if self.counts.len() == 1 {
            return (0, number);
        }
        let (block, slot) = (number / BLOCK, number % BLOCK);
        let (source, rank) = match &self.spread {
            // `slot` is below BLOCK, the length of the table.
            Some(spread) => spread[slot as usize],
            None => self.shuffled(block, slot),
        };
        (source, block * self.counts[source] + rank)
    }

    /// Samples of each source among the first `samples`.
    pub(crate) fn counts(&self, samples: u64) -> Vec<u64> {
        let (blocks, rest) = (samples / BLOCK, samples % BLOCK);
        let mut counts: Vec<u64> =
            self.counts.iter().map(|count| blocks.saturating_mul(*count)).collect();
        for number in blocks * BLOCK..blocks * BLOCK + rest {
            counts[self.locate(number).0] += 1;
        }
        counts
    }

    /// Source and rank at `slot` of a shuffled block.
    fn shuffled(&self, block: u64, slot: u64) -> (usize, u64) {
        let permutation = Permutation::new(BLOCK, key_of(&[self.seed, MIXTURE_KEY, block]));
        let at = |slot| self.owner(permutation.apply(slot));
        let source = at(slot);
        (source, (0..slot).filter(|&earlier| at(earlier) == source).count() as u64)
    }

    /// The source of a slot if each source had its count of consecutive slots.
    fn owner(&self, slot: u64) -> usize {
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

/// Samples of each source in a block: its proportion, rounded by largest remainder.
fn shares(sources: &[(&Path, f64)]) -> Vec<u64> {
    // Dividing by the largest weight first keeps huge weights finite.
    let largest = sources.iter().fold(0.0, |largest: f64, source| largest.max(source.1));
    let sum: f64 = sources.iter().map(|source| source.1 / largest).sum();
    let exact: Vec<f64> =
        sources.iter().map(|source| source.1 / largest / sum * BLOCK as f64).collect();
    let mut counts: Vec<u64> = exact.iter().map(|share| share.floor() as u64).collect();
    let mut by_remainder: Vec<usize> = (0..exact.len()).collect();
    // The sort is stable: equal remainders go to the first source.
    by_remainder.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let missing = BLOCK.saturating_sub(counts.iter().sum());
    for &source in by_remainder.iter().cycle().take(missing as usize) {
        counts[source] += 1;
    }
    counts
}

/// A block with the samples of each source spaced as evenly as possible.
fn spread(counts: &[u64]) -> Vec<(usize, u64)> {
    let mut slots: Vec<(f64, usize, u64)> = Vec::with_capacity(BLOCK as usize);
    for (source, &count) in counts.iter().enumerate() {
        for rank in 0..count {
            slots.push(((rank as f64 + 0.5) / count as f64, source, rank));
        }
    }
    slots.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    slots.into_iter().map(|(_, source, rank)| (source, rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mixture(weights: &[f64], order: Order, seed: u64) -> Result<Mixture> {
        let sources: Vec<_> = weights.iter().map(|&weight| (Path::new("s"), weight)).collect();
        Mixture::new(&sources, order, seed)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn each_source_counts_up_from_zero(
            weights in prop::collection::vec(0.1f64..10.0, 1..6),
            sequential: bool,
            seed: u64,
        ) {
            let order = if sequential { Order::Sequential } else { Order::Shuffled };
            let mixture = mixture(&weights, order, seed).unwrap();
            let mut next = vec![0; weights.len()];
            for number in 0..2 * BLOCK {
                if number % 501 == 0 {
                    prop_assert_eq!(mixture.counts(number), next.clone());
                }
                let (source, index) = mixture.locate(number);
                prop_assert_eq!(index, next[source]);
                next[source] += 1;
            }
            let sum: f64 = weights.iter().sum();
            for (count, weight) in next.iter().zip(&weights) {
                prop_assert!((*count as f64 - 2.0 * weight / sum * 1000.0).abs() <= 2.0);
            }
        }
    }

    #[test]
    fn shares_are_rounded_by_largest_remainder() {
        let counts = |weights: &[f64]| mixture(weights, Order::Shuffled, 0).unwrap().counts;
        assert_eq!(counts(&[1.0, 1.0, 1.0]), [334, 333, 333]);
        assert_eq!(counts(&[0.7, 0.2, 0.1]), [700, 200, 100]);
        assert_eq!(counts(&[1e308, 1e308]), [500, 500]);
        assert_eq!(counts(&[5.0]), [1000]);
    }

    #[test]
    fn impossible_weights_are_refused() {
        for weights in [&[1.0, 0.0][..], &[-1.0], &[f64::NAN], &[f64::INFINITY, 1.0], &[1e9, 1.0]] {
            assert!(matches!(mixture(weights, Order::Shuffled, 0), Err(Error::Weight { .. })));
        }
        assert!(matches!(mixture(&[], Order::Shuffled, 0), Err(Error::Empty { .. })));
    }

    #[test]
    fn sequential_sources_alternate() {
        let mixture = mixture(&[1.0, 1.0], Order::Sequential, 0).unwrap();
        let sources: Vec<_> = (0..6).map(|number| mixture.locate(number).0).collect();
        assert_eq!(sources, [0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn blocks_are_shuffled_differently() {
        let mixture = mixture(&[1.0, 1.0], Order::Shuffled, 9).unwrap();
        let block = |first: u64| -> Vec<_> {
            (first..first + 50).map(|number| mixture.locate(number).0).collect()
        };
        assert_ne!(block(0), block(BLOCK));
    }

    #[test]
    fn the_order_of_weights_in_thousandths_is_pinned() {
        for (weights, order, seed, first, hash) in RECORDED {
            let mixture = mixture(weights, order, seed).unwrap();
            let mut all = String::new();
            let mut sources = [0; 12];
            for number in (0..2500).chain(987_654_321..987_656_321) {
                let (source, index) = mixture.locate(number);
                if let Some(place) = sources.get_mut(number as usize) {
                    *place = source;
                }
                all += &format!("{source} {index}\n");
            }
            let found = blake3::hash(all.as_bytes()).to_hex();
            assert_eq!((sources, &found[..16]), (first, hash), "{weights:?} {order:?} {seed}");
        }
    }

    type Recorded = (&'static [f64], Order, u64, [usize; 12], &'static str);

    /// Weights, order, seed, the sources of the first samples, and the start of the blake3 of "SOURCE INDEX\n"
    /// of samples 0..2500 and 987654321..987656321, recorded from version 0.1.0. Another order would alter
    /// runs that are resumed.
    const RECORDED: [Recorded; 7] = [
        (&[5.0], Order::Shuffled, 1, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "01ee1eb66567f868"),
        (&[1.0, 1.0], Order::Shuffled, 7, [1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1], "1116878c0da38006"),
        (&[0.7, 0.2, 0.1], Order::Shuffled, 0, [0, 0, 2, 1, 0, 0, 1, 1, 1, 0, 0, 1], "9e382fe3aabc8430"),
        (&[1.0, 1.0, 1.0], Order::Shuffled, 42, [0, 0, 2, 2, 2, 1, 1, 0, 1, 2, 0, 2], "855f3b66f1633ad6"),
        (&[999.0, 1.0], Order::Shuffled, 3, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "f6fa67057ad2b74f"),
        (&[0.5, 0.25, 0.15, 0.06, 0.04], Order::Shuffled, u64::MAX, [2, 1, 2, 0, 0, 1, 1, 2, 0, 2, 1, 1], "1f76273ce671335a"),
        (&[3.0, 1.0, 2.0], Order::Sequential, 5, [0, 2, 1, 0, 2, 0, 0, 2, 1, 0, 2, 0], "e9d3ff2de1b9e9ed"),
    ];
}
