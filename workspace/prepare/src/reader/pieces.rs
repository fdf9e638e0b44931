//! The text of a record: whole if it is short, and otherwise in pieces of which one is held at a time.

use std::borrow::Cow;

use super::ReadOptions;
use super::chunk::{BadRecord, Document, Part};
use crate::error::Place;
use crate::fields::{Segment, Unescaped};

/// The text of a record.
pub(super) enum RecordText<'a> {
    Whole(Document<'a>),
    Long(LongText<'a>),
}

/// A text that comes in pieces.
pub(super) struct LongText<'a> {
    /// What is left of it, without empty parts, the next one last.
    segments: Vec<Rest<'a>>,
    place: Place,
    options: &'a ReadOptions,
    /// The beginning of what is left, taken out of the segments.
    text: String,
    is_first: bool,
    is_finished: bool,
    /// Whether it ended before a piece that is too long.
    is_too_long: bool,
}

/// What is left of a segment.
enum Rest<'a> {
    Plain(Cow<'a, str>, usize),
    Escaped(Unescaped<'a>),
}

impl<'a> RecordText<'a> {
    /// The text that `segments` make, of the record at `place`; `fault` says what is wrong with an escape of
    /// a string.
    pub(super) fn new(
        mut segments: Vec<Segment<'a>>,
        place: Place,
        options: &'a ReadOptions,
        fault: impl Fn(&str, usize) -> String,
    ) -> Result<Self, BadRecord> {
        let bytes: usize = segments.iter().map(Segment::len).sum();
        let bad = |string: &str, at| BadRecord { place, reason: fault(string, at) };
        if bytes > options.piece_bytes {
            // A document whose first piece was given out is never found to be none.
            for segment in &segments {
                if let Segment::Escaped(string) = segment {
                    Unescaped::new(string).check().map_err(|at| bad(string, at))?;
                }
            }
            if bytes > options.max_piece_bytes
                && !LongText::of(&segments, place, options).can_be_cut()
            {
                return Err(BadRecord { place, reason: no_place_to_cut(options) });
            }
            return Ok(RecordText::Long(LongText::new(segments, place, options)));
        }
        let document = |text| Ok(RecordText::Whole(Document { text, part: Part::Whole, place }));
        if let ([Segment::Plain(text)], _) | ([], text) =
            (&mut segments[..], &mut Cow::Borrowed(""))
        {
            return document(std::mem::take(text));
        }
        if let [Segment::Escaped(string)] = segments[..]
            && memchr::memchr(b'\\', string.as_bytes()).is_none()
        {
            return document(Cow::Borrowed(string));
        }
        let mut text = String::with_capacity(bytes);
        for segment in &segments {
            match segment {
                Segment::Plain(plain) => text.push_str(plain),
                Segment::Escaped(string) => Unescaped::new(string)
                    .append(&mut text, usize::MAX)
                    .map_err(|at| bad(string, at))?,
            }
        }
        document(Cow::Owned(text))
    }
}

impl<'a> LongText<'a> {
    fn new(segments: Vec<Segment<'a>>, place: Place, options: &'a ReadOptions) -> Self {
        let rests = segments.into_iter().rev().map(|segment| match segment {
            Segment::Plain(plain) => Rest::Plain(plain, 0),
            Segment::Escaped(string) => Rest::Escaped(Unescaped::new(string)),
        });
        let segments = rests.filter(|rest| !rest.is_empty()).collect();
        let text = String::new();
        Self {
            segments,
            place,
            options,
            text,
            is_first: true,
            is_finished: false,
            is_too_long: false,
        }
    }

    /// The text of segments that stay.
    fn of(segments: &'a [Segment<'a>], place: Place, options: &'a ReadOptions) -> Self {
        let segments = segments.iter().map(|segment| match segment {
            Segment::Plain(plain) => Segment::Plain(Cow::Borrowed(&**plain)),
            Segment::Escaped(string) => Segment::Escaped(string),
        });
        Self::new(segments.collect(), place, options)
    }

    /// Whether no piece is too long.
    fn can_be_cut(mut self) -> bool {
        self.by_ref().for_each(drop);
        !self.is_too_long
    }

    /// Takes text out of the segments until `bytes` of it are held or nothing is left.
    fn collect(&mut self, bytes: usize) {
        while self.text.len() < bytes
            && let Some(rest) = self.segments.last_mut()
        {
            let missing = bytes - self.text.len();
            rest.append(&mut self.text, missing);
            if rest.is_empty() {
                self.segments.pop();
            }
        }
    }
}

impl<'a> Iterator for LongText<'a> {
    type Item = Document<'a>;

    fn next(&mut self) -> Option<Document<'a>> {
        if self.is_finished {
            return None;
        }
        let mut bytes = self.options.piece_bytes.max(1);
        let rest = loop {
            self.collect(bytes);
            if self.segments.is_empty() {
                self.is_finished = true;
                break String::new();
            }
            if let Some(end) = place_to_cut(&self.text, self.options) {
                break self.text.split_off(end);
            }
            if self.text.len() > self.options.max_piece_bytes {
                (self.is_finished, self.is_too_long) = (true, true);
                return None;
            }
            // Twice as much each time: the search for a place takes time in proportion to the text.
            bytes = self.text.len().saturating_mul(2).min(self.options.max_piece_bytes + 1);
        };
        let text = Cow::Owned(std::mem::replace(&mut self.text, rest));
        let part = Part::new(std::mem::take(&mut self.is_first), self.is_finished);
        Some(Document { text, part, place: self.place })
    }
}

impl Rest<'_> {
    fn is_empty(&self) -> bool {
        match self {
            Rest::Plain(plain, at) => *at == plain.len(),
            Rest::Escaped(string) => string.rest() == 0,
        }
    }

    fn append(&mut self, text: &mut String, bytes: usize) {
        match self {
            Rest::Plain(plain, at) => {
                let end = plain.floor_char_boundary(at.saturating_add(bytes.max(4)));
                text.push_str(&plain[*at..end]);
                *at = end;
            }
            // `RecordText::new` checked the string.
            Rest::Escaped(string) => string.append(text, bytes).unwrap_or_default(),
        }
    }
}

/// Why a document is not read that has no place to be cut.
pub(super) fn no_place_to_cut(options: &ReadOptions) -> String {
    format!(
        "more than {} bytes of text without a place to cut the document: raise --memory",
        options.max_piece_bytes
    )
}

/// Where `text`, the beginning of a document that goes on, may be cut.
pub(super) fn place_to_cut(text: &str, options: &ReadOptions) -> Option<usize> {
    (options.cut)(text).filter(|&end| end > 0 && text.is_char_boundary(end))
}
