//! Finding the newest good checkpoint and reading its tensors.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::tensor::{Dtype, Metadata};

use super::manifest::{FORMAT, Manifest, TensorEntry, TensorKind};
use super::write::sync;
use super::{MANIFEST, MANIFEST_HASH};
use crate::{Error, RunDirectory};

/// A longer manifest or header is not one of ours.
const MAX_TEXT_BYTES: u64 = 100_000_000;

/// A checkpoint whose hashes fit.
#[derive(Debug)]
pub struct StoredCheckpoint {
    directory: PathBuf,
    manifest: Manifest,
    headers: HashMap<String, Header>,
}

/// A safetensors file's header, and where the data behind it begins.
#[derive(Debug)]
struct Header {
    metadata: Metadata,
    start: u64,
    data_len: u64,
}

/// The newest checkpoint that is whole. Damaged ones are renamed to `damaged-step-N` and told to
/// `damaged` with what is wrong in them.
///
/// # Errors
/// When a directory cannot be listed or renamed.
pub fn newest(
    run: &RunDirectory,
    damaged: &mut dyn FnMut(&Path, &Error),
) -> Result<Option<StoredCheckpoint>, Error> {
    for step in run.checkpoint_steps()?.into_iter().rev() {
        let directory = run.checkpoint(step);
        match StoredCheckpoint::open(&directory, step) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(error) => {
                let aside = run.checkpoints().join(format!("damaged-step-{step}"));
                if aside.exists() {
                    fs::remove_dir_all(&aside).map_err(Error::io(&aside))?;
                }
                fs::rename(&directory, &aside).map_err(Error::io(&aside))?;
                sync(&run.checkpoints())?;
                damaged(&aside, &error);
            }
        }
    }
    Ok(None)
}

impl StoredCheckpoint {
    /// Opens the checkpoint in `directory` and checks every hash.
    fn open(directory: &Path, step: u64) -> Result<Self, Error> {
        let path = directory.join(MANIFEST);
        let refuse = |reason: String| Error::Checkpoint { path: path.clone(), reason };
        let length = fs::metadata(&path).map_err(Error::io(&path))?.len();
        if length > MAX_TEXT_BYTES {
            return Err(refuse(format!("{length} bytes are not a manifest")));
        }
        let text = fs::read(&path).map_err(Error::io(&path))?;
        let hash_path = directory.join(MANIFEST_HASH);
        let hash = fs::read(&hash_path).map_err(Error::io(&hash_path))?;
        if hash != format!("{}  {MANIFEST}\n", blake3::hash(&text)).as_bytes() {
            return Err(refuse(format!(
                "does not have the hash in {MANIFEST_HASH}: it is damaged"
            )));
        }
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|error| refuse(format!("not a manifest: {error}")))?;
        if manifest.format != FORMAT {
            return Err(refuse(format!(
                "format {}: this program reads format {FORMAT}",
                manifest.format
            )));
        }
        if manifest.state.step != step {
            return Err(refuse(format!("of step {}, not {step}", manifest.state.step)));
        }
        let mut headers = HashMap::new();
        for kind in TensorKind::ALL {
            let name = kind.file().to_owned();
            headers.insert(name, Header::read(&directory.join(kind.file()))?);
        }
        let checkpoint = StoredCheckpoint { directory: directory.to_owned(), manifest, headers };
        for entry in &checkpoint.manifest.tensors {
            checkpoint.bytes(entry)?;
        }
        Ok(checkpoint)
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads a tensor as f32.
    ///
    /// # Errors
    /// When the checkpoint has no such tensor of this length, or it cannot be read.
    pub fn read_f32(&self, kind: TensorKind, name: &str, out: &mut [f32]) -> Result<(), Error> {
        let path = self.directory.join(kind.file());
        let refuse = |reason: String| Err(Error::Checkpoint { path: path.clone(), reason });
        let named = |entry: &&TensorEntry| entry.kind == kind && entry.name == name;
        let Some(entry) = self.manifest.tensors.iter().find(named) else {
            return refuse(format!("holds no {name}"));
        };
        let (dtype, bytes) = self.bytes(entry)?;
        let values: Vec<f32> = match dtype {
            Dtype::BF16 => {
                bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            Dtype::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            other => return refuse(format!("{name} is {other:?}, expected F32 or BF16")),
        };
        if values.len() != out.len() {
            return refuse(format!(
                "{name} holds {} numbers, expected {}",
                values.len(),
                out.len()
            ));
        }
        out.copy_from_slice(&values);
        Ok(())
    }

    /// A tensor's bytes, whose hash fits.
    fn bytes(&self, entry: &TensorEntry) -> Result<(Dtype, Vec<u8>), Error> {
        let path = self.directory.join(&entry.file);
        let refuse = |reason: String| Error::Checkpoint { path: path.clone(), reason };
        let info = self
            .headers
            .get(&entry.file)
            .and_then(|header| header.metadata.info(&entry.name).map(|info| (header, info)));
        let Some((header, info)) = info else {
            return Err(refuse(format!("holds no {}", entry.name)));
        };
        let dtype = format!("{:?}", info.dtype);
        let part: Vec<usize> =
            entry.slice.iter().map(|[from, to]| to.saturating_sub(*from)).collect();
        if dtype != entry.dtype || info.shape != part {
            return Err(refuse(format!(
                "{} is {dtype} {:?}, and the manifest says {} {part:?}",
                entry.name, info.shape, entry.dtype
            )));
        }
        let (from, to) = info.data_offsets;
        if from > to || to as u64 > header.data_len {
            return Err(refuse(format!("ends inside {}", entry.name)));
        }
        let mut bytes = vec![0; to - from];
        let mut file = File::open(&path).map_err(Error::io(&path))?;
        file.seek(SeekFrom::Start(header.start + from as u64)).map_err(Error::io(&path))?;
        file.read_exact(&mut bytes).map_err(Error::io(&path))?;
        if blake3::hash(&bytes).to_hex().as_str() != entry.blake3 {
            return Err(refuse(format!("{} does not have its hash: it is damaged", entry.name)));
        }
        Ok((info.dtype, bytes))
    }
}

impl Header {
    fn read(path: &Path) -> Result<Self, Error> {
        let io = |error| Error::io(path)(error);
        let refuse = |reason: String| Error::Checkpoint { path: path.to_owned(), reason };
        let mut file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let mut head = [0u8; 8];
        file.read_exact(&mut head).map_err(io)?;
        let text = u64::from_le_bytes(head);
        if text > MAX_TEXT_BYTES || text > length.saturating_sub(8) {
            return Err(refuse(format!("a header of {text} bytes is not a safetensors file's")));
        }
        // Below 100 MB by the check above.
        let mut header = vec![0; text as usize];
        file.read_exact(&mut header).map_err(io)?;
        // Not `SafeTensors::read_metadata`, which wants the whole file in memory.
        let metadata = serde_json::from_slice(&header)
            .map_err(|error| refuse(format!("not a safetensors file: {error}")))?;
        let start = 8 + text;
        Ok(Header { metadata, start, data_len: length - start })
    }
}
