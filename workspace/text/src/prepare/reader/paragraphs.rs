//! Text with a document in each paragraph; blank lines separate them.

use super::chunk::{BadRecord, Chunk, Content, Document, Place, Record};
use super::stream::Stream;
use super::{BYTE_ORDER_MARK, Position, ReadOptions, Reader};
use crate::prepare::Result;

/// Cuts an input after blank lines.
pub(super) struct Paragraphs(pub(super) Stream);

impl Paragraphs {
    /// Skips a paragraph that is too long, after `bytes` of it were read.
    fn skip_paragraph(&mut self, mut bytes: Vec<u8>) -> Result<Chunk> {
        let reason = self.0.options.too_long("paragraph");
        let place = Place::Row(self.0.position.record + 1);
        let mut skipped = 0;
        loop {
            // The last line may continue.
            let line = memchr::memrchr(b'\n', &bytes).map_or(0, |newline| newline + 1);
            // A long line is not blank, so only its end is kept.
            let line = line.max(bytes.len().saturating_sub(self.0.options.chunk_bytes.max(1)));
            skipped += line;
            bytes.drain(..line);
            let is_end = self.0.input.fill(&mut bytes, self.0.options.chunk_bytes.max(1))? == 0;
            let end = if is_end { Some(bytes.len()) } else { first_break(&bytes) };
            if let Some(end) = end {
                self.0.rest = bytes.split_off(end);
                skipped += end;
                return Ok(self.0.chunk(Content::Bad(BadRecord { place, reason }), skipped, 1));
            }
        }
    }
}

impl Reader for Paragraphs {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        let mut bytes = std::mem::take(&mut self.0.rest);
        let mut wanted = self.0.options.chunk_bytes.max(1);
        loop {
            let missing = wanted.saturating_sub(bytes.len()).max(1);
            let is_end = self.0.input.fill(&mut bytes, missing)? < missing;
            let end = if is_end { Some(bytes.len()) } else { last_break(&bytes) };
            let Some(end) = end else {
                if bytes.len() > self.0.options.max_record_bytes {
                    return self.skip_paragraph(bytes).map(Some);
                }
                wanted = self.0.options.grown(bytes.len());
                continue;
            };
            if bytes.is_empty() {
                return Ok(None);
            }
            self.0.rest = bytes.split_off(end);
            let paragraphs = paragraphs(&bytes).count() as u64;
            return Ok(Some(self.0.chunk(Content::Paragraphs(bytes), end, paragraphs)));
        }
    }
}

/// Returns the end of the last blank line of `bytes` that is complete.
fn last_break(bytes: &[u8]) -> Option<usize> {
    let mut end = memchr::memrchr(b'\n', bytes)? + 1;
    loop {
        let start = memchr::memrchr(b'\n', &bytes[..end - 1]).map_or(0, |newline| newline + 1);
        if is_blank(&bytes[start..end]) {
            return Some(end);
        }
        if start == 0 {
            return None;
        }
        end = start;
    }
}

/// Returns the end of the first blank line of `bytes` that is complete.
fn first_break(bytes: &[u8]) -> Option<usize> {
    let mut start = 0;
    for newline in memchr::memchr_iter(b'\n', bytes) {
        if is_blank(&bytes[start..=newline]) {
            return Some(newline + 1);
        }
        start = newline + 1;
    }
    None
}

fn is_blank(line: &[u8]) -> bool {
    let is_black = |byte: &u8| byte.is_ascii_graphic();
    !line.first().is_some_and(is_black)
        && std::str::from_utf8(line).is_ok_and(|line| line.trim().is_empty())
}

/// Returns the paragraphs in whole lines, each with its first line's spaces and its last line's end.
fn paragraphs(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let mut paragraph: Option<usize> = None;
        let from = rest;
        let mut at = 0;
        while at < from.len() {
            let end =
                memchr::memchr(b'\n', &from[at..]).map_or(from.len(), |newline| at + newline + 1);
            match (is_blank(&from[at..end]), paragraph) {
                (true, Some(start)) => {
                    rest = &from[end..];
                    return Some(&from[start..at]);
                }
                (true, None) => {}
                (false, _) => paragraph = paragraph.or(Some(at)),
            }
            at = end;
        }
        rest = &[];
        paragraph.map(|start| &from[start..])
    })
}

pub(super) fn records<'a>(
    bytes: &'a [u8],
    start: Position,
    options: &'a ReadOptions,
) -> impl Iterator<Item = Record<'a>> + Send + 'a {
    let bytes = match start.offset {
        0 => bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes),
        _ => bytes,
    };
    let first = start.record;
    paragraphs(bytes).enumerate().map(move |(index, paragraph)| {
        let place = Place::Row(first + index as u64 + 1);
        let text = options.text(paragraph, "paragraph", place)?;
        Ok(Document { text: text.trim_end_matches(['\r', '\n']).into(), place })
    })
}
