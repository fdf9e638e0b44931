//! Divides documents between training and validation, as a pure function of a document's number:
//! no document is in both, and the same inputs give the same files.
//!
//! Let s be the smaller share. The documents are divided into strata of 1 / s documents, stratum k from ceil(k / s) to
//! ceil((k + 1) / s). One document of each stratum, chosen by a hash of k, belongs to the smaller part. So the smaller
//! part differs by less than one document from its share of any number of documents, and is spread over all of them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use moh_data::{key_of, with_ending};

/// Shares are multiples of one billionth.
const UNITS: u64 = 1_000_000_000;
/// The seed of the hash. Another seed would divide the same documents differently.
const SEED: u64 = 0;

/// The shares of training and validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// The smaller share, in [`UNITS`].
    smaller: u64,
    smaller_is_training: bool,
}

impl Split {
    /// Returns the prefixes of the token files of training and of validation.
    pub(crate) fn prefixes(prefix: &Path) -> [PathBuf; 2] {
        ["-train", "-validation"].map(|ending| with_ending(prefix, ending))
    }

    /// Returns whether document `number`, counted from 0, belongs to validation.
    pub(crate) fn is_validation(&self, number: u64) -> bool {
        let (units, smaller) = (u128::from(UNITS), u128::from(self.smaller));
        let number = u128::from(number);
        let stratum = number * smaller / units;
        let first = |stratum: u128| (stratum * units).div_ceil(smaller);
        let (start, end) = (first(stratum), first(stratum + 1));
        // Below 2^64, as it is at most the number.
        let hash = key_of(&[SEED, stratum as u64]);
        let is_smaller = number == start + u128::from(hash) % (end - start);
        is_smaller != self.smaller_is_training
    }
}

impl fmt::Display for Split {
    /// Writes the shares of training and validation.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let smaller = self.smaller as f64 / UNITS as f64;
        let larger = (UNITS - self.smaller) as f64 / UNITS as f64;
        match self.smaller_is_training {
            true => write!(out, "{smaller},{larger}"),
            false => write!(out, "{larger},{smaller}"),
        }
    }
}

impl FromStr for Split {
    type Err = String;

    /// Parses two shares that sum to 1, training first: `0.99,0.01`.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            "expected two shares above 0 that sum to 1, training and validation, as in 0.99,0.01"
                .to_owned()
        };
        let units = |share: &str| {
            let share = share.trim().parse::<f64>().ok().filter(|share| *share > 0.0)?;
            // A larger share saturates, and then the sum is wrong.
            Some((share * UNITS as f64).round() as u64)
        };
        let (training, validation) = text.split_once(',').ok_or_else(expected)?;
        let (Some(training), Some(validation)) = (units(training), units(validation)) else {
            return Err(expected());
        };
        let smaller = training.min(validation);
        if smaller == 0 || training.checked_add(validation) != Some(UNITS) {
            return Err(expected());
        }
        Ok(Self { smaller, smaller_is_training: training < validation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(text: &str) -> Split {
        text.parse().unwrap()
    }

    fn validation(text: &str, documents: u64) -> Vec<u64> {
        let split = split(text);
        (0..documents).filter(|&number| split.is_validation(number)).collect()
    }

    #[test]
    fn shares_are_positive_and_sum_to_one() {
        for text in ["0.99,0.01", "0.5, 0.5", "1e-9,0.999999999", "0.333333333,0.666666667"] {
            split(text);
        }
        for text in [
            "",
            "1",
            "1,0",
            "0.9,0.2",
            "0.9,0.05,0.05",
            "-0.5,1.5",
            "0.5,nan",
            "inf,0.5",
            "99,1",
            "1e-10,0.9999999999",
            "0.5,0.5,",
            "1e300,1e300",
            "a,b",
        ] {
            assert!(
                text.parse::<Split>().is_err_and(|error| error.contains("0.99,0.01")),
                "{text}"
            );
        }
    }

    #[test]
    fn the_division_is_pinned() {
        // A changed division would move validation documents into training.
        assert_eq!(validation("0.9,0.1", 60), PINNED);
    }

    const PINNED: [u64; 6] = [0, 17, 23, 38, 43, 57];

    #[test]
    fn either_share_may_be_the_smaller() {
        let all: Vec<u64> = (0..60).collect();
        let training: Vec<_> =
            all.into_iter().filter(|number| !validation("0.1,0.9", 60).contains(number)).collect();
        assert_eq!(training, PINNED);
    }

    proptest! {
        #[test]
        fn each_share_is_met_within_a_document(
            smaller in prop_oneof![1u64..1000, 1_000_000u64..=UNITS / 2],
            start in 0u64..1 << 62,
            documents in 0u64..400,
        ) {
            let split = Split { smaller, smaller_is_training: false };
            let is_smaller = |number: &u64| split.is_validation(*number);
            let count = (0..documents).filter(is_smaller).count() as f64;
            let share = smaller as f64 / UNITS as f64;
            prop_assert!((count - documents as f64 * share).abs() < 1.0);
            // At large numbers each stratum is met as well; two strata may be cut.
            let count = (start..start + documents).filter(is_smaller).count() as f64;
            prop_assert!((count - documents as f64 * share).abs() < 2.0);
        }
    }

    #[test]
    fn the_largest_number_has_a_part() {
        for text in ["0.5,0.5", "0.999999999,0.000000001"] {
            split(text).is_validation(u64::MAX);
        }
    }
}
