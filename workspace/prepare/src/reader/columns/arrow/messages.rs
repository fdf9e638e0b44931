//! The messages of Arrow's stream format: each a description, a table of FlatBuffers, and a body with the buffers
//! of its columns. What a damaged one says about its sizes is checked before memory is taken.

use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow_ipc::{CompressionType, Message, MetadataVersion, RecordBatch, root_as_message};
use arrow_schema::{DataType, Schema, UnionMode};

use super::damaged;
use crate::decode::Decoded;
use crate::{Error, Result};

/// Maximum bytes of a message's description, and of a schema.
pub(super) const MAX_DESCRIPTION_BYTES: usize = 1 << 26;
/// Bytes that are read at once.
const BLOCK_BYTES: usize = 1 << 20;
/// Bytes before a compressed buffer that say how long it becomes; -1 if it is not compressed.
pub(super) const LENGTH_BYTES: u64 = 8;

/// The decoded bytes of a table, for whoever reads the next of them.
#[derive(Clone)]
pub(super) struct Source(Arc<Mutex<Bytes>>);

struct Bytes {
    input: Decoded,
    block: Vec<u8>,
    at: usize,
    /// Bytes that were read.
    read: u64,
}

impl Source {
    pub(super) fn new(input: Decoded) -> Self {
        Self(Arc::new(Mutex::new(Bytes { input, block: Vec::new(), at: 0, read: 0 })))
    }

    fn lock(&self) -> MutexGuard<'_, Bytes> {
        // A panic leaves bytes that count as read.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that were read.
    pub(super) fn position(&self) -> u64 {
        self.lock().read
    }

    /// Bytes of the file as stored that were read.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.lock().input.stored_bytes()
    }

    /// The next `bytes`.
    pub(super) fn take_exact(&mut self, bytes: usize) -> io::Result<Vec<u8>> {
        read_exactly(self, bytes)
    }

    /// Reads up to the position `end`.
    pub(super) fn skip_to(&mut self, end: u64) -> io::Result<()> {
        let bytes = end.checked_sub(self.position()).ok_or(ErrorKind::InvalidData)?;
        skip(self, bytes)
    }

    /// The last bytes of what is left, at most `bytes`.
    pub(super) fn last(&mut self, bytes: usize) -> io::Result<Vec<u8>> {
        let (mut last, mut block) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            let read = self.read(&mut block)?;
            if read == 0 {
                return Ok(last);
            }
            last.extend_from_slice(&block[..read]);
            last.drain(..last.len().saturating_sub(bytes));
        }
    }
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut bytes = self.lock();
        let Bytes { input, block, at, read } = &mut *bytes;
        if *at == block.len() {
            block.clear();
            *at = 0;
            input
                .fill(block, buffer.len().clamp(1 << 12, BLOCK_BYTES))
                .map_err(io::Error::other)?;
        }
        let length = buffer.len().min(block.len() - *at);
        buffer[..length].copy_from_slice(&block[*at..*at + length]);
        *at += length;
        *read += length as u64;
        Ok(length)
    }
}

/// The next `bytes` of `source`, for which memory is taken as they come.
pub(super) fn read_exactly(source: &mut dyn Read, bytes: usize) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    // Not of a damaged table that is shorter.
    read.try_reserve_exact(bytes)?;
    source.take(bytes as u64).read_to_end(&mut read)?;
    if read.len() < bytes { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(read) }
}

/// Reads `bytes` of `source` that nobody wants.
pub(super) fn skip(source: &mut dyn Read, bytes: u64) -> io::Result<()> {
    match io::copy(&mut source.take(bytes), &mut io::sink())? {
        read if read < bytes => Err(ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

/// The error of reading `path`.
pub(super) fn fault(path: &Path, error: io::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => damaged(path, "it ends early"),
        Err(error) => damaged(path, error),
    }
}

/// The description of the next message; `None` at the end.
pub(super) fn next_description(source: &mut Source, path: &Path) -> Result<Option<Vec<u8>>> {
    let mut number = || -> io::Result<Option<u32>> {
        let mut bytes = Vec::new();
        source.take(4).read_to_end(&mut bytes)?;
        match bytes.try_into() {
            Ok(bytes) => Ok(Some(u32::from_le_bytes(bytes))),
            Err(bytes) if bytes.is_empty() => Ok(None),
            Err(_) => Err(ErrorKind::UnexpectedEof.into()),
        }
    };
    let mut length = number().map_err(|error| fault(path, error))?;
    // The marker before a length, which versions before 0.15 lack.
    if length == Some(u32::MAX) {
        length = number().map_err(|error| fault(path, error))?;
    }
    match length {
        // A stream may lack its end.
        None | Some(0) => Ok(None),
        Some(length) if length as usize > MAX_DESCRIPTION_BYTES => {
            Err(damaged(path, format!("a message of {length} bytes")))
        }
        Some(length) => {
            let read = source.take_exact(length as usize);
            read.map(Some).map_err(|error| fault(path, error))
        }
    }
}

/// The message that `description` is, and the length of its body.
pub(super) fn message<'a>(description: &'a [u8], path: &Path) -> Result<(Message<'a>, u64)> {
    let message = root_as_message(description).map_err(|error| damaged(path, error))?;
    let body = u64::try_from(message.bodyLength());
    let body = body.map_err(|_| damaged(path, "a body of a negative length"))?;
    Ok((message, body))
}

/// Where a buffer is in a message's body.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) start: u64,
    pub(super) bytes: u64,
}

/// The buffers of the column `wanted`; `None` if the batch has others than the schema.
pub(super) fn buffers(
    batch: &RecordBatch<'_>,
    schema: &Schema,
    version: MetadataVersion,
    wanted: usize,
    body: u64,
) -> Option<Vec<Place>> {
    let mut variadic = batch.variadicBufferCounts().into_iter().flatten();
    let mut first = 0;
    for field in &schema.fields()[..wanted] {
        first += count(field.data_type(), version, &mut variadic)?;
    }
    let count = count(schema.field(wanted).data_type(), version, &mut variadic)?;
    let all = batch.buffers()?;
    (first + count <= all.len()).then_some(())?;
    let place = |index| {
        let buffer = all.get(index);
        let (start, bytes) = (buffer.offset().try_into().ok()?, buffer.length().try_into().ok()?);
        (u64::checked_add(start, bytes)? <= body).then_some(Place { start, bytes })
    };
    (first..first + count).map(place).collect()
}

/// The number of buffers of a column.
fn count(
    kind: &DataType,
    version: MetadataVersion,
    variadic: &mut dyn Iterator<Item = i64>,
) -> Option<usize> {
    let mut of = |kind: &DataType| count(kind, version, &mut *variadic);
    Some(match kind {
        DataType::Null => 0,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Binary | DataType::LargeBinary => 3,
        DataType::Utf8View | DataType::BinaryView => {
            usize::try_from(variadic.next()?).ok()?.checked_add(2)?
        }
        DataType::List(item) | DataType::LargeList(item) | DataType::Map(item, _) => {
            2 + of(item.data_type())?
        }
        DataType::ListView(item) | DataType::LargeListView(item) => 3 + of(item.data_type())?,
        DataType::FixedSizeList(item, _) => 1 + of(item.data_type())?,
        DataType::Struct(fields) => {
            fields.iter().try_fold(1usize, |all, field| all.checked_add(of(field.data_type())?))?
        }
        DataType::RunEndEncoded(ends, values) => of(ends.data_type())? + of(values.data_type())?,
        DataType::Union(fields, mode) => {
            let own = 1
                + usize::from(version < MetadataVersion::V5)
                + usize::from(*mode == UnionMode::Dense);
            fields
                .iter()
                .try_fold(own, |all, (_, field)| all.checked_add(of(field.data_type())?))?
        }
        // A dictionary's keys are here, its values in messages of their own.
        _ => 2,
    })
}

/// A decoder of the data after the length of a compressed buffer; its window takes at most `max_window_bytes`.
pub(super) fn decoder(
    source: impl Read + Send + 'static,
    compression: CompressionType,
    max_window_bytes: usize,
) -> io::Result<Box<dyn Read + Send>> {
    Ok(match compression {
        CompressionType::LZ4_FRAME => Box::new(lz4_flex::frame::FrameDecoder::new(source)),
        CompressionType::ZSTD => {
            let mut decoder = zstd::stream::read::Decoder::new(source)?;
            decoder.window_log_max(max_window_bytes.max(1).ilog2().clamp(10, 31))?;
            Box::new(decoder)
        }
        _ => return Err(io::Error::other("a compression that is neither LZ4 nor Zstandard")),
    })
}
