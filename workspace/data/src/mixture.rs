//! The source of the n-th sample, and the number of earlier samples of that source: a function of
//! seed and sample number, without state. The samples of one source keep their own order.
//!
//! The sources are the leaves of a binary tree. Each node sends a sample to its first or second half of sources, and
//! numbers the samples of either half from 0, until one source remains. Let w be the weight of a node's first half, and
//! W the node's weight. If n is a multiple of 1,024, round(n w / W) of the node's first n samples are in the first
//! half. In between, every halving of these 1,024 samples halves the samples of either side. An odd sample is assigned
//! to a half at random. Everywhere each source is within a few samples of its share, at a cost of log(sources) x 10
//! operations a sample.

use std::ops::Range;
use std::path::Path;

use crate::permutation::key_of;
use crate::{Error, Order, Result};

/// Distinguishes the keys of mixtures from the keys of windows.
const MIXTURE_KEY: u64 = 0x6d69_7874;
/// Samples of a node with a random order of its two halves; a power of two.
const SPAN: u64 = 1024;
/// The sum of weights after scaling. Rounding to it changes a share by less than one sample in
/// 2^60, and its products with sample numbers fit u128.
const SCALE: f64 = (1u64 << 62) as f64;
/// Up to this sum, weights that are whole numbers are used as they are: f64 adds them exactly.
const EXACT: f64 = (1u64 << 53) as f64;

/// The proportions of the sources, as a tree.
#[derive(Debug)]
pub(crate) struct Mixture {
    /// The sum of the weights before each source, then the sum of all: one entry more than sources.
    before: Vec<u64>,
    order: Order,
    seed: u64,
}

/// A node: the first source of its second half, the weight of its first half, and its own weight.
struct Node {
    middle: usize,
    first: u128,
    both: u128,
}

impl Mixture {
    /// Computes the proportions of these sources.
    ///
    /// # Errors
    /// Fails if there is no source, or if a weight is not a positive number or is too small for a
    /// sample in any run.
    pub(crate) fn new(sources: &[(&Path, f64)], order: Order, seed: u64) -> Result<Self> {
        if sources.is_empty() {
            return Err(Error::Invalid("no data source: name at least one".to_owned()));
        }
        let refuse = |&(path, weight): &(&Path, f64), reason| {
            Error::Invalid(format!("{}: weight {weight}: {reason}", path.display()))
        };
        for source in sources {
            if !(source.1.is_finite() && source.1 > 0.0) {
                return Err(refuse(source, "must be a positive number"));
            }
        }
        let weights: Vec<f64> = sources.iter().map(|source| source.1).collect();
        let whole = weights.iter().all(|weight| weight.fract() == 0.0)
            && weights.iter().sum::<f64>() <= EXACT;
        let mut before = vec![0];
        let mut sum = 0;
        for (source, share) in sources.iter().zip(shares(&weights)) {
            let scaled = if whole { source.1 as u64 } else { (share * SCALE).round() as u64 };
            if scaled == 0 {
                return Err(refuse(
                    source,
                    "too small relative to the others: no run would read it, leave it out",
                ));
            }
            // Rounding adds at most 1/2 and a few units in the last place for each source to 2^62.
            sum += scaled;
            before.push(sum);
        }
        Ok(Self { before, order, seed })
    }

    fn sources(&self) -> usize {
        self.before.len() - 1
    }

    fn node(&self, sources: &Range<usize>) -> Node {
        let middle = sources.start.midpoint(sources.end);
        let weight = |from: usize, to: usize| u128::from(self.before[to] - self.before[from]);
        Node {
            middle,
            first: weight(sources.start, middle),
            both: weight(sources.start, sources.end),
        }
    }

    /// Returns the source of sample `number`, and the number of earlier samples of that source.
    pub(crate) fn locate(&self, number: u64) -> (usize, u64) {
        let (mut sources, mut number) = (0..self.sources(), number);
        while sources.len() > 1 {
            let node = self.node(&sources);
            let (earlier, is_first) = self.divide(&node, number);
            (sources, number) = match is_first {
                true => (sources.start..node.middle, earlier),
                false => (node.middle..sources.end, number - earlier),
            };
        }
        (sources.start, number)
    }

    /// Counts the samples of each source among the first `samples`.
    pub(crate) fn counts(&self, samples: u64) -> Vec<u64> {
        let mut counts = vec![0; self.sources()];
        let mut open = vec![(0..self.sources(), samples)];
        while let Some((sources, samples)) = open.pop() {
            if sources.len() == 1 {
                counts[sources.start] = samples;
                continue;
            }
            let node = self.node(&sources);
            let (earlier, _) = self.divide(&node, samples);
            open.push((sources.start..node.middle, earlier));
            open.push((node.middle..sources.end, samples - earlier));
        }
        counts
    }

    /// Counts the samples of a node's first half before its sample `number`. Also returns whether that sample is in the
    /// first half.
    fn divide(&self, node: &Node, number: u64) -> (u64, bool) {
        if self.order == Order::Sequential {
            let earlier = node.share(u128::from(number));
            return (earlier, node.share(u128::from(number) + 1) > earlier);
        }
        let span = number / SPAN;
        let start = u128::from(span) * u128::from(SPAN);
        let mut earlier = node.share(start);
        // The number of samples of the first half among `length` samples. This sample has the index `place` among them.
        // If the number is odd, a random bit selects the half with one more. The bits of a span are numbered as the
        // nodes of a binary heap.
        let mut inside = node.share(start + u128::from(SPAN)) - earlier;
        let (mut length, mut place, mut bit) = (SPAN, number % SPAN, 1);
        let key = key_of(&[self.seed, MIXTURE_KEY, node.middle as u64, span]);
        while length > 1 {
            length /= 2;
            let odd = inside % 2 * (key_of(&[key, bit]) & 1);
            let half = inside / 2 + odd;
            bit *= 2;
            if place < length {
                inside = half;
            } else {
                (earlier, inside) = (earlier + half, inside - half);
                (place, bit) = (place - length, bit + 1);
            }
        }
        (earlier, inside == 1)
    }
}

impl Node {
    /// Returns the number of samples of the first half among the first `samples`: its share, rounded to the nearest.
    fn share(&self, samples: u128) -> u64 {
        // The product is below 2^65 x 2^63. The share is at most `samples`, and below 2^64 because
        // `first` is below `both`.
        ((samples * self.first + self.both / 2) / self.both) as u64
    }
}

/// Returns each weight as a share of the sum. Dividing by the largest weight first keeps huge weights finite.
fn shares(weights: &[f64]) -> impl Iterator<Item = f64> {
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let sum: f64 = weights.iter().map(|weight| weight / largest).sum();
    weights.iter().map(move |weight| weight / largest / sum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Order::{Sequential, Shuffled};
    use super::*;

    fn try_mixture(weights: &[f64], order: Order, seed: u64) -> Result<Mixture> {
        let sources: Vec<_> = weights.iter().map(|&weight| (Path::new("s"), weight)).collect();
        Mixture::new(&sources, order, seed)
    }

    fn mixture(weights: &[f64], order: Order) -> Mixture {
        try_mixture(weights, order, 11).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn each_source_counts_up_from_zero_and_keeps_its_share(
            weights in prop::collection::vec(1e-4f64..10.0, 1..40),
            sequential: bool,
            seed: u64,
        ) {
            let order = if sequential { Sequential } else { Shuffled };
            let mixture = try_mixture(&weights, order, seed).unwrap();
            let sum: f64 = weights.iter().sum();
            let mut next = vec![0; weights.len()];
            for number in 0..3 * SPAN {
                if number % 101 == 0 {
                    prop_assert_eq!(mixture.counts(number), next.clone());
                    for (count, weight) in next.iter().zip(&weights) {
                        let exact = number as f64 * weight / sum;
                        // 1/2 and 1/2 for each of ten halvings, at each of at most six levels.
                        prop_assert!((*count as f64 - exact).abs() <= 33.0, "{} {}", count, exact);
                    }
                }
                let (source, index) = mixture.locate(number);
                prop_assert_eq!(index, next[source]);
                next[source] += 1;
            }
        }
    }

    #[test]
    fn whole_weights_are_exact_at_any_length() {
        let mixture = mixture(&[2000.0, 1.0], Shuffled);
        // Multiples of both 2001 and the span.
        for spans in [1, 1000, 8_000_000_000_000] {
            assert_eq!(mixture.counts(spans * 2001 * SPAN), [spans * 2000 * SPAN, spans * SPAN]);
        }
        let found = mixture.counts(2001);
        assert!(found[0] + found[1] == 2001 && found[1] <= 2, "{found:?}");
    }

    #[test]
    fn decimal_weights_are_exact_at_any_length() {
        let mixture = mixture(&[99.85, 0.15], Shuffled);
        let samples = 20_000 * SPAN;
        assert_eq!(mixture.counts(samples), [19_970 * SPAN, 30 * SPAN]);
        assert_eq!(mixture.counts(samples << 20), [(19_970 * SPAN) << 20, (30 * SPAN) << 20]);
    }

    #[test]
    fn thousands_of_sources_are_each_read() {
        let mixture = mixture(&[1.0; 3000], Shuffled);
        let counts = mixture.counts(3000 * SPAN);
        assert!(counts.iter().all(|&count| count == SPAN), "{counts:?}");
        let earliest = (0..6000).map(|number| mixture.locate(number).0);
        let found: std::collections::BTreeSet<usize> = earliest.collect();
        assert!(found.len() > 2500, "{}", found.len());
    }

    #[test]
    fn the_largest_sample_numbers_do_not_overflow() {
        for weights in [&[1e300, 2e300, 1e299][..], &[0.1, 0.9]] {
            for order in [Shuffled, Sequential] {
                let mixture = mixture(weights, order);
                let (source, index) = mixture.locate(u64::MAX);
                assert_eq!(mixture.counts(u64::MAX)[source], index);
            }
        }
    }

    #[test]
    fn impossible_weights_are_refused() {
        for weights in [&[1.0, 0.0][..], &[-1.0], &[f64::NAN], &[f64::INFINITY, 1.0], &[1.0, 1e-20]]
        {
            let error = try_mixture(weights, Shuffled, 0).unwrap_err();
            assert!(error.to_string().contains(": weight "), "{error}");
        }
        let error = try_mixture(&[], Shuffled, 0).unwrap_err();
        assert_eq!(error.to_string(), "no data source: name at least one");
    }

    #[test]
    fn sequential_sources_alternate() {
        let mixture = mixture(&[1.0, 1.0], Sequential);
        let sources: Vec<_> = (0..6).map(|number| mixture.locate(number).0).collect();
        assert_eq!(sources, [0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn spans_are_shuffled_differently() {
        let mixture = mixture(&[1.5, 1.0], Shuffled);
        let sources = |first: u64| -> Vec<_> {
            (first..first + 50).map(|number| mixture.locate(number).0).collect()
        };
        assert_ne!(sources(0), sources(SPAN));
    }

    #[test]
    fn the_order_is_pinned() {
        for (weights, order, seed, first, hash) in RECORDED {
            let mixture = try_mixture(weights, order, seed).unwrap();
            let mut all = String::new();
            let sources: String =
                (0..12).map(|number| mixture.locate(number).0.to_string()).collect();
            for number in (0..2500).chain(987_654_321..987_656_321) {
                let (source, index) = mixture.locate(number);
                all += &format!("{source} {index}\n");
            }
            let found = blake3::hash(all.as_bytes()).to_hex();
            assert_eq!((&sources[..], &found[..16]), (first, hash), "{weights:?} {order:?} {seed}");
        }
    }

    type Recorded = (&'static [f64], Order, u64, &'static str, &'static str);

    /// Weights, order, seed, the sources of the first samples, and the start of the blake3 of "SOURCE INDEX\n" of
    /// samples 0..2500 and 987654321..987656321. A Python implementation of this file's head computed them. Another
    /// order would alter resumed runs: it needs another [`crate::ORDER_VERSION`].
    const RECORDED: [Recorded; 9] = [
        (&[5.0], Shuffled, 1, "000000000000", "01ee1eb66567f868"),
        (&[1.0, 1.0], Shuffled, 7, "101010101001", "d80466eff14116d7"),
        (&[0.7, 0.2, 0.1], Shuffled, 0, "010001000002", "abac30c9425b447a"),
        (&[1.0, 1.0, 1.0], Shuffled, 42, "100210221012", "6c394beaef8dcf60"),
        (&[999.0, 1.0], Shuffled, 3, "000000000000", "50216c1f2b7b7864"),
        (&[0.5, 0.25, 0.15, 0.06, 0.04], Shuffled, u64::MAX, "310101200020", "a836d572f6bf488b"),
        (&[0.5, 1.0, 0.75, 0.001], Shuffled, 11, "211210120102", "2eb27c5498e4cbe8"),
        (&[0.5, 1.0, 0.75, 0.001], Sequential, 11, "120121021120", "b4fc0764a3389b77"),
        (&[3.0, 1.0, 2.0], Sequential, 5, "020102020102", "65c5f2e3241b700d"),
    ];
}
