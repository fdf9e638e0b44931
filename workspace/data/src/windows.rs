//! A token file divided for evaluation: non-overlapping windows, front to back, without a last partial window. A window
//! of n tokens has n - 1 targets.
//!
//! A sample of n of N windows is spread over the file. Number i of the sample is window floor((2 i + 1) N / (2 n)), the
//! window in the middle of part i of n equal parts.

use crate::{Error, Result, TokenFile};

/// The windows of a token file.
#[derive(Debug)]
pub struct Windows {
    file: TokenFile,
    length: usize,
    /// Number of windows of the sample, spread over the file.
    count: u64,
}

impl Windows {
    /// Divides `file` into windows of `length` tokens.
    pub fn new(file: TokenFile, length: usize) -> Result<Self> {
        if length < 2 {
            let reason = "a window needs at least two tokens to have a target";
            return Err(Error::argument("sequence_length", length as u64, reason));
        }
        if file.num_tokens() < length as u64 {
            return Err(Error::TooShort {
                path: file.prefix().to_path_buf(),
                tokens: file.num_tokens(),
                needed: length as u64,
                length: "the sequence length".to_owned(),
            });
        }
        let count = file.num_tokens() / length as u64;
        Ok(Self { file, length, count })
    }

    /// Keeps at most `count` windows, at least one, spread evenly over the file.
    pub fn spread(self, count: u64) -> Self {
        Self { count: count.clamp(1, self.all()), ..self }
    }

    /// Returns the number of windows.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Returns the number of windows of the whole file.
    fn all(&self) -> u64 {
        self.file.num_tokens() / self.length as u64
    }

    /// Returns false: `new` rejects a file without a window.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the tokens per window.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Returns the divided file.
    pub fn file(&self) -> &TokenFile {
        &self.file
    }

    /// Reads window `number` into `tokens`, which has [`Windows::length`] entries.
    ///
    /// # Panics
    /// If `tokens` has the wrong length.
    pub fn read(&self, number: u64, tokens: &mut [u32]) -> Result<()> {
        assert_eq!(tokens.len(), self.length, "one entry for each token of a window");
        self.file.read(self.start(number), tokens)
    }

    /// Reads the mask of window `number`: 1 if the token is trained on, otherwise 0. Without a mask, all are 1.
    ///
    /// # Panics
    /// If `mask` has the wrong length.
    pub fn read_mask(&self, number: u64, mask: &mut [u8]) -> Result<()> {
        assert_eq!(mask.len(), self.length, "one entry for each token of a window");
        self.file.read_mask(self.start(number), mask)
    }

    /// Returns the position of a window's first token. If there is no such window, the position is beyond every file.
    fn start(&self, number: u64) -> u64 {
        let window = match number < self.count {
            // Below the number of all windows.
            true => middle(number, self.count, self.all()),
            false => u64::MAX,
        };
        window.saturating_mul(self.length as u64)
    }
}

/// Returns the middle of part `number` of `count` equal parts of `all`. If `count` is `all`, returns `number`.
fn middle(number: u64, count: u64, all: u64) -> u64 {
    let place = (2 * u128::from(number) + 1) * u128::from(all) / (2 * u128::from(count));
    // Below `all`, as `number` is below `count`.
    place as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TokenFileInfo, TokenFileWriter};

    /// Returns a file that counts from 0, in two documents.
    fn counting(first: u32, tokens: u32) -> TokenFile {
        let dir = tempfile::tempdir().unwrap();
        let prefix = dir.path().join("t");
        let mut writer = TokenFileWriter::create(&prefix, 100).unwrap();
        for document in [0..first, first..tokens] {
            writer.push_document(&document.collect::<Vec<_>>()).unwrap();
        }
        writer.finish(TokenFileInfo::default()).unwrap();
        TokenFile::open(&prefix).unwrap()
    }

    #[test]
    fn windows_do_not_overlap_and_drop_the_tail() {
        let file = || counting(4, 7);
        let windows = Windows::new(file(), 3).unwrap();
        assert_eq!(windows.len(), 2);
        let mut tokens = [0; 3];
        windows.read(1, &mut tokens).unwrap();
        assert_eq!(tokens, [3, 4, 5]);
        let message = windows.read(2, &mut tokens).unwrap_err().to_string();
        assert!(
            message.contains("cannot read tokens ") && message.ends_with(": the file has 7"),
            "{message}"
        );
        assert!(windows.read(u64::MAX, &mut tokens).is_err());
        assert!(matches!(Windows::new(file(), 8), Err(Error::TooShort { needed: 8, .. })));
        let message = Windows::new(file(), 1).unwrap_err().to_string();
        assert!(message.contains("sequence_length = 1: a window needs at least two"), "{message}");
    }

    #[test]
    fn a_sample_is_spread_over_the_file() {
        let first_tokens = |count| {
            let windows = Windows::new(counting(9, 61), 3).unwrap().spread(count);
            let read = |number| {
                let mut tokens = [0; 3];
                windows.read(number, &mut tokens).map(|()| tokens[0])
            };
            assert!(read(windows.len()).is_err());
            (0..windows.len()).map(|number| read(number).unwrap()).collect::<Vec<_>>()
        };
        // Of 20 windows: 2, 7, 12, 17, and 3, 10, 16.
        assert_eq!(first_tokens(4), [6, 21, 36, 51]);
        assert_eq!(first_tokens(3), [9, 30, 48]);
        let all: Vec<u32> = (0..20).map(|window| 3 * window).collect();
        assert_eq!((first_tokens(20), first_tokens(u64::MAX)), (all.clone(), all));
        assert_eq!(first_tokens(0), [30]);
    }
}
