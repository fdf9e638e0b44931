//! The source of the n-th sample, and the number of earlier samples of that source: a function of
//! seed and sample number, without state.
//!
//! Weights that are thousandths of their sum, to within a hundredth of each, are mixed in blocks of
//! 1,000 samples (`mixture/blocks.rs`), as they have been since version 0.1; all others are exact,
//! by a tree of splits between two halves of the sources (`mixture/splits.rs`). Either way the
//! samples of one source keep their own order.

mod blocks;
mod splits;

use std::path::Path;

use self::blocks::Blocks;
use self::splits::Splits;
use crate::{Error, Order, Result};

/// Makes the keys of mixtures differ from those of windows.
const MIXTURE_KEY: u64 = 0x6d69_7874;

/// The proportions of the sources.
#[derive(Debug)]
pub(crate) enum Mixture {
    /// A single source.
    Single,
    /// Weights close to thousandths of their sum.
    Blocks(Blocks),
    /// Any weights.
    Splits {
        splits: Splits,
        /// Whether version 0.1.0 accepted the weights, rounded to thousandths.
        was_rounded: bool,
    },
}

impl Mixture {
    /// Computes the proportions of these sources.
    ///
    /// # Errors
    /// Fails if there is no source, or if a weight is not a positive number or is too small for a
    /// sample in any run.
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
        if sources.len() == 1 {
            return Ok(Self::Single);
        }
        let weights: Vec<f64> = sources.iter().map(|source| source.1).collect();
        if let Some(blocks) = Blocks::new(&weights, order, seed) {
            return Ok(Self::Blocks(blocks));
        }
        match Splits::new(&weights, order, seed) {
            Ok(splits) => Ok(Self::Splits { splits, was_rounded: Blocks::could_round(&weights) }),
            Err(at) => Err(refuse(
                &sources[at],
                "too small relative to the others: no run would read it, leave it out",
            )),
        }
    }

    /// Whether version 0.1.0 accepted the weights and mixed them in another order.
    pub(crate) fn was_rounded(&self) -> bool {
        matches!(self, Self::Splits { was_rounded: true, .. })
    }

    /// The source of sample `number`, and the number of earlier samples of that source.
    pub(crate) fn locate(&self, number: u64) -> (usize, u64) {
        match self {
            Self::Single => (0, number),
            Self::Blocks(blocks) => blocks.locate(number),
            Self::Splits { splits, .. } => splits.locate(number),
        }
    }

    /// Samples of each source among the first `samples`.
    pub(crate) fn counts(&self, samples: u64) -> Vec<u64> {
        match self {
            Self::Single => vec![samples],
            Self::Blocks(blocks) => blocks.counts(samples),
            Self::Splits { splits, .. } => splits.counts(samples),
        }
    }
}

/// Each weight as a share of the sum of all. Dividing by the largest first keeps huge weights
/// finite.
fn shares(weights: &[f64]) -> impl Iterator<Item = f64> {
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let sum: f64 = weights.iter().map(|weight| weight / largest).sum();
    weights.iter().map(move |weight| weight / largest / sum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::blocks::BLOCK;
    use super::*;

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
                let exact = 2.0 * weight / sum * 1000.0;
                let tolerance = match mixture {
                    Mixture::Single => 0.0,
                    Mixture::Blocks(_) => f64::max(2.0, exact / 100.0),
                    // 1/2 for the share and 1/2 for each of ten halvings, at each of at most three
                    // levels.
                    Mixture::Splits { .. } => 16.5,
                };
                prop_assert!((*count as f64 - exact).abs() <= tolerance, "{} {}", count, exact);
            }
        }
    }

    #[test]
    fn impossible_weights_are_refused() {
        for weights in [&[1.0, 0.0][..], &[-1.0], &[f64::NAN], &[f64::INFINITY, 1.0], &[1e30, 1.0]]
        {
            assert!(matches!(mixture(weights, Order::Shuffled, 0), Err(Error::Weight { .. })));
        }
        assert!(matches!(mixture(&[], Order::Shuffled, 0), Err(Error::Empty { .. })));
    }

    #[test]
    fn weights_that_were_rounded_are_known() {
        let was_rounded =
            |weights: &[f64]| mixture(weights, Order::Shuffled, 0).unwrap().was_rounded();
        assert!(was_rounded(&[99.85, 0.15]));
        assert!(was_rounded(&[1.0; 70]));
        assert!(!was_rounded(&[1.0, 1.0, 1.0]));
        assert!(!was_rounded(&[2000.0, 1.0]));
        assert!(!was_rounded(&[1.0; 1001]));
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

    /// Weights, order, seed, the sources of the first samples, and the start of the blake3 of
    /// "SOURCE INDEX\n" of samples 0..2500 and 987654321..987656321, recorded from version 0.1.0.
    /// Another order would alter runs that are resumed.
    const RECORDED: [Recorded; 7] = [
        (&[5.0], Order::Shuffled, 1, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "01ee1eb66567f868"),
        (&[1.0, 1.0], Order::Shuffled, 7, [1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1], "1116878c0da38006"),
        (
            &[0.7, 0.2, 0.1],
            Order::Shuffled,
            0,
            [0, 0, 2, 1, 0, 0, 1, 1, 1, 0, 0, 1],
            "9e382fe3aabc8430",
        ),
        (
            &[1.0, 1.0, 1.0],
            Order::Shuffled,
            42,
            [0, 0, 2, 2, 2, 1, 1, 0, 1, 2, 0, 2],
            "855f3b66f1633ad6",
        ),
        (
            &[999.0, 1.0],
            Order::Shuffled,
            3,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            "f6fa67057ad2b74f",
        ),
        (
            &[0.5, 0.25, 0.15, 0.06, 0.04],
            Order::Shuffled,
            u64::MAX,
            [2, 1, 2, 0, 0, 1, 1, 2, 0, 2, 1, 1],
            "1f76273ce671335a",
        ),
        (
            &[3.0, 1.0, 2.0],
            Order::Sequential,
            5,
            [0, 2, 1, 0, 2, 0, 0, 2, 1, 0, 2, 0],
            "e9d3ff2de1b9e9ed",
        ),
    ];
}
