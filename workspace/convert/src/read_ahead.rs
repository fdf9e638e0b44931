//! Requests a source's tensors from the system before they are needed. The disk then has several requests at
//! once, and the conversion does not wait for the disk between two tensors.

use std::ops::Range;

use moh_hf::TensorSpec;
use moh_hf::model_directory::PIECE_BYTES;

use crate::Error;
use crate::source::Weights;

/// Bytes requested ahead of the bytes in use.
const AHEAD_BYTES: usize = 64 << 20;

/// A walk through the source's tensors, ahead of the conversion.
pub(crate) struct ReadAhead<'a> {
    /// The names of the tensors, and their bytes in the source's files.
    tensors: Vec<(&'a str, usize)>,
    /// The next bytes to request: a tensor, and an offset in it.
    next: (usize, usize),
    /// Bytes that were requested, and that the conversion has not passed.
    ahead: usize,
}

impl<'a> ReadAhead<'a> {
    /// Starts to read `tensors`, which must be in the order of their use.
    pub fn start(
        weights: &Weights,
        tensors: impl IntoIterator<Item = &'a TensorSpec>,
    ) -> Result<Self, Error> {
        let stored = |spec: &'a TensorSpec| -> Result<_, Error> {
            Ok((spec.name.as_str(), weights.stored_bytes(&spec.name)?))
        };
        let tensors = tensors.into_iter().map(stored).collect::<Result<_, Error>>()?;
        let mut read_ahead = ReadAhead { tensors, next: (0, 0), ahead: 0 };
        read_ahead.passed(weights, 0);
        Ok(read_ahead)
    }

    /// Records that the conversion has passed the next `bytes`, and requests more.
    pub fn passed(&mut self, weights: &Weights, bytes: usize) {
        self.ahead = self.ahead.saturating_sub(bytes);
        while let Some((name, part)) = self.request() {
            weights.prefetch(name, part);
        }
    }

    /// Returns the next part of a tensor to request, or `None` if enough bytes are requested.
    fn request(&mut self) -> Option<(&'a str, Range<usize>)> {
        let (tensor, start) = self.next;
        let &(name, length) = self.tensors.get(tensor).filter(|_| self.ahead < AHEAD_BYTES)?;
        let end = length.min(start + PIECE_BYTES);
        self.next = if end == length { (tensor + 1, 0) } else { (tensor, end) };
        self.ahead += end - start;
        Some((name, start..end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_asked_for_once_and_in_time() {
        let tensors = vec![("a", 3 * PIECE_BYTES + 7), ("b", 0), ("c", 5), ("d", 2 * AHEAD_BYTES)];
        let total: usize = tensors.iter().map(|(_, length)| length).sum();
        let mut read_ahead = ReadAhead { tensors: tensors.clone(), next: (0, 0), ahead: 0 };
        let mut asked = vec![0; tensors.len()];
        for passed in (0..total).step_by(PIECE_BYTES / 2) {
            while let Some((name, part)) = read_ahead.request() {
                let tensor = tensors.iter().position(|(found, _)| *found == name).unwrap();
                assert_eq!(part.start, asked[tensor]);
                asked[tensor] = part.end;
            }
            let ahead = asked.iter().sum::<usize>() - passed;
            assert!(ahead >= AHEAD_BYTES.min(total - passed), "{ahead} at {passed}");
            assert!(ahead < AHEAD_BYTES + PIECE_BYTES, "{ahead} at {passed}");
            read_ahead.ahead = read_ahead.ahead.saturating_sub(PIECE_BYTES / 2);
        }
        assert!(asked.iter().zip(&tensors).all(|(asked, (_, length))| asked == length));
    }
}
