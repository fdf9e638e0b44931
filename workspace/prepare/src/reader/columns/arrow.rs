//! Tables of Arrow in its stream format, which is also the inside of its file format: batches of rows in
//! sequence, each of them held whole.

use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_ipc::reader::StreamReader;
use arrow_schema::Schema;

use super::{Rows, check, guarded, split};
use crate::decode::Decoded;
use crate::reader::format::ARROW_FILE;
use crate::reader::{Chunk, Position, ReadOptions, Reader};
use crate::{Error, Result};

/// Maximum bytes of the file format's mark.
const MARK_BYTES: usize = 64;
/// Bytes of the marker and the length before a message.
const PREFIX_BYTES: usize = 8;
/// Maximum bytes of a schema.
const MAX_SCHEMA_BYTES: usize = 1 << 26;

/// Reads the wanted columns of a table.
pub(in super::super) struct Arrow {
    path: PathBuf,
    stream: StreamReader<Stream>,
    /// Whether it is in the file format, which has a second mark at the end.
    is_file: bool,
    batch: Option<RecordBatch>,
    position: Position,
    /// Bytes of the file as stored that earlier chunks account for.
    stored: u64,
    options: Arc<ReadOptions>,
}

/// The decoded bytes after the mark of the file format.
struct Stream {
    input: Decoded,
    block: Vec<u8>,
    at: usize,
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.block.len() {
            self.block.clear();
            self.at = 0;
            let wanted = buffer.len().clamp(1 << 12, 1 << 20);
            self.input.fill(&mut self.block, wanted).map_err(io::Error::other)?;
        }
        let length = buffer.len().min(self.block.len() - self.at);
        buffer[..length].copy_from_slice(&self.block[self.at..self.at + length]);
        self.at += length;
        Ok(length)
    }
}

impl Stream {
    /// Whether the rest, the footer of the file format, ends with the format's mark.
    fn ends_with_mark(&mut self) -> Result<bool> {
        let mut end = self.block.split_off(self.at);
        while self.input.fill(&mut end, 1 << 16)? > 0 {
            end.drain(..end.len().saturating_sub(ARROW_FILE.len()));
        }
        Ok(end.ends_with(b"ARROW1"))
    }
}

/// The schema at the start of a table, whose columns are checked.
pub(in super::super) fn schema(
    path: &Path,
    input: &mut Decoded,
    options: &ReadOptions,
) -> Result<Schema> {
    let start = input.peek(MARK_BYTES + PREFIX_BYTES)?;
    let mark = mark_bytes(start);
    let length = start.get(mark + 4..mark + PREFIX_BYTES).and_then(|bytes| bytes.try_into().ok());
    let length = length.map_or(0, u32::from_le_bytes) as usize;
    if length > MAX_SCHEMA_BYTES {
        return Err(Error::input(path, "the table is damaged (its schema is too long)"));
    }
    let bytes = input.peek(mark + PREFIX_BYTES + length)?.get(mark..).unwrap_or_default();
    let schema = guarded(path, || StreamReader::try_new(Cursor::new(bytes), None))?.schema();
    check(path, &schema, &options.fields)?;
    Ok(Schema::clone(&schema))
}

/// The length of the file format's mark and the zeros after it, with which some writers fill 64 bytes.
fn mark_bytes(start: &[u8]) -> usize {
    let zeros = start.strip_prefix(ARROW_FILE).map(|rest| {
        let length = rest.iter().take_while(|&&byte| byte == 0).count();
        ARROW_FILE.len() + length.min(MARK_BYTES - ARROW_FILE.len()) / 8 * 8
    });
    zeros.unwrap_or(0)
}

impl Arrow {
    /// Reads a table whose [`schema`] is known.
    pub(in super::super) fn new(
        path: &Path,
        mut input: Decoded,
        schema: &Schema,
        from: Position,
        options: Arc<ReadOptions>,
    ) -> Result<Self> {
        let mark = mark_bytes(input.peek(MARK_BYTES)?);
        input.fill(&mut Vec::new(), mark)?;
        let is_wanted = |name: &str| {
            let first = |path: &str| path.split('.').next() == Some(name);
            options.fields.paths().iter().any(|path| path == name || first(path))
        };
        let columns = schema.fields().iter().enumerate();
        let wanted = columns.filter(|(_, field)| is_wanted(field.name())).map(|(index, _)| index);
        let wanted: Vec<usize> = wanted.collect();
        let source = Stream { input, block: Vec::new(), at: 0 };
        let stream = guarded(path, || StreamReader::try_new(source, Some(wanted)))?;
        let mut reader = Self {
            path: path.to_path_buf(),
            stream,
            is_file: mark > 0,
            batch: None,
            position: Position::default(),
            stored: 0,
            options,
        };
        reader.skip_to(from)?;
        Ok(reader)
    }

    fn skip_to(&mut self, from: Position) -> Result<()> {
        while self.position.record < from.record {
            let Some(batch) = self.next_batch()? else {
                let rows = self.position.record;
                let reason = format!("ends after {rows} rows; it was longer before");
                return Err(Error::input(&self.path, reason));
            };
            let rows = (batch.num_rows() as u64).min(from.record - self.position.record);
            self.position.record += rows;
            let skipped = rows as usize;
            self.batch = Some(batch.slice(skipped, batch.num_rows() - skipped));
        }
        self.stored = self.stream.get_ref().input.stored_bytes();
        Ok(())
    }

    fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        let stream = &mut self.stream;
        let batch = guarded(&self.path, || stream.next().transpose())?;
        if batch.is_none() && self.is_file && !stream.get_mut().ends_with_mark()? {
            let reason = "the table ends early: fetch it again";
            return Err(Error::input(&self.path, reason));
        }
        Ok(batch)
    }
}

impl Reader for Arrow {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        let batch = loop {
            let batch = match self.batch.take() {
                Some(batch) => Some(batch),
                None => self.next_batch()?,
            };
            match batch {
                Some(batch) if batch.num_rows() == 0 => {}
                Some(batch) => break batch,
                None => return Ok(None),
            }
        };
        let (rows, rest) = guarded(&self.path, || Ok::<_, Error>(split(batch, &self.options)))?;
        self.batch = rest;
        let before = self.stored;
        self.stored = self.stream.get_ref().input.stored_bytes();
        let input_bytes = self.stored.saturating_sub(before);
        Ok(Some(Rows::chunk(rows, 0, &mut self.position, input_bytes, &self.options)))
    }
}
