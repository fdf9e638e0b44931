//! A batch of rows that is too long to be held: of its text column the ends of the values are held, and the values
//! themselves are read as they come, compressed or not.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, LargeStringArray, RecordBatch};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_ipc::CompressionType;

use super::messages::{LENGTH_BYTES, Place, Source, decoder, fault, read_exactly, skip};
use super::{damaged, guarded, too_large};
use crate::Result;
use crate::reader::ReadOptions;

/// The rows of a long batch that were not read yet.
pub(super) struct Long {
    column: String,
    /// Where each value begins, and the last ends.
    offsets: Vec<i64>,
    valid: Option<BooleanBuffer>,
    values: Box<dyn Read + Send>,
    /// Bytes of values that were read.
    read: i64,
    /// The next row.
    row: usize,
    /// Where the message after it begins.
    end: u64,
}

/// What is known of a long batch before it is read.
pub(super) struct Batch<'a> {
    /// The column's name, and whether its offsets have 64 bits.
    pub(super) column: (&'a str, bool),
    pub(super) rows: usize,
    /// Whether values are there, the offsets, the values.
    pub(super) places: [Place; 3],
    pub(super) compression: Option<CompressionType>,
    /// Bytes of the body.
    pub(super) body: u64,
}

/// Some of the rows.
pub(super) enum Rows {
    Read(RecordBatch),
    /// One, whose value was not read.
    TooLong,
}

impl Long {
    /// Reads where the values are.
    pub(super) fn new(
        batch: &Batch<'_>,
        source: &mut Source,
        path: &Path,
        options: &ReadOptions,
    ) -> Result<Self> {
        let &Batch { column: (column, is_large), rows, places, compression, body } = batch;
        let [valid, offsets, values] = places;
        let start = source.position();
        let width = if is_large { size_of::<i64>() } else { size_of::<i32>() };
        let stored = valid.bytes.saturating_add(offsets.bytes);
        // As they are stored, as they are, and as they become.
        let held = (rows as u64).saturating_mul(20).saturating_add(stored);
        if held > options.max_table_bytes as u64 {
            return Err(too_large(path, held, options));
        }
        options.await_room(held as usize);
        let fail = |error| fault(path, error);
        let mut whole = |place: Place, least: usize| -> io::Result<Vec<u8>> {
            source.skip_to(start + place.start)?;
            let mut values = open(source, place, compression, options)?;
            let bytes = read_exactly(&mut values, least)?;
            Ok(bytes)
        };
        let valid = match valid.bytes {
            0 => None,
            _ => Some(whole(valid, rows.div_ceil(8)).map_err(fail)?),
        };
        let valid = valid.map(|bits| BooleanBuffer::new(Buffer::from(bits), 0, rows));
        let bytes = whole(offsets, (rows + 1) * width).map_err(fail)?;
        let offsets: Vec<i64> = match is_large {
            true => bytes.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
            false => {
                bytes.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes).into()).collect()
            }
        };
        if offsets[0] < 0 || !offsets.is_sorted() {
            return Err(damaged(path, "an offset is wrong"));
        }
        source.skip_to(start + values.start).map_err(fail)?;
        let values = open(source, values, compression, options).map_err(fail)?;
        let (column, end) = (column.to_owned(), start + body);
        Ok(Self { column, offsets, valid, values, read: 0, row: 0, end })
    }

    /// The rows that are left.
    pub(super) fn rows(&self) -> usize {
        self.offsets.len() - 1 - self.row
    }

    /// Where the message after it begins.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Leaves the next `rows` out.
    pub(super) fn skip(&mut self, rows: usize) {
        self.row += rows;
    }

    /// The next rows, at least one of those that are left.
    pub(super) fn next(&mut self, path: &Path, options: &ReadOptions) -> Result<Rows> {
        let fail = |error| fault(path, error);
        let start = self.offsets[self.row];
        // Values of rows that were left out, or of none.
        skip(&mut self.values, (start - self.read) as u64).map_err(fail)?;
        let wanted = start + options.chunk_bytes as i64;
        let end = self.offsets[self.row + 1..].partition_point(|&end| end < wanted);
        // The row that reaches the size of a chunk comes with it, if it is not a long one.
        let mut rows = (end + 1).min(self.rows());
        let length = |rows: usize| (self.offsets[self.row + rows] - start) as usize;
        if rows > 1 && length(rows) > 2 * options.chunk_bytes {
            rows -= 1;
        }
        let bytes = length(rows);
        let first = self.row;
        self.row += rows;
        self.read = start + bytes as i64;
        if bytes > options.max_record_bytes && rows == 1 {
            skip(&mut self.values, bytes as u64).map_err(fail)?;
            return Ok(Rows::TooLong);
        }
        options.await_room(bytes);
        let values = read_exactly(&mut self.values, bytes).map_err(fail)?;
        let offsets = self.offsets[first..=first + rows].iter().map(|offset| offset - start);
        let offsets = ScalarBuffer::from(offsets.collect::<Vec<_>>());
        let nulls = self.valid.as_ref().map(|valid| NullBuffer::new(valid.slice(first, rows)));
        guarded(path, || {
            let texts =
                LargeStringArray::try_new(OffsetBuffer::new(offsets), Buffer::from(values), nulls)?;
            let column = Arc::new(texts) as ArrayRef;
            RecordBatch::try_from_iter_with_nullable([(&self.column, column, true)])
        })
        .map(Rows::Read)
    }
}

/// Reads a buffer that begins here.
fn open(
    source: &mut Source,
    place: Place,
    compression: Option<CompressionType>,
    options: &ReadOptions,
) -> io::Result<Box<dyn Read + Send>> {
    let Some(compression) = compression.filter(|_| place.bytes > 0) else {
        return Ok(Box::new(source.clone().take(place.bytes)));
    };
    let length = source.take_exact(LENGTH_BYTES as usize)?;
    let rest = source.clone().take(place.bytes.saturating_sub(LENGTH_BYTES));
    match length.try_into().map(i64::from_le_bytes) {
        Ok(-1) => Ok(Box::new(rest)),
        _ => decoder(rest, compression, options.max_table_bytes),
    }
}
