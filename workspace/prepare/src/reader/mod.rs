//! Readers of an input's documents. Each cuts its input between two records into chunks of about equal size,
//! without reading the records, which another thread does: the text of a record, or the reason why it is no
//! document. A reader starts at any end of a chunk again. Memory holds a chunk and a record, whose length
//! is limited; a document of many megabytes comes in pieces.

mod array;
mod chunk;
mod columns;
mod format;
mod input;
mod lines;
mod paragraphs;
mod pieces;
mod stream;
#[cfg(test)]
mod tests;
mod text;
mod turn;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::fields::Fields;

pub(crate) use chunk::{BadRecord, Chunk, Document, Part};
pub use format::Format;
pub(crate) use input::{Identity, OpenInput, open};
pub(crate) use turn::{Turn, Turns};

/// The end of the longest beginning of a text after which the document may be cut; `None` if there is none.
pub(crate) type Cut = dyn Fn(&str) -> Option<usize> + Send + Sync;

/// Bytes of a chunk: enough for the work of a thread, and few enough for many threads.
const CHUNK_BYTES: usize = 1 << 20;
/// Bytes of a piece of a document.
const PIECE_BYTES: usize = 4 << 20;
/// The fewest bytes of either.
const LEAST_BYTES: usize = 1 << 16;

/// How inputs are read.
#[derive(Clone)]
pub(crate) struct ReadOptions {
    /// What is read of a record.
    pub(crate) fields: Arc<Fields>,
    /// Bytes of input in a chunk, about.
    pub(crate) chunk_bytes: usize,
    /// A longer document comes in pieces of about this length.
    pub(crate) piece_bytes: usize,
    /// Maximum bytes of a piece that has no place to be cut.
    pub(crate) max_piece_bytes: usize,
    /// Maximum bytes of a record of JSON, and of a paragraph.
    pub(crate) max_record_bytes: usize,
    /// Maximum bytes of a table that are held at once.
    pub(crate) max_table_bytes: usize,
    /// Where a long document may be cut.
    pub(crate) cut: Arc<Cut>,
    /// Bytes that a reader may hold at any time, and when it may hold more.
    pub(crate) share_bytes: usize,
    pub(crate) turn: Turn,
}

/// Maximum bytes by which a buffer grows that is too small for a record: it holds a record and little more.
const GROWTH_BYTES: usize = 1 << 26;

impl ReadOptions {
    /// Options for readers that share `memory` bytes.
    pub(crate) fn new(fields: Arc<Fields>, memory: u64, cut: Arc<Cut>) -> Self {
        let share =
            |of: u64, parts: u64| usize::try_from(memory / parts * of).unwrap_or(usize::MAX);
        Self {
            fields,
            // Less of a small memory, in which several of them are at once.
            chunk_bytes: CHUNK_BYTES.min(share(1, 128)).max(LEAST_BYTES),
            piece_bytes: PIECE_BYTES.min(share(1, 64)).max(LEAST_BYTES),
            // A tokenizer may take it for one word, of which the encoder needs twenty times the bytes.
            max_piece_bytes: share(1, 48),
            // The rest is for pieces of it, their ids, and what else is being read.
            max_record_bytes: share(2, 3),
            max_table_bytes: share(3, 4),
            cut,
            share_bytes: usize::MAX,
            turn: Turn::default(),
        }
    }

    /// The bytes to be held in search of a record's end that is not in the first `bytes`, when they may be.
    fn grown(&self, bytes: usize) -> usize {
        let grown = (bytes + bytes.min(GROWTH_BYTES)).min(self.max_record_bytes + 1);
        self.await_room(grown);
        grown
    }

    /// Waits until a reader may hold so many bytes.
    fn await_room(&self, bytes: usize) {
        if bytes > self.share_bytes {
            self.turn.wait();
        }
    }
}

/// A place between two records of a part of an input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Decoded bytes before it; 0 in tables.
    pub(crate) offset: u64,
    /// Lines, paragraphs, elements or rows before it.
    pub(crate) record: u64,
}

/// Reads a part of an input from some position on.
pub(crate) trait Reader: Send {
    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// Fails if the input cannot be read any further. A record that is no document is an error of
    /// [`Chunk::documents`] instead.
    fn next_chunk(&mut self) -> Result<Option<Chunk>>;
}

/// The text in a record's bytes.
///
/// # Errors
/// Fails with the number of bytes before the first that is not UTF-8.
fn utf8(bytes: &[u8]) -> Result<&str, usize> {
    // Several times as fast as the standard library, but for texts of ASCII alone; it does not say where.
    simdutf8::basic::from_utf8(bytes)
        .or_else(|_| std::str::from_utf8(bytes).map_err(|fault| fault.valid_up_to()))
}

/// Reads the documents of `path` as preparation does, with one thread, for benchmarks and tests with hostile
/// input. `visit` is called with each document's text, or piece of it, and with what is wrong with a record.
///
/// # Errors
/// Fails if `path` cannot be read.
#[doc(hidden)]
pub fn read_documents(
    path: &std::path::Path,
    format: Option<Format>,
    field: &str,
    max_record_bytes: usize,
    visit: &mut dyn FnMut(Result<&str, &str>),
) -> Result<()> {
    let options = ReadOptions {
        chunk_bytes: max_record_bytes,
        piece_bytes: max_record_bytes / 2,
        max_table_bytes: max_record_bytes,
        max_record_bytes,
        ..ReadOptions::new(Arc::new(Fields::parse(field)?), 0, Arc::new(|text| text.rfind(' ')))
    };
    let input = open(path, format, Arc::new(options))?;
    for part in 0..input.parts() {
        let mut reader = input.read(part, Position::default())?;
        while let Some(chunk) = reader.next_chunk()? {
            for document in chunk.documents() {
                match &document {
                    Ok(document) => visit(Ok(&document.text)),
                    Err(bad) => visit(Err(&bad.reason)),
                }
            }
        }
    }
    input.check_unchanged()
}
