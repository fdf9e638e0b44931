//! A chunk of an input: unparsed records, and the documents in them.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::columns::{self, Rows};
use super::{Position, ReadOptions, array, lines, paragraphs};
use crate::prepare::{Error, Result};

/// A place in an input, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Line(u64),
    /// A row of a table, or an element of a JSON array.
    Row(u64),
    /// The whole input, for plain text.
    Whole,
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(line) => write!(out, ":{line}"),
            Place::Row(row) => write!(out, ": row {row}"),
            Place::Whole => Ok(()),
        }
    }
}

/// Records between two positions of an input.
pub(crate) struct Chunk {
    /// The position before the first record.
    pub(crate) start: Position,
    /// The position after the last record.
    pub(crate) end: Position,
    /// Stored bytes of the file that were read since the chunk before, for progress.
    pub(crate) input_bytes: u64,
    pub(super) content: Content,
    pub(super) options: Arc<ReadOptions>,
}

pub(super) enum Content {
    /// Whole lines of JSON.
    Lines(Vec<u8>),
    /// Elements of a JSON array, as ranges of the bytes.
    Elements(Vec<u8>, Vec<Range<usize>>),
    Paragraphs(Vec<u8>),
    Rows(Rows),
    Text(String),
    Bad(BadRecord),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Document<'a> {
    pub(crate) text: Cow<'a, str>,
    /// The place in the input.
    pub(crate) place: Place,
}

impl<'a> Document<'a> {
    /// Returns the document of a record with `text`, or a bad record.
    pub(super) fn new(
        text: Result<Cow<'a, str>, String>,
        place: Place,
        options: &ReadOptions,
    ) -> Record<'a> {
        match text {
            Ok(text) if text.len() > options.max_record_bytes => {
                Err(BadRecord { place, reason: options.too_long("text") })
            }
            Ok(text) => Ok(Document { text, place }),
            Err(reason) => Err(BadRecord { place, reason }),
        }
    }
}

/// A record that is not a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadRecord {
    /// The place in the input.
    pub(crate) place: Place,
    pub(crate) reason: String,
}

impl BadRecord {
    /// Returns the error of this record of `path`.
    pub(crate) fn error(self, path: &Path) -> Error {
        Error::Invalid(format!("{}{}: {}", path.display(), self.place, self.reason))
    }
}

pub(crate) type Record<'a> = Result<Document<'a>, BadRecord>;

impl Chunk {
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = match &self.content {
            Content::Lines(bytes) | Content::Elements(bytes, _) | Content::Paragraphs(bytes) => {
                bytes.len()
            }
            Content::Text(text) => text.len(),
            Content::Rows(rows) => rows.bytes(&self.options.fields),
            Content::Bad(_) => 0,
        };
        bytes as u64
    }

    pub(crate) fn documents(&self) -> Box<dyn Iterator<Item = Record<'_>> + Send + '_> {
        let options = &*self.options;
        match &self.content {
            Content::Lines(bytes) => Box::new(lines::records(bytes, self.start, options)),
            Content::Elements(bytes, elements) => {
                Box::new(array::records(bytes, elements, self.start, options))
            }
            Content::Paragraphs(bytes) => Box::new(paragraphs::records(bytes, self.start, options)),
            Content::Rows(rows) => Box::new(columns::records(rows, options)),
            Content::Text(text) => {
                let text = Cow::Borrowed(text.as_str());
                Box::new(std::iter::once(Ok(Document { text, place: Place::Whole })))
            }
            Content::Bad(bad) => Box::new(std::iter::once(Err(bad.clone()))),
        }
    }
}
