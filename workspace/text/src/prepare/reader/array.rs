//! A JSON array. Its elements are found by their brackets and quotes, one after another, and read later.

use std::ops::Range;
use std::path::PathBuf;

use super::chunk::{BadRecord, Chunk, Content, Document, Place, Record};
use super::stream::Stream;
use super::{BYTE_ORDER_MARK, Position, ReadOptions, Reader};
use crate::prepare::fields::ELEMENT;
use crate::prepare::{Error, Result};

/// Cuts an array after elements.
pub(super) struct Array {
    pub(super) path: PathBuf,
    pub(super) stream: Stream,
}

struct Scan {
    state: State,
    /// Number of scanned bytes.
    at: usize,
    /// The start of the current element.
    start: usize,
    elements: Vec<Range<usize>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the bracket that opens the array.
    Before,
    /// Before the first element, or the bracket that closes the array.
    First,
    Next,
    /// In an element, within so many brackets.
    Element(usize),
    String(usize),
    Comma,
    /// After the bracket that closes the array.
    After,
}

impl Scan {
    /// Scans from `position` on, which is the beginning or the end of an element.
    fn new(position: Position) -> Self {
        let state = if position.offset == 0 { State::Before } else { State::Comma };
        Self { state, at: 0, start: 0, elements: Vec::new() }
    }

    /// Scans the rest of `bytes`, up to the end of the element at `limit`.
    fn scan(&mut self, bytes: &[u8], limit: usize) -> Result<(), &'static str> {
        while let Some(&byte) = bytes.get(self.at) {
            self.state = match self.state {
                State::String(depth) => {
                    let Some(length) = memchr::memchr2(b'"', b'\\', &bytes[self.at..]) else {
                        self.at = bytes.len();
                        return Ok(());
                    };
                    self.at += length;
                    if bytes[self.at] == b'\\' {
                        if self.at + 1 == bytes.len() {
                            // The escaped character comes with the next bytes.
                            return Ok(());
                        }
                        self.at += 2;
                        continue;
                    }
                    State::Element(depth)
                }
                State::Element(0) if matches!(byte, b',' | b']') => {
                    self.elements.push(self.start..self.at);
                    // The comma or bracket is scanned next, or by the next scan.
                    self.state = State::Comma;
                    if self.at >= limit {
                        return Ok(());
                    }
                    continue;
                }
                State::Element(depth) => match byte {
                    b'"' => State::String(depth),
                    b'[' | b'{' => State::Element(depth + 1),
                    b']' | b'}' => {
                        State::Element(depth.checked_sub(1).ok_or("a brace that is not open")?)
                    }
                    _ => State::Element(depth),
                },
                state if byte.is_ascii_whitespace() => state,
                State::Before if byte == b'[' => State::First,
                State::Before => return Err("no bracket at its beginning"),
                State::First if byte == b']' => State::After,
                State::First | State::Next => {
                    self.state = State::Element(0);
                    self.start = self.at;
                    continue;
                }
                State::Comma if byte == b',' => State::Next,
                State::Comma if byte == b']' => State::After,
                State::Comma => return Err("no comma after an element"),
                State::After => return Err("something after its end"),
            };
            self.at += 1;
        }
        Ok(())
    }

    fn is_in_element(&self) -> bool {
        matches!(self.state, State::Element(_) | State::String(_))
    }
}

impl Array {
    fn fault(&self, reason: &str) -> Error {
        let Position { offset, record } = self.stream.position;
        let reason = format!(
            "not an array of JSON ({reason}, after {record} elements and {offset} bytes of text)"
        );
        Error::unusable(&self.path, reason)
    }

    /// Skips an element that is too long, after `bytes` of it were read.
    fn skip_element(&mut self, mut scan: Scan, mut bytes: Vec<u8>) -> Result<Chunk> {
        let reason = self.stream.options.too_long("element");
        let place = Place::Row(self.stream.position.record + 1);
        let mut skipped = 0;
        loop {
            // A backslash at the end waits for the escaped character.
            skipped += scan.at;
            bytes.drain(..scan.at);
            scan.at = 0;
            let wanted = self.stream.options.chunk_bytes.max(1);
            if self.stream.input.fill(&mut bytes, wanted)? == 0 {
                return Err(self.fault("its end is missing"));
            }
            scan.scan(&bytes, 0).map_err(|reason| self.fault(reason))?;
            if !scan.is_in_element() {
                self.stream.rest = bytes.split_off(scan.at);
                let bad = Content::Bad(BadRecord { place, reason });
                return Ok(self.stream.chunk(bad, skipped + scan.at, 1));
            }
        }
    }
}

impl Reader for Array {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        let options = self.stream.options.clone();
        let mut bytes = std::mem::take(&mut self.stream.rest);
        let mut scan = Scan::new(self.stream.position);
        let mut wanted = options.chunk_bytes.max(BYTE_ORDER_MARK.len());
        loop {
            let missing = wanted.saturating_sub(bytes.len()).max(1);
            let is_end = self.stream.input.fill(&mut bytes, missing)? < missing;
            if self.stream.position.offset == 0
                && scan.at == 0
                && bytes.starts_with(BYTE_ORDER_MARK)
            {
                scan.at = BYTE_ORDER_MARK.len();
            }
            let scanned = scan.scan(&bytes, options.chunk_bytes);
            if let Some(last) = scan.elements.last() {
                let end = last.end;
                let records = scan.elements.len() as u64;
                self.stream.rest = bytes.split_off(end);
                let content = Content::Elements(bytes, scan.elements);
                return Ok(Some(self.stream.chunk(content, end, records)));
            }
            // The next scan finds an error after an element again.
            scanned.map_err(|reason| self.fault(reason))?;
            if is_end {
                return match scan.state {
                    State::After => Ok(None),
                    _ => Err(self.fault("its end is missing")),
                };
            }
            if bytes.len() > options.max_record_bytes {
                return match scan.is_in_element() {
                    true => self.skip_element(scan, bytes).map(Some),
                    false => Err(self.fault("white space without an end")),
                };
            }
            wanted = options.grown(bytes.len());
        }
    }
}

pub(super) fn records<'a>(
    bytes: &'a [u8],
    elements: &'a [Range<usize>],
    start: Position,
    options: &'a ReadOptions,
) -> impl Iterator<Item = Record<'a>> + Send + 'a {
    let mut slots = options.fields.slots();
    elements.iter().enumerate().map(move |(index, range)| {
        let place = Place::Row(start.record + index as u64 + 1);
        let element = options.text(&bytes[range.clone()], "element", place)?;
        Document::new(options.fields.of_json(element, ELEMENT, &mut slots), place, options)
    })
}
