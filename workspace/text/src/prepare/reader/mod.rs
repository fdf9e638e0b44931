//! Readers of an input's documents. Each cuts its input between two records into chunks of about equal size, without
//! parsing the records. Another thread parses them: the text of a record, or the reason why it is not a document. A
//! reader can start at any end of a chunk. Memory holds a chunk and a record of limited length.

mod array;
mod chunk;
mod columns;
mod format;
mod input;
pub(crate) mod kinds;
mod lines;
mod paragraphs;
mod stream;
#[cfg(test)]
mod tests;
mod text;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::prepare::Result;
use crate::prepare::fields::Fields;

pub(crate) use chunk::{BadRecord, Chunk, Place, Record};
pub use format::Format;
pub(crate) use input::{Identity, OpenInput, open};

/// Maximum bytes of a document: of its line, element or paragraph, of its file, and of its text.
const MAX_DOCUMENT_BYTES: usize = 256_000_000;
/// The byte-order mark in UTF-8, which is not part of a text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Bytes of a chunk: enough for the work of a thread, and few enough for many threads.
const CHUNK_BYTES: usize = 1 << 20;
const LEAST_CHUNK_BYTES: usize = 1 << 16;

#[derive(Clone)]
pub(crate) struct ReadOptions {
    /// The fields that are read of a record.
    pub(crate) fields: Arc<Fields>,
    /// Approximate bytes of input in a chunk.
    pub(crate) chunk_bytes: usize,
    /// Maximum bytes of a record and of its text.
    pub(crate) max_record_bytes: usize,
    /// Maximum bytes of a decoder's window.
    pub(crate) max_window_bytes: usize,
}

impl ReadOptions {
    /// Creates options for readers that share `memory` bytes.
    pub(crate) fn new(fields: Arc<Fields>, memory: u64) -> Self {
        let memory = usize::try_from(memory).unwrap_or(usize::MAX);
        Self {
            fields,
            // Smaller for a small memory, because several chunks share it.
            chunk_bytes: (memory / 128).clamp(LEAST_CHUNK_BYTES, CHUNK_BYTES),
            max_record_bytes: MAX_DOCUMENT_BYTES,
            max_window_bytes: memory / 3 * 2,
        }
    }

    /// Returns the bytes to read in search of a record's end that is not in the first `bytes`.
    fn grown(&self, bytes: usize) -> usize {
        (2 * bytes).min(self.max_record_bytes + 1)
    }

    /// Returns the text in the bytes of a record, which errors call a `noun`.
    fn text<'a>(&self, bytes: &'a [u8], noun: &str, place: Place) -> Result<&'a str, BadRecord> {
        let bad = |reason| BadRecord { place, reason };
        if bytes.len() > self.max_record_bytes {
            return Err(bad(self.too_long(noun)));
        }
        // Several times as fast as the standard library, except for texts of ASCII alone. It does not return the place.
        let text = simdutf8::basic::from_utf8(bytes).or_else(|_| std::str::from_utf8(bytes));
        let reason = |at| format!("not UTF-8 at byte {at} of the {noun}");
        text.map_err(|fault| bad(reason(fault.valid_up_to())))
    }

    /// Returns why a record is not read.
    fn too_long(&self, noun: &str) -> String {
        let megabytes = self.max_record_bytes as f64 / 1e6;
        format!("the {noun} has more than {megabytes} MB, the most of a document: split it")
    }
}

/// A place between two records of a part of an input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Decoded bytes before the position; 0 in tables.
    pub(crate) offset: u64,
    /// Lines, paragraphs, elements or rows before the position.
    pub(crate) record: u64,
}

/// Reads a part of an input from a position on.
pub(crate) trait Reader: Send {
    /// Returns the next chunk, or `None` at the end. Fails if the input cannot be read any further. A record that is
    /// not a document is an error of [`Chunk::documents`] instead.
    fn next_chunk(&mut self) -> Result<Option<Chunk>>;
}

/// Reads the documents of `path` as preparation does, with one thread, for tests with hostile input. Calls `visit` with
/// each document's text, or with the reason why a record is bad.
#[doc(hidden)]
pub fn read_documents(
    path: &std::path::Path,
    format: Option<Format>,
    field: &str,
    max_record_bytes: usize,
    visit: &mut dyn FnMut(Result<&str, &str>),
) -> Result<()> {
    let options = ReadOptions {
        max_record_bytes,
        ..ReadOptions::new(Arc::new(Fields::parse(field)?), max_record_bytes as u64)
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
