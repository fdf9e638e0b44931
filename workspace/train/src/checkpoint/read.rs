//! Finding the newest good checkpoint and reading its tensors.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use half::bf16;
use moh_kernels::Backend;
use moh_model::parameters::Shard;
use safetensors::tensor::{Dtype, Metadata};

use super::manifest::{FORMAT, Manifest, TensorEntry, TensorKind};
use super::{MANIFEST, MANIFEST_HASH};
use crate::{Error, Ranks, RunDirectory};

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

/// The newest checkpoint that is whole, the same on all ranks, which check its parts in turns. Damaged
/// ones are renamed to `damaged-step-N` and told to `damaged`, on the first rank, with what is wrong
/// in them.
///
/// # Errors
/// When a directory cannot be listed or renamed, or another rank has failed.
pub fn newest<B: Backend>(
    run: &RunDirectory,
    ranks: &mut Ranks<B>,
    damaged: &mut dyn FnMut(&Path, &Error),
) -> Result<Option<StoredCheckpoint>, Error> {
    loop {
        // Steps from 1, so 0 says that there is none; f64 holds them exactly.
        let listed = || Ok(run.checkpoint_steps()?.last().copied().unwrap_or(0) as f64);
        let step = ranks.first(listed)? as u64;
        if step == 0 {
            return Ok(None);
        }
        let directory = run.checkpoint(step);
        let mut opened = StoredCheckpoint::open(&directory, step)
            .and_then(|stored| stored.checked(Shard::of(ranks.group())));
        if ranks.any(opened.is_err())? {
            let aside = run.checkpoints().join(format!("damaged-step-{step}"));
            ranks.first_does(|| set_aside(run, &directory, &aside))?;
            // The first rank tells, though another may have seen more than that.
            if let (true, Ok(_)) = (ranks.is_first(), &opened) {
                opened = Err(Error::Checkpoint {
                    path: aside.join(MANIFEST),
                    reason: "another rank found a part that is damaged".into(),
                });
            }
            if let (true, Err(error)) = (ranks.is_first(), opened) {
                damaged(&aside, &error);
            }
        } else {
            return opened.map(Some);
        }
    }
}

fn set_aside(run: &RunDirectory, directory: &Path, aside: &Path) -> Result<(), Error> {
    if aside.exists() {
        fs::remove_dir_all(aside).map_err(Error::io(aside))?;
    }
    fs::rename(directory, aside).map_err(Error::io(aside))?;
    moh_files::sync_directory(&run.checkpoints()).map_err(Error::io(&run.checkpoints()))
}

impl StoredCheckpoint {
    /// Opens the run's checkpoint after `step` steps; what is read of it is checked then.
    ///
    /// # Errors
    /// When there is none, or its manifest is damaged.
    pub fn of_step(run: &RunDirectory, step: u64) -> Result<Self, Error> {
        Self::open(&run.checkpoint(step), step)
    }

    /// Opens the checkpoint in `directory`, whose parts are not looked at.
    fn open(directory: &Path, step: u64) -> Result<Self, Error> {
        let manifest = read_manifest(directory, step)?;
        let mut headers = HashMap::new();
        for entry in &manifest.tensors {
            let path = directory.join(&entry.file);
            // A name with a folder in it would lead elsewhere.
            if Path::new(&entry.file).file_name() != Some(entry.file.as_ref()) {
                let reason = format!("{:?} is not the name of a file", entry.file);
                return Err(Error::Checkpoint { path: directory.join(MANIFEST), reason });
            }
            if !headers.contains_key(&entry.file) {
                headers.insert(entry.file.clone(), Header::read(&path)?);
            }
        }
        Ok(StoredCheckpoint { directory: directory.to_owned(), manifest, headers })
    }

    /// The same, when the hashes of this rank's share of its parts fit.
    fn checked(self, share: Shard) -> Result<Self, Error> {
        for entry in self.manifest.tensors.iter().skip(share.rank).step_by(share.size) {
            self.bytes(entry)?;
        }
        Ok(self)
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads a tensor as f32, from as many parts as it was written in.
    ///
    /// # Errors
    /// When the checkpoint does not hold all of it in this length, or cannot be read.
    pub fn read_f32(&self, kind: TensorKind, name: &str, out: &mut [f32]) -> Result<(), Error> {
        let path = self.directory.join(MANIFEST);
        let refuse = |reason: String| Error::Checkpoint { path: path.clone(), reason };
        let mut placed = 0;
        let named = |entry: &&TensorEntry| entry.kind == kind && entry.name == name;
        for entry in self.manifest.tensors.iter().filter(named) {
            let (dtype, bytes) = self.bytes(entry)?;
            let whole = entry.shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent));
            if whole != Some(out.len()) {
                return Err(refuse(format!(
                    "{name} is of shape {:?}, expected {} numbers",
                    entry.shape,
                    out.len()
                )));
            }
            let values = to_f32(dtype, &bytes)
                .ok_or_else(|| refuse(format!("{name} is {dtype:?}, expected F32 or BF16")))?;
            // `bytes` has checked the shape that the file gives; its length is another matter.
            if values.len() != entry.range[1] - entry.range[0] {
                return Err(refuse(format!("{name} ends early in {}", entry.file)));
            }
            // `bytes` has made a shape of it.
            if let Some(part) = entry.part() {
                part.place(entry.range[0], &values, out);
                placed += values.len();
            }
        }
        if placed == out.len() {
            return Ok(());
        }
        Err(refuse(match placed {
            0 => format!("holds no {name}"),
            _ => format!("holds {placed} of the {} numbers of {name}", out.len()),
        }))
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
        let part = entry.stored_shape();
        if dtype != entry.dtype || part.as_ref() != Some(&info.shape) {
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

fn read_manifest(directory: &Path, step: u64) -> Result<Manifest, Error> {
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
        return Err(refuse(format!("does not have the hash in {MANIFEST_HASH}: it is damaged")));
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
    Ok(manifest)
}

/// Numbers of the two types that checkpoints hold.
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
