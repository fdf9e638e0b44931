//! Tables of Arrow in its stream format, which is also the inside of its file format: batches of rows in
//! sequence. A batch is held whole, unless it is long and only one column of texts is wanted: then it is read in
//! steps.

mod long;
mod messages;

use std::collections::HashMap;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::reader::{StreamReader, read_dictionary, read_record_batch};
use arrow_ipc::{Message, MessageHeader, MetadataVersion};
use arrow_schema::{ArrowError, DataType, Schema};

use self::long::{Batch, Long};
use self::messages::{
    LENGTH_BYTES, MAX_DESCRIPTION_BYTES, Place as Buffers, Source, buffers, fault, message,
    next_description,
};
use super::{Rows, check, damaged, guarded, split};
use crate::decode::Decoded;
use crate::error::Place;
use crate::reader::chunk::{BadRecord, Content};
use crate::reader::format::ARROW_FILE;
use crate::reader::lines::too_long;
use crate::reader::{Chunk, Position, ReadOptions, Reader};
use crate::{Error, Result};

/// Maximum bytes of the file format's mark.
const MARK_BYTES: usize = 64;
/// Bytes of the marker and the length before a message.
const PREFIX_BYTES: usize = 8;
/// Chunks in a batch from which it is long.
const LONG_CHUNKS: u64 = 16;

/// Reads the wanted columns of a table.
pub(in super::super) struct Arrow {
    path: PathBuf,
    source: Source,
    schema: Arc<Schema>,
    /// The wanted columns.
    wanted: Vec<usize>,
    dictionaries: HashMap<i64, ArrayRef>,
    /// Whether it is in the file format, which has a second mark at the end.
    is_file: bool,
    /// What is left of the batch that was read last.
    batch: Option<Left>,
    position: Position,
    /// Bytes of the file as stored that earlier chunks account for.
    stored: u64,
    options: Arc<ReadOptions>,
}

/// Rows of a batch.
enum Left {
    Held(RecordBatch),
    Long(Long),
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
    if length > MAX_DESCRIPTION_BYTES {
        return Err(damaged(path, "its schema is too long"));
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

/// The error of a batch that takes more memory than there is.
fn too_large(path: &Path, bytes: u64, options: &ReadOptions) -> Error {
    let limit = options.max_table_bytes;
    let reason = format!(
        "a batch of rows takes {bytes} bytes, of {limit} that --memory gives it: raise --memory, or write the \
         table in smaller batches"
    );
    Error::input(path, reason)
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
        let mut reader = Self {
            path: path.to_path_buf(),
            wanted: wanted.collect(),
            source: Source::new(input),
            schema: Arc::new(schema.clone()),
            dictionaries: HashMap::new(),
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
            let Some(mut batch) = self.next_batch()? else {
                let rows = self.position.record;
                let reason = format!("ends after {rows} rows; it was longer before");
                return Err(Error::input(&self.path, reason));
            };
            let rows = (batch.rows() as u64).min(from.record - self.position.record);
            self.position.record += rows;
            batch.skip(rows as usize);
            self.batch = Some(batch);
        }
        self.stored = self.source.stored_bytes();
        Ok(())
    }

    /// The rows that are left of a batch, or the next batch that has some.
    fn next_batch(&mut self) -> Result<Option<Left>> {
        loop {
            match self.batch.take() {
                Some(batch) if batch.rows() > 0 => return Ok(Some(batch)),
                Some(Left::Long(long)) => {
                    let end = long.end();
                    drop(long);
                    self.source.skip_to(end).map_err(|error| fault(&self.path, error))?;
                }
                _ => {}
            }
            let Some(description) = next_description(&mut self.source, &self.path)? else {
                let end = self.source.last(ARROW_FILE.len());
                let end = end.map_err(|error| fault(&self.path, error))?;
                if self.is_file && !end.ends_with(b"ARROW1") {
                    let reason = "the table ends early: fetch it again";
                    return Err(Error::input(&self.path, reason));
                }
                return Ok(None);
            };
            let path = self.path.clone();
            let (message, body) = message(&description, &path)?;
            match message.header_type() {
                MessageHeader::RecordBatch => self.batch = Some(self.read_batch(&message, body)?),
                MessageHeader::DictionaryBatch => self.read_dictionary(&message, body)?,
                _ => {
                    let end = self.source.position().saturating_add(body);
                    self.source.skip_to(end).map_err(|error| fault(&path, error))?;
                }
            }
        }
    }

    fn read_batch(&mut self, message: &Message<'_>, body: u64) -> Result<Left> {
        let absent = || damaged(&self.path, "a message without its content");
        let batch = message.header_as_record_batch().ok_or_else(absent)?;
        let version = message.version();
        let mut places = Vec::new();
        for &column in &self.wanted {
            let found = buffers(&batch, &self.schema, version, column, body);
            let other = || damaged(&self.path, "a batch with other columns than the table");
            places.push(found.ok_or_else(other)?);
        }
        let compression = batch.compression().map(|compression| compression.codec());
        let is_long = body > LONG_CHUNKS * self.options.chunk_bytes as u64;
        if let ([column], [places], true) = (&self.wanted[..], &places[..], is_long) {
            let field = self.schema.field(*column);
            let is_large = *field.data_type() == DataType::LargeUtf8;
            // A slot of the values' ends for each row at least.
            let rows = usize::try_from(batch.length()).ok();
            let rows = rows.filter(|&rows| (rows as u64) < u64::MAX >> 8);
            let rows = rows.ok_or_else(|| damaged(&self.path, "a batch of too many rows"))?;
            if let (&[valid, offsets, values], true) =
                (&places[..], is_large || *field.data_type() == DataType::Utf8)
                && valid.start + valid.bytes <= offsets.start
                && offsets.start + offsets.bytes <= values.start
                && rows > 0
            {
                let column = (field.name().as_str(), is_large);
                let batch =
                    Batch { column, rows, places: [valid, offsets, values], compression, body };
                let long = Long::new(&batch, &mut self.source, &self.path, &self.options)?;
                return Ok(Left::Long(long));
            }
        }
        let places: Vec<Buffers> = places.concat();
        let body = self.body(body, compression.is_some().then_some(&places[..]))?;
        guarded(&self.path, || {
            let (schema, dictionaries) = (Arc::clone(&self.schema), &self.dictionaries);
            read_record_batch(&body, batch, schema, dictionaries, Some(&self.wanted), &version)
        })
        .map(Left::Held)
    }

    fn read_dictionary(&mut self, message: &Message<'_>, body: u64) -> Result<()> {
        let absent = || damaged(&self.path, "a message without its content");
        let batch = message.header_as_dictionary_batch().ok_or_else(absent)?;
        let data = batch.data().ok_or_else(absent)?;
        let buffers = data.buffers().into_iter().flatten();
        let place = |buffer: &arrow_ipc::Buffer| {
            let (start, bytes) =
                (buffer.offset().try_into().ok()?, buffer.length().try_into().ok()?);
            (u64::checked_add(start, bytes)? <= body).then_some(Buffers { start, bytes })
        };
        let places: Option<Vec<Buffers>> = buffers.map(place).collect();
        let outside = || damaged(&self.path, "a buffer outside its message");
        let places = places.ok_or_else(outside)?;
        let body = self.body(body, data.compression().map(|_| &places[..]))?;
        let version: MetadataVersion = message.version();
        let (schema, dictionaries) = (&self.schema, &mut self.dictionaries);
        guarded(&self.path, || read_dictionary(&body, batch, schema, dictionaries, &version))
    }

    /// The body of a message, whose buffers at these places will be unpacked.
    fn body(&mut self, bytes: u64, packed: Option<&[Buffers]>) -> Result<Buffer> {
        let limit = self.options.max_table_bytes as u64;
        if bytes > limit {
            return Err(too_large(&self.path, bytes, &self.options));
        }
        self.options.await_room(bytes as usize);
        let body = self.source.take_exact(bytes as usize);
        let body = body.map_err(|error| fault(&self.path, error))?;
        let unpacked = |place: &Buffers| {
            let length = body.get(place.start as usize..)?.first_chunk()?;
            let length = u64::try_from(i64::from_le_bytes(*length)).unwrap_or(0);
            Some(if place.bytes < LENGTH_BYTES { 0 } else { length })
        };
        let lengths = packed.into_iter().flatten().map(|place| unpacked(place).unwrap_or(0));
        let held = lengths.fold(bytes, u64::saturating_add);
        if held > limit {
            return Err(too_large(&self.path, held, &self.options));
        }
        self.options.await_room(held as usize);
        Ok(Buffer::from(body))
    }
}

impl Left {
    fn rows(&self) -> usize {
        match self {
            Left::Held(batch) => batch.num_rows(),
            Left::Long(long) => long.rows(),
        }
    }

    /// Leaves the first `rows` out.
    fn skip(&mut self, rows: usize) {
        match self {
            Left::Held(batch) => *batch = batch.slice(rows, batch.num_rows() - rows),
            Left::Long(long) => long.skip(rows),
        }
    }
}

impl Reader for Arrow {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        let options = Arc::clone(&self.options);
        let rows = match self.next_batch()? {
            None => return Ok(None),
            Some(Left::Held(batch)) => {
                let (rows, rest) =
                    guarded(&self.path, || Ok::<_, ArrowError>(split(batch, &options)))?;
                self.batch = rest.map(Left::Held);
                Some(rows)
            }
            Some(Left::Long(mut long)) => {
                let rows = long.next(&self.path, &options)?;
                self.batch = Some(Left::Long(long));
                match rows {
                    long::Rows::Read(rows) => Some(rows),
                    long::Rows::TooLong => None,
                }
            }
        };
        let before = self.stored;
        self.stored = self.source.stored_bytes();
        let input_bytes = self.stored.saturating_sub(before);
        let Some(rows) = rows else {
            let start = self.position;
            self.position.record += 1;
            let reason = too_long("value", options.max_record_bytes);
            let bad = BadRecord { place: Place::Row(self.position.record), reason };
            let (end, content) = (self.position, Content::Bad(bad));
            return Ok(Some(Chunk { start, end, input_bytes, content, options }));
        };
        Ok(Some(Rows::chunk(rows, 0, &mut self.position, input_bytes, &self.options)))
    }
}
