//! Tables of Parquet, row group by row group and page by page. Strings are views of the pages, so that neither
//! a value of a gigabyte nor one that is in a dictionary and in many rows is copied. What is held at once is
//! planned before it is read.

mod delta;
mod pages;
mod plan;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::{ArrowError, DataType, Field, FieldRef, Fields as Columns, Schema};
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, RowSelection, RowSelector,
};
use parquet::arrow::{ProjectionMask, parquet_to_arrow_field_levels};
use parquet::errors::ParquetError;

use self::pages::Bounded;
use self::plan::Run;
use super::{Rows, check, damaged, guarded, split};
use crate::reader::{Chunk, Position, ReadOptions, Reader};
use crate::{Error, Result};

/// A table whose footer was read.
pub(in super::super) struct Table {
    metadata: ArrowReaderMetadata,
    /// The wanted columns.
    wanted: Vec<usize>,
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
            let wanted = (0..schema.num_columns()).filter(is_wanted).collect();
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
        let rows = rows_of(part);
        let file = Bounded::open(path)?;
        let columns = self.wanted.iter().map(|&column| groups[part].column(column));
        let stored = columns.clone().map(|column| column.compressed_size().max(0) as u64);
        let stored = stored.fold(0, u64::saturating_add);
        let columns = guarded(path, || {
            columns.map(|column| pages::sizes(&file, column)).collect::<Result<Vec<_>, _>>()
        })?;
        let limit = options.max_table_bytes;
        let runs = plan::runs(&columns, rows, options.chunk_bytes as u64, limit as u64);
        let runs = runs.map_err(|held| {
            let reason = format!(
                "row group {} has a page that takes {held} bytes, of {limit} that --memory gives it: raise \
                 --memory, or write the table with smaller pages",
                part + 1
            );
            Error::input(path, reason)
        })?;
        let runs = runs.into_iter().filter_map(|run| run.after(from.record)).collect::<Vec<_>>();
        Ok(Box::new(Group {
            path: path.to_path_buf(),
            metadata: self.metadata.clone(),
            wanted: ProjectionMask::leaves(
                self.metadata.parquet_schema(),
                self.wanted.iter().copied(),
            ),
            file,
            number: part,
            runs: runs.into_iter(),
            batches: None,
            batch: None,
            before: (0..part).map(rows_of).fold(0, u64::saturating_add),
            rows,
            stored,
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
    metadata: ArrowReaderMetadata,
    wanted: ProjectionMask,
    file: Bounded,
    number: usize,
    /// What is left to be read.
    runs: std::vec::IntoIter<Run>,
    /// Reads the rows of a run.
    batches: Option<ParquetRecordBatchReader>,
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

impl Group {
    /// A reader of a run.
    fn open(&self, run: Run) -> Result<ParquetRecordBatchReader, ParquetError> {
        let metadata = self.metadata.metadata();
        let columns = self.metadata.schema().fields();
        let levels = parquet_to_arrow_field_levels(
            self.metadata.parquet_schema(),
            self.wanted.clone(),
            Some(columns),
        )?;
        let group = pages::Group { file: &self.file, metadata, number: self.number };
        let selected = RowSelector::select(run.rows as usize);
        let selection = match run.first {
            0 => vec![selected],
            first => vec![RowSelector::skip(first as usize), selected],
        };
        ParquetRecordBatchReader::try_new_with_row_groups(
            &levels,
            &group,
            run.batch_rows as usize,
            Some(RowSelection::from(selection)),
        )
    }

    /// The rows that are left of a batch, or the next batch.
    fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        if let Some(batch) = self.batch.take() {
            return Ok(Some(batch));
        }
        loop {
            if let Some(batches) = &mut self.batches {
                let batch = guarded(&self.path, || batches.next().transpose())?;
                if batch.is_some() {
                    return Ok(batch);
                }
                // With its last page, before another one is read.
                self.batches = None;
            }
            let Some(run) = self.runs.next() else { return Ok(None) };
            self.options.await_room(usize::try_from(run.held).unwrap_or(usize::MAX));
            self.batches = Some(guarded(&self.path, || self.open(run))?);
        }
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
        let (rows, rest) = guarded(path, || Ok::<_, ArrowError>(split(batch, options)))?;
        self.batch = rest;
        // Pages are read in larger steps than chunks: the rows tell how far it is.
        let part = rows.num_rows() as f64 / self.rows.max(1) as f64;
        let input_bytes = (self.stored as f64 * part) as u64;
        Ok(Some(Rows::chunk(rows, self.before, &mut self.position, input_bytes, options)))
    }
}
