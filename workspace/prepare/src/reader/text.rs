//! A text file, one document. It is read in pieces if it is long: all of it never lies in memory.

use std::path::PathBuf;

use super::Reader;
use super::chunk::{BadRecord, Chunk, Content, Part};
use super::pieces::{no_place_to_cut, place_to_cut};
use super::stream::Stream;
use crate::error::Place;
use crate::{Error, Result};

/// The byte-order mark in UTF-8, which is no part of the text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Cuts a text where its document may be cut.
pub(super) struct Text {
    pub(super) path: PathBuf,
    pub(super) stream: Stream,
}

impl Text {
    /// Reads to the end of a text that is no document; what is wrong with it is `reason`.
    fn skip(&mut self, mut bytes: usize, reason: String) -> Result<Option<Chunk>> {
        let mut block = Vec::new();
        if self.stream.position.offset > 0 {
            // Its first pieces were given out.
            let path = self.path.clone();
            return Err(Error::Record { path, place: Place::Whole, reason });
        }
        while self.stream.input.fill(&mut block, self.stream.options.chunk_bytes.max(1))? > 0 {
            bytes += block.len();
            block.clear();
        }
        let bad = Content::Bad(BadRecord { place: Place::Whole, reason });
        Ok(Some(self.stream.chunk(bad, bytes, 1)))
    }
}

impl Reader for Text {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        if self.stream.position.record > 0 {
            return Ok(None);
        }
        let is_first = self.stream.position.offset == 0;
        let mut bytes = std::mem::take(&mut self.stream.rest);
        let mut valid = 0;
        let mut wanted = self.stream.options.piece_bytes.max(4);
        loop {
            // One byte more tells whether the piece is the last one.
            let missing = (wanted + 1).saturating_sub(bytes.len());
            let is_last = self.stream.input.fill(&mut bytes, missing)? < missing;
            match std::str::from_utf8(&bytes[valid..]) {
                Ok(_) => valid = bytes.len(),
                Err(fault) => {
                    valid += fault.valid_up_to();
                    if is_last || fault.error_len().is_some() {
                        let at = self.stream.position.offset + valid as u64;
                        return self.skip(bytes.len(), format!("not UTF-8 at byte {at}"));
                    }
                }
            }
            let read = bytes.len();
            // Checked just now: nothing is lost, and nothing is copied.
            let tail = bytes.split_off(valid);
            let mut text = String::from_utf8(bytes).unwrap_or_default();
            let end =
                if is_last { Some(text.len()) } else { place_to_cut(&text, &self.stream.options) };
            let Some(end) = end else {
                if read > self.stream.options.max_piece_bytes {
                    let reason = no_place_to_cut(&self.stream.options);
                    return self.skip(read, reason);
                }
                bytes = text.into_bytes();
                bytes.extend(tail);
                let options = &self.stream.options;
                wanted = wanted.saturating_mul(2).min(options.max_piece_bytes.max(wanted));
                options.await_room(wanted);
                continue;
            };
            self.stream.rest = text.split_off(end).into_bytes();
            self.stream.rest.extend(tail);
            if is_first && text.as_bytes().starts_with(BYTE_ORDER_MARK) {
                text.drain(..BYTE_ORDER_MARK.len());
            }
            let content = Content::Text(text, Part::new(is_first, is_last));
            return Ok(Some(self.stream.chunk(content, end, u64::from(is_last))));
        }
    }
}
