//! JSON lines: one object per line, blank lines in between.

use super::chunk::{BadRecord, Chunk, Content, Document, Place, Record};
use super::stream::Stream;
use super::{Position, ReadOptions, Reader};
use crate::prepare::Result;
use crate::prepare::fields::{LINE, Slots};

/// Cuts an input between lines.
pub(super) struct Lines(pub(super) Stream);

impl Lines {
    /// Skips a line that is too long, after `bytes` of it were read.
    fn skip_line(&mut self, mut bytes: usize) -> Result<Chunk> {
        let reason = self.0.options.too_long("line");
        let place = Place::Line(self.0.position.record + 1);
        let mut block = std::mem::take(&mut self.0.rest);
        loop {
            block.clear();
            let is_end = self.0.input.fill(&mut block, self.0.options.chunk_bytes.max(1))? == 0;
            let newline = memchr::memchr(b'\n', &block);
            if let Some(at) = newline {
                self.0.rest = block.split_off(at + 1);
            }
            bytes += block.len();
            if newline.is_some() || is_end {
                return Ok(self.0.chunk(Content::Bad(BadRecord { place, reason }), bytes, 1));
            }
        }
    }
}

impl Reader for Lines {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        let mut bytes = std::mem::take(&mut self.0.rest);
        let mut wanted = self.0.options.chunk_bytes.max(1);
        let mut searched = 0;
        loop {
            let missing = wanted.saturating_sub(bytes.len()).max(1);
            let is_end = self.0.input.fill(&mut bytes, missing)? < missing;
            let end = match memchr::memrchr(b'\n', &bytes[searched..]) {
                _ if is_end => bytes.len(),
                Some(newline) => searched + newline + 1,
                None if bytes.len() > self.0.options.max_record_bytes => {
                    let read = bytes.len();
                    self.0.rest = bytes;
                    return self.skip_line(read).map(Some);
                }
                None => {
                    searched = bytes.len();
                    wanted = self.0.options.grown(bytes.len());
                    continue;
                }
            };
            if bytes.is_empty() {
                return Ok(None);
            }
            self.0.rest = bytes.split_off(end);
            let unended = u64::from(bytes.last() != Some(&b'\n'));
            let lines = memchr::memchr_iter(b'\n', &bytes).count() as u64 + unended;
            return Ok(Some(self.0.chunk(Content::Lines(bytes), end, lines)));
        }
    }
}

pub(super) fn records<'a>(
    bytes: &'a [u8],
    start: Position,
    options: &'a ReadOptions,
) -> impl Iterator<Item = Record<'a>> + Send + 'a {
    let mut rest = bytes;
    let mut number = start.record;
    let mut slots = options.fields.slots();
    std::iter::from_fn(move || {
        loop {
            if rest.is_empty() {
                return None;
            }
            let end = memchr::memchr(b'\n', rest).map_or(rest.len(), |newline| newline + 1);
            let line;
            (line, rest) = rest.split_at(end);
            number += 1;
            if let Some(record) = record(line, number, options, &mut slots) {
                return Some(record);
            }
        }
    })
}

/// Returns the record in a line, or `None` if the line is blank.
fn record<'a>(
    line: &'a [u8],
    number: u64,
    options: &'a ReadOptions,
    slots: &mut Slots<'a>,
) -> Option<Record<'a>> {
    let place = Place::Line(number);
    let mut line = match options.text(line, "line", place) {
        Ok(line) => line,
        Err(bad) => return Some(Err(bad)),
    };
    if number == 1 {
        line = line.strip_prefix('\u{feff}').unwrap_or(line);
    }
    if !line.starts_with('{') && line.trim().is_empty() {
        return None;
    }
    Some(Document::new(options.fields.of_json(line, LINE, slots), place, options))
}
