//! A checkpoint on disk. A reader opens only the parts and files with the tensors that it needs: the
//! total bytes that all ranks read grow with the checkpoint, not with the number of ranks.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use moh_kernels::DType;
use moh_model::ModelConfig;
use moh_model::parameters::Shard;
use moh_model::slice::{Slice, common};
use moh_step::TensorKind;

use super::manifest::{FORMAT, Manifest, PartFile};
use super::part::{RankPart, TensorEntry};
use super::read_error::ReadError;
use super::tensor_file::OpenFiles;
use super::{MANIFEST, MANIFEST_HASH, MAX_TEXT_BYTES};
use crate::Result;
use crate::run_directory::RunDirectory;

/// A checkpoint with a valid manifest.
#[derive(Debug)]
pub struct StoredCheckpoint {
    directory: PathBuf,
    manifest: Manifest,
    /// The parts of the manifest, read on first use.
    parts: Vec<OnceLock<RankPart>>,
    files: OpenFiles,
    /// The part that is searched first.
    nearest: usize,
}

/// Elements of a tensor: a range of a slice's elements.
#[derive(Debug, Clone)]
pub struct TensorRequest<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// The slice of the tensor.
    pub slice: &'a Slice,
    /// The elements within the slice, in row-major order.
    pub range: Range<usize>,
}

impl StoredCheckpoint {
    /// Opens the run's checkpoint after `step` steps. Its tensors are checked when they are read.
    pub fn of_step(run: &RunDirectory, step: u64) -> Result<Self> {
        Ok(Self::open(&run.checkpoint(step), step)?)
    }

    /// Opens the checkpoint in `directory` without checking its tensors.
    pub(super) fn open(directory: &Path, step: u64) -> Result<Self, ReadError> {
        let manifest = read_manifest(directory, step)?;
        let parts = manifest.parts.iter().map(|_| OnceLock::new()).collect();
        let directory = directory.to_owned();
        Ok(StoredCheckpoint { directory, manifest, parts, files: OpenFiles::default(), nearest: 0 })
    }

    /// Searches the part at `reader`'s relative position first. With the same layout, it is the reader's own part.
    pub fn read_by(mut self, reader: Shard) -> Self {
        self.nearest = reader.rank * self.parts.len() / reader.size;
        self
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the shape of a whole tensor.
    pub fn shape(&self, name: &str) -> Result<Vec<usize>> {
        for index in self.parts_with(name) {
            let part = self.part(index)?;
            if let Some(entry) = part.tensors.iter().find(|entry| entry.name == name) {
                return Ok(self.slice(entry)?.shape().to_vec());
            }
        }
        Err(moh_files::unusable(&self.path(), format!("contains no {name}")).into())
    }

    /// Rejects a configuration that has more weights than the files can contain.
    pub(crate) fn check_size(&self, config: &ModelConfig) -> Result<()> {
        let needed = config.num_parameters().saturating_mul(size_of::<f32>() as u64);
        let mut stored = 0u64;
        for entry in fs::read_dir(&self.directory).map_err(moh_files::io(&self.directory))? {
            let length = entry.and_then(|entry| entry.metadata()).map(|it| it.len());
            stored = stored.saturating_add(length.map_err(moh_files::io(&self.directory))?);
            if stored >= needed {
                return Ok(());
            }
        }
        let reason = format!(
            "the configuration asks for {needed} bytes of weights, and all files beside it have {stored}: the \
             checkpoint is damaged, name another one"
        );
        Err(moh_files::unusable(&self.path(), reason).into())
    }

    /// Reads a tensor as f32, from any number of shards.
    pub fn read_f32(&self, kind: TensorKind, name: &str, out: &mut [f32]) -> Result<()> {
        let shape = self.shape(name)?;
        let slice = Slice::whole(shape);
        if slice.len() != out.len() {
            let reason = format!(
                "{name} has the shape {:?}, expected {} elements",
                slice.shape(),
                out.len()
            );
            return Err(moh_files::unusable(&self.path(), reason).into());
        }
        let wanted = TensorRequest { name, slice: &slice, range: 0..out.len() };
        Ok(self.read(kind, &wanted, out)?)
    }

    /// Reads a weight in f32, rounded to the type `dtype` of an export.
    pub fn read_exported(&self, dtype: DType, name: &str, out: &mut [f32]) -> Result<()> {
        self.read_f32(TensorKind::Weight, name, out)?;
        dtype.round(out);
        Ok(())
    }

    /// Reads and checks every byte.
    pub fn verify(&self) -> Result<()> {
        Ok(self.check_share(Shard { rank: 0, size: 1 })?)
    }

    /// Checks a share of every part's tensors, as [`StoredCheckpoint::verify`] checks all tensors.
    pub(super) fn check_share(&self, share: Shard) -> Result<(), ReadError> {
        for index in 0..self.parts.len() {
            let part = self.part(index)?;
            for entry in part.tensors.iter().skip(share.rank).step_by(share.size) {
                for kind in TensorKind::ALL {
                    self.files.bytes(&self.directory, part, kind, entry)?;
                }
            }
        }
        Ok(())
    }

    /// Reads a part of a tensor as f32, from any number of shards.
    pub fn read_part(
        &self,
        kind: TensorKind,
        wanted: &TensorRequest<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        Ok(self.read(kind, wanted, out)?)
    }

    /// Reads elements of a tensor as f32 into `out`, which must have their number.
    pub(super) fn read(
        &self,
        kind: TensorKind,
        wanted: &TensorRequest<'_>,
        out: &mut [f32],
    ) -> Result<(), ReadError> {
        let TensorRequest { name, slice, ref range } = *wanted;
        let runs = slice.runs(range.clone());
        let mut found = 0;
        for index in self.parts_with(name) {
            if found == out.len() {
                break;
            }
            let part = self.part(index)?;
            for entry in part.tensors.iter().filter(|entry| entry.name == name) {
                let shard = self.slice(entry)?;
                if shard.shape() != slice.shape() {
                    let (theirs, ours) = (shard.shape(), slice.shape());
                    let reason = format!("{name} has the shape {theirs:?}, expected {ours:?}");
                    return Err(ReadError::unusable(&self.path(), reason));
                }
                let [start, end] = entry.range;
                let common = common(&runs, &shard.runs(start..end));
                if common.is_empty() {
                    continue;
                }
                let values = self.files.read(&self.directory, part, kind, entry)?;
                for elements in common {
                    let from = &values[elements.theirs - start..][..elements.len];
                    out[elements.ours - range.start..][..elements.len].copy_from_slice(from);
                    found += elements.len;
                }
            }
        }
        match found == out.len() {
            true => Ok(()),
            false => {
                let reason = match found {
                    0 => format!("contains no {name}"),
                    _ => format!("contains {found} of the {} elements of {name}", out.len()),
                };
                Err(ReadError::unusable(&self.path(), reason))
            }
        }
    }

    /// Returns the parts that have shards of a tensor, the nearest first.
    fn parts_with(&self, name: &str) -> impl Iterator<Item = usize> {
        let Manifest { tensors, parts, .. } = &self.manifest;
        let found = tensors.binary_search_by(|known| known.as_str().cmp(name)).ok();
        let has_it = move |part: &PartFile| found.is_some_and(|index| part.has_tensor(index));
        let all = (self.nearest..parts.len()).chain(0..self.nearest);
        all.filter(move |&index| has_it(&parts[index]))
    }

    /// Returns the slice of a shard's tensor. Fails if the shard's range does not lie in the slice.
    fn slice(&self, entry: &TensorEntry) -> Result<Slice, ReadError> {
        let slice = entry.stored_shape().and_then(|_| entry.slice_of_tensor());
        slice.ok_or_else(|| {
            let reason = format!("the shard of {} does not lie within the tensor", entry.name);
            ReadError::damaged(&self.path(), reason)
        })
    }

    /// Returns a part, read on first use.
    fn part(&self, index: usize) -> Result<&RankPart, ReadError> {
        let known = &self.parts[index];
        if let Some(part) = known.get() {
            return Ok(part);
        }
        let part = read_part(&self.directory, &self.manifest.parts[index])?;
        Ok(known.get_or_init(|| part))
    }

    fn path(&self) -> PathBuf {
        self.directory.join(MANIFEST)
    }
}

/// The format version of a manifest. Other fields are ignored.
#[derive(serde::Deserialize)]
struct Version {
    format: u32,
}

pub(super) fn read_manifest(directory: &Path, step: u64) -> Result<Manifest, ReadError> {
    let path = directory.join(MANIFEST);
    let text = read_text(&path)?;
    let hash_path = directory.join(MANIFEST_HASH);
    let hash = moh_files::read(&hash_path).map_err(ReadError::io(&hash_path))?;
    if hash != format!("{}  {MANIFEST}\n", blake3::hash(&text)).as_bytes() {
        let reason = format!("does not match the hash in {MANIFEST_HASH}: it is damaged");
        return Err(ReadError::damaged(&path, reason));
    }
    // The bytes are undamaged: another version of this program can read them.
    if let Ok(Version { format }) = serde_json::from_slice(&text)
        && format != FORMAT
    {
        let reason = format!("format {format}: this program reads format {FORMAT}");
        return Err(ReadError::unusable(&path, reason));
    }
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|error| ReadError::unusable(&path, format!("not a manifest: {error}")))?;
    if manifest.state.step != step {
        let reason = format!("is of step {}, not {step}", manifest.state.step);
        return Err(ReadError::damaged(&path, reason));
    }
    let files = manifest.parts.iter().map(|part| &part.file);
    check_names(&path, files)?;
    Ok(manifest)
}

fn read_part(directory: &Path, described: &PartFile) -> Result<RankPart, ReadError> {
    let path = directory.join(&described.file);
    let text = read_text(&path)?;
    if blake3::hash(&text).to_hex().as_str() != described.blake3 {
        let reason = format!("does not match its hash in {MANIFEST}: it is damaged");
        return Err(ReadError::damaged(&path, reason));
    }
    let part: RankPart = serde_json::from_slice(&text)
        .map_err(|error| ReadError::unusable(&path, format!("not a list of tensors: {error}")))?;
    check_names(&path, part.files.iter().map(|file| &file.file))?;
    Ok(part)
}

fn read_text(path: &Path) -> Result<Vec<u8>, ReadError> {
    let length = fs::metadata(path).map_err(ReadError::io(path))?.len();
    if length > MAX_TEXT_BYTES {
        let reason = format!("{length} bytes: a manifest has at most {MAX_TEXT_BYTES}");
        return Err(ReadError::unusable(path, reason));
    }
    moh_files::read(path).map_err(ReadError::io(path))
}

/// Rejects names that contain a directory and could point outside the checkpoint.
fn check_names<'a>(path: &Path, names: impl Iterator<Item = &'a String>) -> Result<(), ReadError> {
    for name in names {
        if Path::new(name).file_name() != Some(name.as_ref()) {
            let reason = format!("{name:?} is not the name of a file");
            return Err(ReadError::damaged(path, reason));
        }
    }
    Ok(())
}
