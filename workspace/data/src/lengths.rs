//! How many documents of a token file have how many tokens. Memory: a number for each different length, of
//! which a file of n tokens has fewer than sqrt(2 n) + 1.

use std::collections::BTreeMap;

use crate::TokenFile;

/// Lengths below this are counted in a table, as nearly all are; longer ones in a map.
const SHORT: usize = 1 << 16;

/// The numbers of tokens of a file's documents.
#[derive(Clone, Debug)]
pub struct DocumentLengths {
    /// Documents of 0, 1, 2, ... tokens.
    short: Vec<u64>,
    /// Longer ones, by their tokens.
    long: BTreeMap<u64, u64>,
    documents: u64,
}

/// A band of lengths, up to a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthBand {
    /// The fewest tokens: 0, or a power of two.
    pub least: u64,
    /// The most tokens: 0, or one less than the next power of two.
    pub most: u64,
    /// Documents.
    pub documents: u64,
}

impl DocumentLengths {
    /// Counts the documents of a file. Reads the index only.
    pub fn of(file: &TokenFile) -> Self {
        let mut lengths = Self { short: vec![0; SHORT], long: BTreeMap::new(), documents: 0 };
        for document in file.documents() {
            // A length beyond usize is no index of the table.
            match lengths.short.get_mut(usize::try_from(document.tokens).unwrap_or(usize::MAX)) {
                Some(count) => *count += 1,
                None => *lengths.long.entry(document.tokens).or_default() += 1,
            }
            lengths.documents += 1;
        }
        lengths
    }

    /// The lengths that documents have, in increasing order, with the number of documents.
    fn counts(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let short = self.short.iter().enumerate().map(|(tokens, &count)| (tokens as u64, count));
        let long = self.long.iter().map(|(&tokens, &count)| (tokens, count));
        short.filter(|&(_, count)| count > 0).chain(long)
    }

    /// Tokens of the longest document; 0 without documents.
    pub fn longest(&self) -> u64 {
        self.percentile(100)
    }

    /// The fewest tokens that at least `percent` percent of the documents do not exceed; 0 without documents.
    pub fn percentile(&self, percent: u8) -> u64 {
        let wanted = (u128::from(self.documents) * u128::from(percent.min(100))).div_ceil(100);
        let (mut passed, mut tokens) = (0u128, 0);
        for (length, count) in self.counts() {
            tokens = length;
            passed += u128::from(count);
            if passed >= wanted {
                break;
            }
        }
        tokens
    }

    /// The documents in bands from the shortest to the longest: of 0 tokens, 1, 2 to 3, 4 to 7 and so on.
    pub fn bands(&self) -> Vec<LengthBand> {
        let mut bands: Vec<LengthBand> = Vec::new();
        for (tokens, documents) in self.counts() {
            let mut band = match bands.last() {
                Some(last) => *last,
                None => LengthBand::of(tokens),
            };
            // Bands without documents between others are listed too.
            while band.most < tokens {
                band = LengthBand::of(band.most + 1);
                bands.push(band);
            }
            match bands.last_mut() {
                Some(last) => last.documents += documents,
                None => bands.push(LengthBand { documents, ..band }),
            }
        }
        bands
    }
}

impl LengthBand {
    /// The band of a length, still without documents.
    fn of(tokens: u64) -> Self {
        let (least, most) = match tokens.checked_ilog2() {
            None => (0, 0),
            Some(power) => (1 << power, u64::MAX >> (63 - power)),
        };
        Self { least, most, documents: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Provenance, TokenFileWriter};

    fn lengths(documents: &[usize]) -> DocumentLengths {
        let dir = tempfile::tempdir().unwrap();
        let prefix = dir.path().join("t");
        let mut writer = TokenFileWriter::create(&prefix, 10).unwrap();
        for &tokens in documents {
            writer.push_document(&vec![1; tokens]).unwrap();
        }
        writer.finish(Provenance::default()).unwrap();
        DocumentLengths::of(&TokenFile::open(&prefix).unwrap())
    }

    #[test]
    fn percentiles_are_lengths_of_documents() {
        let hundred: Vec<usize> = (1..=100).rev().collect();
        let found = lengths(&hundred);
        assert_eq!([50, 90, 99, 100].map(|percent| found.percentile(percent)), [50, 90, 99, 100]);
        let found = lengths(&[7, 70_000, 3]);
        assert_eq!([0, 33, 50, 67, 99].map(|at| found.percentile(at)), [3, 3, 7, 70_000, 70_000]);
        assert_eq!(found.longest(), 70_000);
        assert_eq!((lengths(&[]).percentile(50), lengths(&[]).longest()), (0, 0));
    }

    #[test]
    fn bands_are_powers_of_two_without_gaps() {
        let bands = |documents: &[usize]| {
            let bands = lengths(documents).bands().into_iter();
            bands.map(|band| (band.least, band.most, band.documents)).collect::<Vec<_>>()
        };
        assert_eq!(bands(&[]), []);
        assert_eq!(bands(&[0, 9, 1, 0]), [(0, 0, 2), (1, 1, 1), (2, 3, 0), (4, 7, 0), (8, 15, 1)]);
        assert_eq!(bands(&[65_535, 65_536]), [(32_768, 65_535, 1), (65_536, 131_071, 1)]);
        let last = LengthBand::of(u64::MAX);
        assert_eq!((last.least, last.most), (1 << 63, u64::MAX));
    }
}
