//! Tables of Parquet, row group by row group and page by page. Strings are views of the pages, so that neither
//! a value of a gigabyte nor one that is in a dictionary and in many rows is copied.

use std::fs::File;
use std::io::{BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::{DataType, Field, FieldRef, Fields as Columns, Schema};
use bytes::Bytes;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};

use super::{Rows, check, guarded, split};
use crate::reader::{Chunk, Position, ReadOptions, Reader};
use crate::{Error, Result};

/// Maximum rows that are read at once.
const MAX_BATCH_ROWS: usize = 1 << 13;

/// A table whose footer was read.
pub(in super::super) struct Table {
    metadata: ArrowReaderMetadata,
    /// The wanted columns.
    wanted: ProjectionMask,
}

/// A file whose length is known: what a damaged table says about its own lengths is compared with it before
/// memory is taken.
struct Bounded {
    file: File,
    bytes: u64,
}

impl Bounded {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(moh_files::io(path))?;
        let bytes = file.metadata().map_err(moh_files::io(path))?.len();
        Ok(Self { file, bytes })
    }
}

impl Length for Bounded {
    fn len(&self) -> u64 {
        self.bytes
    }
}

impl ChunkReader for Bounded {
    type T = BufReader<File>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let mut file = self.file.try_clone()?;
        file.seek(SeekFrom::Start(start))?;
        Ok(BufReader::new(file))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        match start.checked_add(length as u64) {
            Some(end) if end <= self.bytes => self.file.get_bytes(start, length),
            _ => Err(ParquetError::EOF(format!(
                "{length} bytes at byte {start} of a file of {} bytes",
                self.bytes
            ))),
        }
    }
}

impl Table {
    /// Reads the footer of `path`, and checks the wanted columns.
    pub(in super::super) fn open(path: &Path, options: &ReadOptions) -> Result<Self> {
        let file = Bounded::open(path)?;
        let fields = &options.fields;
        let (metadata, wanted) = guarded(path, || {
            let metadata = ArrowReaderMetadata::load(&file, ArrowReaderOptions::new())?;
            let schema = metadata.schema();
            let views =
                Schema::new_with_metadata(views(schema.fields()), schema.metadata().clone());
            let read_as = ArrowReaderOptions::new().with_schema(Arc::new(views));
            // Types without a place in Parquet, which Arrow's own description has, are read as they are.
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
            let leaves = (0..schema.num_columns()).filter(is_wanted);
            let wanted = ProjectionMask::leaves(schema, leaves);
            Ok::<_, ParquetError>((metadata, wanted))
        })?;
        check(path, metadata.schema(), fields)?;
        Ok(Self { metadata, wanted })
    }

    /// The number of row groups.
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
        let (mut unpacked, mut stored) = (0i64, 0i64);
        for (index, column) in groups[part].columns().iter().enumerate() {
            if self.wanted.leaf_included(index) {
                unpacked = unpacked.saturating_add(column.uncompressed_size().max(0));
                stored = stored.saturating_add(column.compressed_size().max(0));
            }
        }
        let rows = rows_of(part);
        let row_bytes = (unpacked as u64 / rows.max(1)).max(1);
        let batch_rows = (options.chunk_bytes as u64 / row_bytes).clamp(1, MAX_BATCH_ROWS as u64);
        let file = Bounded::open(path)?;
        let batches = guarded(path, || {
            ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone())
                .with_row_groups(vec![part])
                .with_projection(self.wanted.clone())
                .with_batch_size(batch_rows as usize)
                .with_offset(from.record as usize)
                .build()
        })?;
        Ok(Box::new(Group {
            path: path.to_path_buf(),
            batches,
            batch: None,
            before: (0..part).map(rows_of).fold(0, u64::saturating_add),
            rows,
            stored: stored as u64,
            position: from,
            options,
        }))
    }
}

/// The columns with views in the place of other strings.
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

/// Reads the rows of a row group.
struct Group {
    path: PathBuf,
    batches: ParquetRecordBatchReader,
    /// What is left of the batch that was read last.
    batch: Option<RecordBatch>,
    /// Rows of the table before this group.
    before: u64,
    /// Rows of this group.
    rows: u64,
    /// Bytes of the wanted columns in the file.
    stored: u64,
    position: Position,
    options: Arc<ReadOptions>,
}

impl Reader for Group {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        let (batches, batch, options) = (&mut self.batches, self.batch.take(), &self.options);
        let read = guarded(&self.path, || {
            let batch = match batch {
                Some(batch) => Some(batch),
                None => batches.next().transpose()?,
            };
            Ok::<_, arrow_schema::ArrowError>(batch.map(|batch| split(batch, options)))
        })?;
        let Some((rows, rest)) = read else {
            if self.position.record < self.rows {
                let (read, rows) = (self.position.record, self.rows);
                let reason = format!(
                    "the table is damaged (a row group of {rows} rows has {read}): fetch it again"
                );
                return Err(Error::input(&self.path, reason));
            }
            return Ok(None);
        };
        self.batch = rest;
        // Pages are read in larger steps than chunks: the rows tell how far it is.
        let part = rows.num_rows() as f64 / self.rows.max(1) as f64;
        let input_bytes = (self.stored as f64 * part) as u64;
        Ok(Some(Rows::chunk(rows, self.before, &mut self.position, input_bytes, options)))
    }
}
