//! The common state of the readers of decoded bytes: the position that they reached.

use std::sync::Arc;

use super::chunk::{Chunk, Content};
use super::{Position, ReadOptions};
use crate::prepare::decode::Decoded;

/// Decoded bytes that become chunks.
pub(super) struct Stream {
    pub(super) input: Decoded,
    pub(super) options: Arc<ReadOptions>,
    /// The end of the chunk before.
    pub(super) position: Position,
    /// Bytes that were read after the position.
    pub(super) rest: Vec<u8>,
    /// Stored bytes of the file that earlier chunks account for.
    stored: u64,
}

impl Stream {
    /// Reads `input`, which starts at `position`.
    pub(super) fn new(input: Decoded, position: Position, options: Arc<ReadOptions>) -> Self {
        let stored = input.stored_bytes();
        Self { input, options, position, rest: Vec::new(), stored }
    }

    /// Returns the chunk of the next `bytes` with so many records.
    pub(super) fn chunk(&mut self, content: Content, bytes: usize, records: u64) -> Chunk {
        let start = self.position;
        self.position.offset += bytes as u64;
        self.position.record += records;
        let before = std::mem::replace(&mut self.stored, self.input.stored_bytes());
        Chunk {
            start,
            end: self.position,
            input_bytes: self.stored.saturating_sub(before),
            content,
            options: self.options.clone(),
        }
    }
}
