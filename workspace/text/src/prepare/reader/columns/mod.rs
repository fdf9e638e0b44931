//! Tables: the wanted columns, found by name, and the documents in their rows.

mod arrow;
mod cells;
mod nested;
mod parquet;
#[cfg(test)]
mod tests;

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::{DataType, Field, Fields as Columns, Schema};

use super::chunk::{Chunk, Content, Document, Place, Record};
use super::{Position, ReadOptions};
use crate::panics::quietly;
use crate::prepare::fields::{Fields, ROW, missing};
use crate::prepare::{Error, Result};

pub(super) use arrow::Arrow;
pub(super) use parquet::Table as ParquetTable;

use cells::Cells;

/// Calls a reader of a table. The crates of Arrow and Parquet panic for some damaged files. A panic becomes an error.
fn guarded<T>(path: &Path, read: impl FnOnce() -> Result<T>) -> Result<T> {
    quietly(read).unwrap_or_else(|| Err(damaged(path, "a length or an offset is wrong")))
}

/// Returns the error of a table that cannot be read.
fn damaged(path: &Path, reason: impl Display) -> Error {
    // Some reasons continue with the places in the code, line by line.
    let reason = reason.to_string();
    let reason = reason.lines().next().unwrap_or_default().trim_end_matches('.');
    Error::unusable(path, format!("the table is damaged ({reason}): fetch it again"))
}

/// Rows of a table, with the wanted columns.
pub(super) struct Rows {
    batch: RecordBatch,
    /// Rows of the table before these rows.
    first: u64,
}

impl Rows {
    pub(super) fn bytes(&self, fields: &Fields) -> usize {
        let columns = columns(&self.batch, fields).flatten();
        let rows = 0..self.batch.num_rows();
        columns.map(|cells| rows.clone().map(|row| cells.bytes(row)).sum::<usize>()).sum()
    }

    /// Creates the chunk of a part's rows. The part comes after `before` rows of the table.
    fn chunk(
        batch: RecordBatch,
        before: u64,
        position: &mut Position,
        input_bytes: u64,
        options: &Arc<ReadOptions>,
    ) -> Chunk {
        let start = *position;
        position.record += batch.num_rows() as u64;
        let content = Content::Rows(Rows { batch, first: before + start.record });
        Chunk { start, end: *position, input_bytes, content, options: options.clone() }
    }
}

pub(super) fn records<'a>(
    rows: &'a Rows,
    options: &'a ReadOptions,
) -> impl Iterator<Item = Record<'a>> + Send + 'a {
    let fields = &*options.fields;
    let columns: Vec<Option<Cells<'a>>> = columns(&rows.batch, fields).collect();
    let mut slots = fields.slots();
    (0..rows.batch.num_rows()).map(move |row| {
        for (slot, cells) in slots.iter_mut().zip(&columns) {
            *slot = cells.as_ref().map(|cells| cells.value(row));
        }
        let place = Place::Row(rows.first + row as u64 + 1);
        Document::new(fields.text(&slots, ROW, Vec::new), place, options)
    })
}

/// Returns the wanted columns in the order of the slots: the column with the path as its name, and the column at the
/// path's end.
fn columns<'a>(batch: &'a RecordBatch, fields: &Fields) -> impl Iterator<Item = Option<Cells<'a>>> {
    fields.paths().iter().flat_map(|path| {
        let literal = Cells::find(batch, &[path]);
        let keys: Vec<&str> = path.split('.').collect();
        let nested = if literal.is_none() { Cells::find(batch, &keys) } else { None };
        [literal, nested]
    })
}

/// Splits a batch into its first rows, for one chunk, and the other rows. Nothing is copied.
fn split(batch: RecordBatch, options: &ReadOptions) -> (RecordBatch, Option<RecordBatch>) {
    let columns: Vec<_> = columns(&batch, &options.fields).flatten().collect();
    let (mut rows, mut bytes) = (0, 0);
    while rows < batch.num_rows() && (rows == 0 || bytes < options.chunk_bytes) {
        bytes += columns.iter().map(|cells| cells.bytes(rows)).sum::<usize>();
        rows += 1;
    }
    let rest = batch.num_rows() - rows;
    let rest = (rest > 0).then(|| batch.slice(rows, rest));
    (batch.slice(0, rows), rest)
}

/// Checks that the table has the wanted columns, with texts, or for a template with values that have a text.
fn check(path: &Path, schema: &Schema, fields: &Fields) -> Result<()> {
    for wanted in fields.paths() {
        let keys: Vec<&str> = wanted.split('.').collect();
        let found = find(schema.fields(), &[wanted]).or_else(|| find(schema.fields(), &keys));
        let Some(found) = found else {
            if fields.is_optional(wanted) {
                continue;
            }
            let names: Vec<_> = schema.fields().iter().map(|field| field.name().clone()).collect();
            return Err(Error::unusable(path, missing(wanted, ROW, &names)));
        };
        let kind = found.data_type();
        let is_known = fields.is_optional(wanted)
            || is_text(kind) && !fields.is_chat()
            || fields.is_chat() && nested::is_list(kind)
            || fields.is_template()
                && (kind.is_integer()
                    || kind.is_floating() && *kind != DataType::Float16
                    || *kind == DataType::Boolean);
        if !is_known {
            let expected = if fields.is_chat() { "a list of structures" } else { "text" };
            let reason = format!("the column {wanted:?} is {kind}, not {expected}");
            return Err(Error::unusable(path, reason));
        }
    }
    Ok(())
}

fn find<'a>(columns: &'a Columns, keys: &[&str]) -> Option<&'a Field> {
    let (first, rest) = keys.split_first()?;
    let (_, field) = columns.find(first)?;
    match field.data_type() {
        _ if rest.is_empty() => Some(field),
        DataType::Struct(inner) => find(inner, rest),
        _ => None,
    }
}

fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, values) => is_text(values),
        _ => false,
    }
}
