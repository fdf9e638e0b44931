//! The mask of a token file, `PREFIX.mask`: one byte for each token, in the order of positions. The byte is 1 if models
//! are trained on the token, otherwise 0. As the `.bin` of an indexed dataset of type u8, the mask has the same
//! documents. Opening a mask validates its length. Every read validates its bytes.

use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use rayon::iter::ParallelIterator as _;
use rayon::slice::ParallelSlice as _;
use serde::{Deserialize, Serialize};

use crate::mapped::map;
use crate::pending::with_ending;
use crate::{Error, Result};

pub(crate) const ENDING: &str = ".mask";
/// Bytes that a thread counts at a time.
const PIECE_BYTES: usize = 1 << 20;

/// The record of a mask in `PREFIX.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaskInfo {
    /// Tokens with the byte 1.
    pub trained_tokens: u64,
    /// blake3 of the chat template that rendered the conversations, in hexadecimal; absent without a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template_blake3: Option<String>,
}

pub(crate) struct Mask {
    path: PathBuf,
    bytes: Mmap,
}

impl Mask {
    /// Opens the mask of a token file with `tokens` tokens. Returns `None` if the file does not exist.
    pub(crate) fn open(prefix: &Path, tokens: u64) -> Result<Option<Self>> {
        let path = with_ending(prefix, ENDING);
        match path.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(&path, "read")(error)),
            Ok(_) => {}
        }
        let bytes = map(&path)?;
        if bytes.len() as u64 != tokens {
            let reason = format!(
                "{} bytes, but the index has {tokens} tokens, and a mask has a byte for each: it is the \
                 mask of another file",
                bytes.len()
            );
            return Err(Error::token_file(&path, reason));
        }
        Ok(Some(Self { path, bytes }))
    }

    /// Returns the bytes without validating that they are 0 or 1.
    pub(crate) fn bytes(&self) -> &Mmap {
        &self.bytes
    }

    /// Reads the bytes from position `start` on. The range lies within the file.
    pub(crate) fn read(&self, start: u64, out: &mut [u8]) -> Result<()> {
        let bytes = &self.bytes[start as usize..start as usize + out.len()];
        self.check(bytes, start)?;
        out.copy_from_slice(bytes);
        Ok(())
    }

    /// Counts the tokens in a range that are trained on. The range lies within the file.
    pub(crate) fn count(&self, range: Range<u64>) -> Result<u64> {
        let start = range.start;
        let bytes = &self.bytes[start as usize..range.end as usize];
        let pieces: Vec<Result<u64>> = bytes
            .par_chunks(PIECE_BYTES)
            .map(|piece| {
                let at = piece.as_ptr() as usize - bytes.as_ptr() as usize;
                self.check(piece, start + at as u64)?;
                Ok(ones(piece))
            })
            .collect();
        pieces.into_iter().sum()
    }

    fn check(&self, bytes: &[u8], start: u64) -> Result<()> {
        // Without a branch for each byte.
        if bytes.iter().fold(0, |all, &byte| all | byte) <= 1 {
            return Ok(());
        }
        let (at, byte) = bytes.iter().enumerate().find(|(_, byte)| **byte > 1).unwrap_or((0, &0));
        let reason = format!(
            "the byte of token {} is {byte}, expected 0 or 1: it is no mask, or damaged",
            start + at as u64
        );
        Err(Error::token_file(&self.path, reason))
    }

    /// Counts the bytes other than 0 and 1. Also returns the position of the first.
    pub(crate) fn invalid(&self) -> (u64, Option<u64>) {
        let others = self.bytes.iter().enumerate().filter(|(_, byte)| **byte > 1);
        let mut first = None;
        let count = others.inspect(|(at, _)| first = first.or(Some(*at as u64))).count();
        (count as u64, first)
    }
}

/// Counts the bytes that are 1. Every byte must be 0 or 1.
pub(crate) fn ones(bytes: &[u8]) -> u64 {
    // The sum of 255 such bytes fits a byte, so vector instructions add them.
    bytes.chunks(255).map(|part| u64::from(part.iter().sum::<u8>())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(bytes: &[u8]) -> (tempfile::TempDir, Result<Option<Mask>>) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("t.mask"), bytes).unwrap();
        let opened = Mask::open(&dir.path().join("t"), 600);
        (dir, opened)
    }

    #[test]
    fn trained_tokens_are_the_ones() {
        let bytes: Vec<u8> = (0..600u32).map(|at| u8::from(at % 3 == 0)).collect();
        let (dir, opened) = mask(&bytes);
        let opened = opened.unwrap().unwrap();
        assert_eq!(opened.count(0..600).unwrap(), 200);
        assert_eq!((opened.count(1..3).unwrap(), opened.count(599..599).unwrap()), (0, 0));
        let mut part = [7; 4];
        opened.read(2, &mut part).unwrap();
        assert_eq!(part, [0, 1, 0, 0]);
        assert_eq!(ones(&[1; 1000]), 1000);
        assert!(Mask::open(&dir.path().join("other"), 600).unwrap().is_none());
    }

    #[test]
    fn what_is_no_mask_is_named() {
        let error = mask(&[0; 599]).1.err().unwrap().to_string();
        assert!(
            error.contains("t.mask: not a valid token file: 599 bytes, but the index has 600"),
            "{error}"
        );
        let mut bytes = [0; 600];
        bytes[255] = 2;
        let (_dir, opened) = mask(&bytes);
        let opened = opened.unwrap().unwrap();
        for error in [opened.count(1..600).unwrap_err(), opened.read(250, &mut [0; 6]).unwrap_err()]
        {
            let error = error.to_string();
            assert!(error.contains("the byte of token 255 is 2, expected 0 or 1"), "{error}");
        }
        assert_eq!((opened.count(0..255).unwrap(), opened.invalid()), (0, (1, Some(255))));
    }
}
