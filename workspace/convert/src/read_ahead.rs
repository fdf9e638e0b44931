//! Asks the system to read a source's tensors before they are needed, so that the disk has several requests at
//! once and is never waited for between two tensors.

use std::ops::Range;

use moh_hf::TensorSpec;
use moh_hf::model_directory::PIECE_BYTES;

use crate::Error;
use crate::source::Weights;

/// Bytes asked for ahead of those in use.
const AHEAD_BYTES: usize = 64 << 20;

/// A walk over the source's tensors, ahead of the conversion.
pub(crate) struct ReadAhead<'a> {
    /// Names, and bytes in the source's files.
    tensors: Vec<(&'a str, usize)>,
    /// The next bytes to ask for: a tensor, and an offset in it.
    next: (usize, usize),
    /// Bytes that have been asked for, and that the conversion has not passed.
    ahead: usize,
}

impl<'a> ReadAhead<'a> {
    /// Starts to read `tensors`, which are needed in this order.
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

    /// Says that the conversion has passed the next `bytes`, and asks for more.
    pub fn passed(&mut self, weights: &Weights, bytes: usize) {
        self.ahead = self.ahead.saturating_sub(bytes);
        while let Some((name, part)) = self.request() {
            weights.prefetch(name, part);
        }
    }

    /// Returns the next part of a tensor to ask for; `None` if enough has been asked for.
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
