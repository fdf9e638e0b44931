//! Tables of Arrow in the stream format, which the file format contains: batches of rows in sequence. Memory holds a
//! whole batch.

use std::io::{self, Cursor, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_ipc::reader::StreamReader;
use arrow_schema::{ArrowError, Schema};

use super::{Rows, check, damaged, guarded, split};
use crate::prepare::decode::Decoded;
use crate::prepare::reader::format::ARROW_FILE;
use crate::prepare::reader::{Chunk, Position, ReadOptions, Reader};
use crate::prepare::{Error, Result};

/// Maximum bytes of the file format's mark.
const MARK_BYTES: usize = 64;
/// Bytes of the marker and the length before a message.
const PREFIX_BYTES: usize = 8;
const MAX_SCHEMA_BYTES: usize = 1 << 26;

/// Reads the wanted columns of a table.
pub(in super::super) struct Arrow {
    path: PathBuf,
    batches: StreamReader<Decoded>,
    /// Whether the table is in the file format, which has a second mark at the end.
    is_file: bool,
    /// The remaining rows of the last batch.
    batch: Option<RecordBatch>,
    position: Position,
    /// Stored bytes of the file that earlier chunks account for.
    stored: u64,
    options: Arc<ReadOptions>,
}

/// Returns the schema at the start of a table, after the file format's mark.
fn schema(path: &Path, input: &mut Decoded, mark: usize) -> Result<Arc<Schema>> {
    let start = input.peek(mark + PREFIX_BYTES)?;
    let length = start.get(mark + 4..mark + PREFIX_BYTES).and_then(|bytes| bytes.try_into().ok());
    let length = length.map_or(0, u32::from_le_bytes) as usize;
    if length > MAX_SCHEMA_BYTES {
        return Err(damaged(path, "its schema is too long"));
    }
    let bytes = input.peek(mark + PREFIX_BYTES + length)?.get(mark..).unwrap_or_default();
    open(path, Cursor::new(bytes), None).map(|reader| reader.schema())
}

fn open<R: Read>(path: &Path, input: R, wanted: Option<Vec<usize>>) -> Result<StreamReader<R>> {
    guarded(path, || StreamReader::try_new(input, wanted).map_err(|error| fault(path, error)))
}

/// Returns the length of the file format's mark and the zeros after it. Some writers fill 64 bytes with zeros.
fn mark_bytes(start: &[u8]) -> usize {
    let zeros = start.strip_prefix(ARROW_FILE).map(|rest| {
        let length = rest.iter().take_while(|&&byte| byte == 0).count();
        ARROW_FILE.len() + length.min(MARK_BYTES - ARROW_FILE.len()) / 8 * 8
    });
    zeros.unwrap_or(0)
}

fn fault(path: &Path, error: ArrowError) -> Error {
    match error {
        ArrowError::IoError(_, error) => match error.downcast::<Error>() {
            Ok(error) => error,
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                damaged(path, "it ends early")
            }
            Err(error) => damaged(path, error),
        },
        error => damaged(path, error),
    }
}

/// Reads the rest of `input`, and returns its last bytes, at most `bytes`.
fn last(input: &mut impl Read, bytes: usize) -> io::Result<Vec<u8>> {
    let (mut last, mut block) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let read = input.read(&mut block)?;
        if read == 0 {
            return Ok(last);
        }
        last.extend_from_slice(&block[..read]);
        last.drain(..last.len().saturating_sub(bytes));
    }
}

impl Arrow {
    /// Reads a table from a row on.
    pub(in super::super) fn new(
        path: &Path,
        mut input: Decoded,
        from: Position,
        options: Arc<ReadOptions>,
    ) -> Result<Self> {
        let mark = mark_bytes(input.peek(MARK_BYTES)?);
        let schema = schema(path, &mut input, mark)?;
        check(path, &schema, &options.fields)?;
        let is_wanted = |name: &str| {
            let first = |path: &str| path.split('.').next() == Some(name);
            options.fields.paths().iter().any(|path| path == name || first(path))
        };
        let columns = schema.fields().iter().enumerate();
        let wanted = columns.filter(|(_, field)| is_wanted(field.name())).map(|(index, _)| index);
        input.fill(&mut Vec::new(), mark)?;
        let mut reader = Self {
            path: path.to_path_buf(),
            batches: open(path, input, Some(wanted.collect()))?,
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
                return Err(Error::unusable(&self.path, reason));
            };
            let rows = (batch.num_rows() as u64).min(from.record - self.position.record);
            self.position.record += rows;
            let skipped = rows as usize;
            self.batch = Some(batch.slice(skipped, batch.num_rows() - skipped));
        }
        self.stored = self.batches.get_ref().stored_bytes();
        Ok(())
    }

    /// Returns the remaining rows of a batch, or the next batch with rows.
    fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.batch.take().filter(|batch| batch.num_rows() > 0) {
                return Ok(Some(batch));
            }
            let path = &self.path;
            let mut read = || self.batches.next().transpose().map_err(|error| fault(path, error));
            self.batch = guarded(path, &mut read)?;
            if self.batch.is_none() {
                let end = last(self.batches.get_mut(), ARROW_FILE.len());
                let end = end.map_err(|error| fault(path, error.into()))?;
                if self.is_file && !end.ends_with(b"ARROW1") {
                    let reason = "the table ends early: fetch it again";
                    return Err(Error::unusable(path, reason));
                }
                return Ok(None);
            }
        }
    }
}

impl Reader for Arrow {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        let Some(batch) = self.next_batch()? else { return Ok(None) };
        let options = &self.options;
        let (rows, rest) = guarded(&self.path, || Ok(split(batch, options)))?;
        self.batch = rest;
        let stored = self.batches.get_ref().stored_bytes();
        let input_bytes = stored.saturating_sub(std::mem::replace(&mut self.stored, stored));
        Ok(Some(Rows::chunk(rows, 0, &mut self.position, input_bytes, options)))
    }
}
