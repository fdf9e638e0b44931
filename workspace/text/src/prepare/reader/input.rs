//! An open input: its format, its parts, and their readers.

use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::format::{Format, START_BYTES, format_of};
use super::stream::Stream;
use super::{Position, ReadOptions, Reader, array, columns, lines, paragraphs, text};
use crate::prepare::decode::{Compression, Decoded, Source, refusal};
use crate::prepare::names::is_standard_input;
use crate::prepare::{Error, Result};

/// An input that can be read, in parts that can be read at the same time.
pub(crate) struct OpenInput {
    path: PathBuf,
    options: Arc<ReadOptions>,
    pub(super) format: Format,
    /// The footer of a Parquet table, read before its rows.
    parquet: Option<columns::ParquetTable>,
    /// The identity of the file when it was opened; `None` for a pipe.
    pub(crate) identity: Option<Identity>,
    /// A pipe, which can be read once.
    pipe: Mutex<Option<Decoded>>,
}

/// Identifies the state of a file, to detect changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// The file's size as stored.
    pub(crate) bytes: u64,
    /// Time of the last change, in nanoseconds since 1970; 0 for a remote file.
    pub(crate) modified_ns: u64,
    /// The version that the store of a remote file names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<String>,
}

impl Identity {
    /// Returns the identity of a remote file. Copies of a remote file differ in their times.
    pub(crate) fn of_version(bytes: u64, version: &str) -> Self {
        Self { bytes, modified_ns: 0, version: Some(version.to_owned()) }
    }

    fn of(metadata: &Metadata) -> Self {
        let modified =
            metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Self {
            bytes: metadata.len(),
            modified_ns: modified.map_or(0, |since| since.as_nanos() as u64),
            version: None,
        }
    }
}

/// Opens `path`, or standard input if it is `-`, and reads its beginning. `format` is the value of `--format`.
pub(crate) fn open(
    path: &Path,
    format: Option<Format>,
    options: Arc<ReadOptions>,
) -> Result<OpenInput> {
    let (source, identity): (Source, _) = if is_standard_input(path) {
        (Box::new(std::io::stdin()), None)
    } else {
        let file = File::open(path).map_err(moh_files::io(path))?;
        let metadata = file.metadata().map_err(moh_files::io(path))?;
        // Other files than regular files would lose the bytes read here when they are opened again.
        (Box::new(file), metadata.is_file().then(|| Identity::of(&metadata)))
    };
    let mut decoded = Decoded::new(path, source, options.max_window_bytes)?;
    let start = decoded.peek(START_BYTES)?;
    if let Some(reason) = refusal(path, start) {
        return Err(Error::unusable(path, reason));
    }
    let format = format_of(path, start, format)?;
    let parquet = match format {
        Format::Parquet if identity.is_none() || decoded.compression != Compression::None => {
            // The end of a Parquet file describes its columns.
            let reason = "a compressed file or a pipe with Parquet: write it to a file first";
            return Err(Error::unusable(path, reason));
        }
        Format::Parquet => Some(columns::ParquetTable::open(path, &options)?),
        _ => None,
    };
    let pipe = Mutex::new(identity.is_none().then_some(decoded));
    let path = path.to_path_buf();
    Ok(OpenInput { path, options, format, parquet, identity, pipe })
}

impl OpenInput {
    /// Checks that the file has not changed since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let Some(identity) = &self.identity else { return Ok(()) };
        let now = std::fs::metadata(&self.path).map_err(moh_files::io(&self.path))?;
        if Identity::of(&now) == *identity {
            return Ok(());
        }
        let reason = "was changed while it was read: prepare it again when it is complete";
        Err(Error::unusable(&self.path, reason))
    }

    /// Returns the number of parts, in the order of the documents. [`OpenInput::read`] reads each part.
    pub(crate) fn parts(&self) -> usize {
        self.parquet.as_ref().map_or(1, columns::ParquetTable::parts)
    }

    /// Reads a part from a position on: its beginning, or the end of one of its chunks. Fails if the input cannot be
    /// read, is shorter than `from`, or is a pipe that was read before.
    pub(crate) fn read(&self, part: usize, from: Position) -> Result<Box<dyn Reader>> {
        let (path, options) = (self.path.as_path(), Arc::clone(&self.options));
        if let Some(table) = &self.parquet {
            return table.read(path, part, from, options);
        }
        let decoded = match &self.identity {
            Some(_) => Decoded::open_at(path, from.offset, options.max_window_bytes)?,
            None => {
                let pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner).take();
                pipe.filter(|_| from == Position::default()).ok_or_else(|| {
                    Error::unusable(path, "can be read once: write it to a file to continue")
                })?
            }
        };
        if self.format == Format::Arrow {
            return Ok(Box::new(columns::Arrow::new(path, decoded, from, options)?));
        }
        let stream = Stream::new(decoded, from, options);
        Ok(match self.format {
            Format::JsonLines => Box::new(lines::Lines(stream)),
            Format::JsonArray => Box::new(array::Array { path: self.path.clone(), stream }),
            Format::Paragraphs => Box::new(paragraphs::Paragraphs(stream)),
            _ => Box::new(text::Text(stream)),
        })
    }
}
