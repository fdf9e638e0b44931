//! A chunk of an input: records as they were read, and the documents in them.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::columns::{self, Rows};
use super::pieces::{LongText, RecordText};
use super::{Position, ReadOptions, array, lines, paragraphs};
use crate::error::Place;
use crate::{Error, Result};

/// Records between two positions of an input.
pub(crate) struct Chunk {
    /// The position before the first record.
    pub(crate) start: Position,
    /// The position after the last record.
    pub(crate) end: Position,
    /// Bytes of the file as stored that were read since the chunk before, for progress.
    pub(crate) input_bytes: u64,
    pub(super) content: Content,
    pub(super) options: Arc<ReadOptions>,
}

/// The records of a chunk.
pub(super) enum Content {
    /// Whole lines of JSON.
    Lines(Vec<u8>),
    /// Elements of an array of JSON, where they are in the bytes.
    Elements(Vec<u8>, Vec<Range<usize>>),
    /// Whole paragraphs.
    Paragraphs(Vec<u8>),
    /// Rows of a table.
    Rows(Rows),
    /// A text, or a piece of one.
    Text(String, Part),
    /// A record that was skipped.
    Bad(BadRecord),
}

/// A document, or a piece of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Document<'a> {
    /// Its text.
    pub(crate) text: Cow<'a, str>,
    /// Which piece it is.
    pub(crate) part: Part,
    /// Where it is in the input.
    pub(crate) place: Place,
}

/// Which piece of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// Its beginning.
    First,
    /// One between others.
    Middle,
    /// Its end.
    Last,
}

impl Part {
    /// Whether the document begins with it.
    pub(crate) fn begins(self) -> bool {
        matches!(self, Part::Whole | Part::First)
    }

    /// Whether the document ends with it.
    pub(crate) fn ends(self) -> bool {
        matches!(self, Part::Whole | Part::Last)
    }

    /// The piece of a document that begins or ends here, or does not.
    pub(super) fn new(is_first: bool, is_last: bool) -> Self {
        match (is_first, is_last) {
            (true, true) => Part::Whole,
            (true, false) => Part::First,
            (false, false) => Part::Middle,
            (false, true) => Part::Last,
        }
    }
}

/// A record that is no document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadRecord {
    /// Where it is in the input.
    pub(crate) place: Place,
    /// The problem.
    pub(crate) reason: String,
}

impl BadRecord {
    /// The error of this record of `path`.
    pub(crate) fn error(self, path: &Path) -> Error {
        Error::Record { path: path.to_path_buf(), place: self.place, reason: self.reason }
    }
}

/// The documents of a chunk.
pub(crate) type Documents<'a> =
    Box<dyn Iterator<Item = Result<Document<'a>, BadRecord>> + Send + 'a>;

/// A record's text, or why it is no document.
pub(super) type Record<'a> = Result<RecordText<'a>, BadRecord>;

impl Chunk {
    /// Bytes of its records.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = match &self.content {
            Content::Lines(bytes) | Content::Elements(bytes, _) | Content::Paragraphs(bytes) => {
                bytes.len()
            }
            Content::Text(text, _) => text.len(),
            Content::Rows(rows) => rows.bytes(&self.options.fields),
            Content::Bad(_) => 0,
        };
        bytes as u64
    }

    /// The documents in the chunk, those of many megabytes in pieces. A document whose first piece came is
    /// complete: what is wrong in a record is found before.
    pub(crate) fn documents(&self) -> Documents<'_> {
        let options = &*self.options;
        match &self.content {
            Content::Lines(bytes) => documents(lines::records(bytes, self.start, options)),
            Content::Elements(bytes, elements) => {
                documents(array::records(bytes, elements, self.start, options))
            }
            Content::Paragraphs(bytes) => {
                documents(paragraphs::records(bytes, self.start, options))
            }
            Content::Rows(rows) => documents(columns::records(rows, options)),
            Content::Text(text, part) => Box::new(std::iter::once(Ok(Document {
                text: Cow::Borrowed(text),
                part: *part,
                place: Place::Whole,
            }))),
            Content::Bad(bad) => Box::new(std::iter::once(Err(bad.clone()))),
        }
    }
}

fn documents<'a>(records: impl Iterator<Item = Record<'a>> + Send + 'a) -> Documents<'a> {
    Box::new(InPieces { records, long: None })
}

/// Iterates over the documents of records.
struct InPieces<'a, I> {
    records: I,
    /// The rest of a long document.
    long: Option<LongText<'a>>,
}

impl<'a, I: Iterator<Item = Record<'a>>> Iterator for InPieces<'a, I> {
    type Item = Result<Document<'a>, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(piece) = self.long.as_mut().and_then(Iterator::next) {
                return Some(Ok(piece));
            }
            match self.records.next()? {
                Ok(RecordText::Whole(document)) => return Some(Ok(document)),
                Ok(RecordText::Long(long)) => self.long = Some(long),
                Err(bad) => return Some(Err(bad)),
            }
        }
    }
}
