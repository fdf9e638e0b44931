//! Tables of Parquet, row group by row group. Strings are views of the pages, so neither long values nor values of a
//! dictionary are copied.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::{DataType, Field, FieldRef, Fields as Columns, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};

use super::{Rows, check, damaged, guarded, split};
use crate::prepare::Result;
use crate::prepare::reader::{Chunk, Position, ReadOptions, Reader};

/// Maximum rows that are read at once.
const MAX_BATCH_ROWS: u64 = 1 << 13;

/// A table with its footer read.
pub(in super::super) struct Table {
    metadata: ArrowReaderMetadata,
    wanted: Vec<usize>,
}

impl Table {
    /// Reads the footer of `path`, and checks the wanted columns.
    pub(in super::super) fn open(path: &Path, options: &ReadOptions) -> Result<Self> {
        let file = File::open(path).map_err(moh_files::io(path))?;
        let fields = &options.fields;
        let (metadata, wanted) = guarded(path, || {
            let metadata = ArrowReaderMetadata::load(&file, ArrowReaderOptions::new())
                .map_err(|error| damaged(path, error))?;
            let schema = metadata.schema();
            let views =
                Schema::new_with_metadata(views(schema.fields()), schema.metadata().clone());
            let read_as = ArrowReaderOptions::new().with_schema(Arc::new(views));
            // Types that Parquet lacks, but that Arrow's own description has, are read as they are.
            let as_views = ArrowReaderMetadata::try_new(metadata.metadata().clone(), read_as);
            let metadata = as_views.unwrap_or(metadata);
            let schema = metadata.parquet_schema();
            let is_wanted = |leaf: &usize| {
                let column = schema.column(*leaf);
                let names = column.path().parts();
                fields.paths().iter().any(|path| {
                    names[0] == *path || path.split('.').zip(names).all(|(key, name)| key == name)
                })
            };
            let wanted = (0..schema.num_columns()).filter(is_wanted).collect();
            Ok((metadata, wanted))
        })?;
        check(path, metadata.schema(), fields)?;
        Ok(Self { metadata, wanted })
    }

    pub(in super::super) fn parts(&self) -> usize {
        self.metadata.metadata().num_row_groups()
    }

    /// Reads a row group from a row on.
    pub(in super::super) fn read(
        &self,
        path: &Path,
        part: usize,
        from: Position,
        options: Arc<ReadOptions>,
    ) -> Result<Box<dyn Reader>> {
        let groups = self.metadata.metadata().row_groups();
        let rows_of = |group: usize| groups[group].num_rows().max(0) as u64;
        let rows = rows_of(part);
        let (mut stored, mut unpacked) = (0u64, 0u64);
        for &column in &self.wanted {
            let column = groups[part].column(column);
            stored = stored.saturating_add(column.compressed_size().max(0) as u64);
            unpacked = unpacked.saturating_add(column.uncompressed_size().max(0) as u64);
        }
        // About as many rows as a chunk has.
        let row_bytes = (unpacked / rows.max(1)).max(1);
        let batch_rows = (options.chunk_bytes as u64 / row_bytes).clamp(1, MAX_BATCH_ROWS);
        let file = File::open(path).map_err(moh_files::io(path))?;
        let batches = guarded(path, || {
            let wanted = self.wanted.iter().copied();
            ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone())
                .with_row_groups(vec![part])
                .with_projection(ProjectionMask::leaves(self.metadata.parquet_schema(), wanted))
                .with_offset(from.record as usize)
                .with_batch_size(batch_rows as usize)
                .build()
                .map_err(|error| damaged(path, error))
        })?;
        Ok(Box::new(Group {
            path: path.to_path_buf(),
            batches,
            batch: None,
            before: (0..part).map(rows_of).fold(0, u64::saturating_add),
            rows,
            stored,
            position: from,
            options,
        }))
    }
}

/// Returns the columns with views in place of other strings.
fn views(columns: &Columns) -> Columns {
    let view = |column: &FieldRef| -> FieldRef {
        let kind = match column.data_type() {
            kind if super::is_text(kind) => DataType::Utf8View,
            DataType::Struct(inner) => DataType::Struct(views(inner)),
            _ => return column.clone(),
        };
        Arc::new(Field::clone(column).with_data_type(kind))
    };
    columns.iter().map(view).collect()
}

struct Group {
    path: PathBuf,
    batches: ParquetRecordBatchReader,
    /// The remaining rows of the last batch.
    batch: Option<RecordBatch>,
    /// Rows of the table before this group.
    before: u64,
    rows: u64,
    /// Bytes of the wanted columns in the file.
    stored: u64,
    position: Position,
    options: Arc<ReadOptions>,
}

impl Group {
    /// Returns the remaining rows of a batch, or the next batch.
    fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        if let Some(batch) = self.batch.take() {
            return Ok(Some(batch));
        }
        let (path, batches) = (&self.path, &mut self.batches);
        guarded(path, || batches.next().transpose().map_err(|error| damaged(path, error)))
    }
}

impl Reader for Group {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        let Some(batch) = self.next_batch()? else {
            if self.position.record < self.rows {
                let (read, rows) = (self.position.record, self.rows);
                return Err(damaged(&self.path, format!("a row group of {rows} rows has {read}")));
            }
            return Ok(None);
        };
        let (path, options) = (&self.path, &self.options);
        let (rows, rest) = guarded(path, || Ok(split(batch, options)))?;
        self.batch = rest;
        // Pages are read in larger steps than chunks, so the rows measure the progress.
        let part = rows.num_rows() as f64 / self.rows.max(1) as f64;
        let input_bytes = (self.stored as f64 * part) as u64;
        Ok(Some(Rows::chunk(rows, self.before, &mut self.position, input_bytes, options)))
    }
}
