//! Finding the newest valid checkpoint and reading its tensors.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use half::bf16;
use moh_kernels::Backend;
use moh_model::parameters::Shard;
use safetensors::tensor::{Dtype, Metadata};

use super::fault::Fault;
use super::manifest::{FORMAT, Manifest, TensorEntry, TensorKind};
use super::{MANIFEST, MANIFEST_HASH};
use crate::run_directory::first_free;
use crate::{Error, Ranks, RunDirectory};

/// Maximum bytes of a manifest or header.
const MAX_TEXT_BYTES: u64 = 100_000_000;

/// A checkpoint whose hashes have been checked.
#[derive(Debug)]
pub struct StoredCheckpoint {
    directory: PathBuf,
    manifest: Manifest,
    headers: HashMap<String, Header>,
}

/// A safetensors file's header, and the offset of its data.
#[derive(Debug)]
struct Header {
    metadata: Metadata,
    start: u64,
    data_len: u64,
}

/// The newest valid checkpoint, the same on all ranks, which share the check of its hashes. Damaged
/// ones are renamed to `damaged-step-N` and passed to `damaged`, with the error, on the first rank.
///
/// # Errors
/// Fails if a directory cannot be listed or renamed, if a checkpoint cannot be read or has another
/// format, if only some ranks see its files, or if another rank has failed. The checkpoints are then
/// unchanged.
pub fn newest<B: Backend>(
    run: &RunDirectory,
    ranks: &mut Ranks<B>,
    damaged: &mut dyn FnMut(&Path, &Error),
) -> Result<Option<StoredCheckpoint>, Error> {
    loop {
        // Steps count from 1, so 0 means none; f64 represents them exactly.
        let listed = || Ok(run.checkpoint_steps()?.last().copied().unwrap_or(0) as f64);
        let step = ranks.first(listed)? as u64;
        if step == 0 {
            return Ok(None);
        }
        let directory = run.checkpoint(step);
        let opened = StoredCheckpoint::open(&directory, step)
            .and_then(|stored| stored.checked(Shard::of(ranks.group())));
        let mut opened = proven(ranks, opened)?.map_err(Error::from);
        if ranks.any(opened.is_err())? {
            let aside = aside(run, step);
            ranks.first_does(|| set_aside(run, &directory, &aside))?;
            // The first rank reports, even if another rank has found the damage.
            if let (true, Ok(_)) = (ranks.is_first(), &opened) {
                opened = Err(Error::Checkpoint {
                    path: aside.join(MANIFEST),
                    reason: "another rank found a damaged file".into(),
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

/// Returns what this rank has found, if the ranks together can tell whether the bytes are good.
fn proven<B: Backend>(
    ranks: &mut Ranks<B>,
    opened: Result<StoredCheckpoint, Fault>,
) -> Result<Result<StoredCheckpoint, Fault>, Error> {
    let opened = ranks.agree(match opened {
        Err(Fault::Unusable(error)) => Err(error),
        opened => Ok(opened),
    })?;
    let is_missing = matches!(opened, Err(Fault::Missing(_)));
    let flag = |flag| f64::from(u8::from(flag));
    let [some_miss_it, some_see_it] = ranks.largest([flag(is_missing), flag(!is_missing)])?;
    let differ = some_miss_it > 0.0 && some_see_it > 0.0;
    ranks.agree(match opened {
        Err(Fault::Missing(error)) if differ => Err(Error::NotShared { source: Box::new(error) }),
        opened => Ok(opened),
    })
}

/// A free name for a damaged checkpoint, which earlier ones keep.
fn aside(run: &RunDirectory, step: u64) -> PathBuf {
    first_free(|n| {
        let suffix = if n == 1 { String::new() } else { format!("-{n}") };
        run.checkpoints().join(format!("damaged-step-{step}{suffix}"))
    })
}

fn set_aside(run: &RunDirectory, directory: &Path, aside: &Path) -> Result<(), Error> {
    fs::rename(directory, aside).map_err(Error::io(aside))?;
    moh_files::sync_directory(&run.checkpoints()).map_err(Error::io(&run.checkpoints()))
}

impl StoredCheckpoint {
    /// Opens the run's checkpoint after `step` steps; its tensors are checked when they are read.
    ///
    /// # Errors
    /// Fails if there is none, or its manifest is damaged.
    pub fn of_step(run: &RunDirectory, step: u64) -> Result<Self, Error> {
        Ok(Self::open(&run.checkpoint(step), step)?)
    }

    /// Opens the checkpoint in `directory` without checking its tensors.
    fn open(directory: &Path, step: u64) -> Result<Self, Fault> {
        let manifest = read_manifest(directory, step)?;
        let mut headers = HashMap::new();
        for entry in &manifest.tensors {
            let path = directory.join(&entry.file);
            // A name with a directory in it would leave the checkpoint.
            if Path::new(&entry.file).file_name() != Some(entry.file.as_ref()) {
                let reason = format!("{:?} is not the name of a file", entry.file);
                let path = directory.join(MANIFEST);
                return Err(Fault::Damaged(Error::Checkpoint { path, reason }));
            }
            if !headers.contains_key(&entry.file) {
                headers.insert(entry.file.clone(), Header::read(&path)?);
            }
        }
        Ok(StoredCheckpoint { directory: directory.to_owned(), manifest, headers })
    }

    /// Checks the hashes of this rank's share of the files.
    fn checked(self, share: Shard) -> Result<Self, Fault> {
        for entry in self.manifest.tensors.iter().skip(share.rank).step_by(share.size) {
            self.bytes(entry)?;
        }
        Ok(self)
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads a tensor as f32, from any number of shards.
    ///
    /// # Errors
    /// Fails if the checkpoint lacks elements of it, has another length, or cannot be read.
    pub fn read_f32(&self, kind: TensorKind, name: &str, out: &mut [f32]) -> Result<(), Error> {
        let path = self.directory.join(MANIFEST);
        let refuse = |reason: String| Error::Checkpoint { path: path.clone(), reason };
        let mut found = 0;
        let named = |entry: &&TensorEntry| entry.kind == kind && entry.name == name;
        for entry in self.manifest.tensors.iter().filter(named) {
            let (dtype, bytes) = self.bytes(entry)?;
            let whole = entry.shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent));
            if whole != Some(out.len()) {
                return Err(refuse(format!(
                    "{name} has the shape {:?}, expected {} elements",
                    entry.shape,
                    out.len()
                )));
            }
            let values = to_f32(dtype, &bytes)
                .ok_or_else(|| refuse(format!("{name} is {dtype:?}, expected F32 or BF16")))?;
            // `bytes` has checked the file's shape, but not its length.
            if values.len() != entry.range[1] - entry.range[0] {
                return Err(refuse(format!("{name} ends early in {}", entry.file)));
            }
            // `bytes` has validated the slice.
            if let Some(slice) = entry.slice_of_tensor() {
                slice.place(entry.range[0], &values, out);
                found += values.len();
            }
        }
        if found == out.len() {
            return Ok(());
        }
        Err(refuse(match found {
            0 => format!("contains no {name}"),
            _ => format!("contains {found} of the {} elements of {name}", out.len()),
        }))
    }

    /// Reads a tensor's bytes and checks their hash.
    fn bytes(&self, entry: &TensorEntry) -> Result<(Dtype, Vec<u8>), Fault> {
        let path = self.directory.join(&entry.file);
        let refuse =
            |reason: String| Fault::Damaged(Error::Checkpoint { path: path.clone(), reason });
        let info = self
            .headers
            .get(&entry.file)
            .and_then(|header| header.metadata.info(&entry.name).map(|info| (header, info)));
        let Some((header, info)) = info else {
            return Err(refuse(format!("contains no {}", entry.name)));
        };
        let dtype = format!("{:?}", info.dtype);
        let shape = entry.stored_shape();
        if dtype != entry.dtype || shape.as_ref() != Some(&info.shape) {
            return Err(refuse(format!(
                "{} is {dtype} {:?}, but the manifest says {} {shape:?}",
                entry.name, info.shape, entry.dtype
            )));
        }
        let (from, to) = info.data_offsets;
        if from > to || to as u64 > header.data_len {
            return Err(refuse(format!("ends inside {}", entry.name)));
        }
        let mut bytes = vec![0; to - from];
        let mut file = File::open(&path).map_err(Fault::io(&path))?;
        file.seek(SeekFrom::Start(header.start + from as u64)).map_err(Fault::io(&path))?;
        file.read_exact(&mut bytes).map_err(Fault::io(&path))?;
        if blake3::hash(&bytes).to_hex().as_str() != entry.blake3 {
            return Err(refuse(format!("{} does not match its hash: it is damaged", entry.name)));
        }
        Ok((info.dtype, bytes))
    }
}

/// The format version of a manifest, whatever else it contains.
#[derive(serde::Deserialize)]
struct Version {
    format: u32,
}

fn read_manifest(directory: &Path, step: u64) -> Result<Manifest, Fault> {
    let path = directory.join(MANIFEST);
    let refuse = |reason: String| Error::Checkpoint { path: path.clone(), reason };
    let length = fs::metadata(&path).map_err(Fault::io(&path))?.len();
    if length > MAX_TEXT_BYTES {
        let reason = format!("{length} bytes: a manifest has at most {MAX_TEXT_BYTES}");
        return Err(Fault::Unusable(refuse(reason)));
    }
    let text = fs::read(&path).map_err(Fault::io(&path))?;
    let hash_path = directory.join(MANIFEST_HASH);
    let hash = fs::read(&hash_path).map_err(Fault::io(&hash_path))?;
    if hash != format!("{}  {MANIFEST}\n", blake3::hash(&text)).as_bytes() {
        let reason = format!("does not match the hash in {MANIFEST_HASH}: it is damaged");
        return Err(Fault::Damaged(refuse(reason)));
    }
    // The bytes are as they were written: what this program cannot read, another one can.
    if let Ok(Version { format }) = serde_json::from_slice(&text)
        && format != FORMAT
    {
        let reason = format!("format {format}: this program reads format {FORMAT}");
        return Err(Fault::Unusable(refuse(reason)));
    }
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|error| Fault::Unusable(refuse(format!("not a manifest: {error}"))))?;
    if manifest.state.step != step {
        let reason = format!("is of step {}, not {step}", manifest.state.step);
        return Err(Fault::Damaged(refuse(reason)));
    }
    Ok(manifest)
}

/// Elements of the two types that checkpoints contain.
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
    fn read(path: &Path) -> Result<Self, Fault> {
        let io = Fault::io(path);
        let refuse =
            |reason: String| Fault::Damaged(Error::Checkpoint { path: path.to_owned(), reason });
        let mut file = File::open(path).map_err(&io)?;
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
        Ok(Header { metadata, start, data_len: length - start })
    }
}
