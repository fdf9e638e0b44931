//! The safetensors files of a checkpoint. A file is opened when one of its tensors is read.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use moh_step::TensorKind;
use safetensors::tensor::{Dtype, Metadata};

use super::MAX_TEXT_BYTES;
use crate::{RankPart, ReadError, TensorEntry, TensorFile};

/// Maximum number of open files: the files of a few ranks.
const MAX_OPEN: usize = 48;

#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    /// The most recently used file is last.
    open: Mutex<Vec<Arc<OpenFile>>>,
}

/// A safetensors file and its header.
#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Offset of the data.
    start: u64,
    data_len: u64,
}

impl OpenFiles {
    /// Reads the elements of a shard of one kind in `directory` as f32, and checks their hash.
    pub(super) fn read(
        &self,
        directory: &Path,
        part: &RankPart,
        kind: TensorKind,
        entry: &TensorEntry,
    ) -> Result<Vec<f32>, ReadError> {
        let (dtype, bytes) = self.bytes(directory, part, kind, entry)?;
        let path = directory.join(&part.file(kind).file);
        let refuse = |reason: String| ReadError::unusable(&path, reason);
        let values = to_f32(dtype, &bytes)
            .ok_or_else(|| refuse(format!("{} is {dtype:?}, expected F32 or BF16", entry.name)))?;
        // `bytes` has checked the file's shape, but not its length.
        match values.len() == entry.range[1] - entry.range[0] {
            true => Ok(values),
            false => Err(refuse(format!("ends inside {}", entry.name))),
        }
    }

    /// Returns the type and the bytes of these elements, and checks their hash.
    pub(super) fn bytes(
        &self,
        directory: &Path,
        part: &RankPart,
        kind: TensorKind,
        entry: &TensorEntry,
    ) -> Result<(Dtype, Vec<u8>), ReadError> {
        let TensorFile { file, dtype } = part.file(kind);
        self.open(&directory.join(file))?.bytes(dtype, entry, &entry.blake3[kind as usize])
    }

    fn open(&self, path: &Path) -> Result<Arc<OpenFile>, ReadError> {
        // The list is valid even after a panic.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match open.iter().position(|file| file.path == path) {
            Some(index) => open.remove(index),
            None => Arc::new(OpenFile::open(path)?),
        };
        if open.len() >= MAX_OPEN {
            open.remove(0);
        }
        open.push(file.clone());
        Ok(file)
    }
}

impl OpenFile {
    fn open(path: &Path) -> Result<Self, ReadError> {
        let io = ReadError::io(path);
        let refuse = |reason: String| ReadError::damaged(path, reason);
        let mut file = moh_files::open(path).map_err(&io)?;
        let length = file.metadata().map_err(&io)?.len();
        let mut head = [0u8; 8];
        file.read_exact(&mut head).map_err(&io)?;
        let text = u64::from_le_bytes(head);
        if text > MAX_TEXT_BYTES || text > length.saturating_sub(8) {
            return Err(refuse(format!("a header of {text} bytes is not a safetensors file's")));
        }
        // Below 100 MB by the check above.
        let mut header = vec![0; text as usize];
        file.read_exact(&mut header).map_err(&io)?;
        // `SafeTensors::read_metadata` would require the whole file in memory.
        let metadata = serde_json::from_slice(&header)
            .map_err(|error| refuse(format!("not a safetensors file: {error}")))?;
        let start = 8 + text;
        Ok(OpenFile { path: path.to_owned(), file, metadata, start, data_len: length - start })
    }

    /// Returns a shard's dtype, which must be `described`, and its bytes, which must have the hash `blake3`.
    fn bytes(
        &self,
        described: &str,
        entry: &TensorEntry,
        blake3: &str,
    ) -> Result<(Dtype, Vec<u8>), ReadError> {
        let refuse = |reason: String| ReadError::damaged(&self.path, reason);
        let Some(info) = self.metadata.info(&entry.name) else {
            return Err(refuse(format!("contains no {}", entry.name)));
        };
        let dtype = format!("{:?}", info.dtype);
        let shape = entry.stored_shape();
        if dtype != described || shape.as_ref() != Some(&info.shape) {
            return Err(refuse(format!(
                "{} is {dtype} {:?}, but the manifest says {described} {shape:?}",
                entry.name, info.shape
            )));
        }
        let (from, to) = info.data_offsets;
        if from > to || to as u64 > self.data_len {
            return Err(refuse(format!("ends inside {}", entry.name)));
        }
        let mut bytes = vec![0; to - from];
        let (io, mut file) = (ReadError::io(&self.path), &self.file);
        file.seek(SeekFrom::Start(self.start + from as u64)).map_err(&io)?;
        file.read_exact(&mut bytes).map_err(&io)?;
        if blake3::hash(&bytes).to_hex().as_str() != blake3 {
            return Err(refuse(format!("{} does not match its hash: it is damaged", entry.name)));
        }
        Ok((info.dtype, bytes))
    }
}

/// Converts the elements of the two types that checkpoints contain.
fn to_f32(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    match dtype {
        Dtype::BF16 => Some(
            bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        ),
        Dtype::F32 => Some(
            (bytes.chunks_exact(4)).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        ),
        _ => None,
    }
}
