//! Writing a checkpoint: to a temporary name, synced, then renamed.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use moh_comm::Group;
use moh_files::{PendingDirectory, TEMPORARY, write_synced};
use moh_hf::weight_files::header_type;
use moh_kernels::{Backend, DType, Element};
use moh_model::Model;
use moh_model::layout::{ModelLayout, Segment};
use moh_model::parameters::{FlatBuffers, Shard, overlap};
use safetensors::tensor::View;
use serde_json::{Map, Value};

use super::manifest::{FORMAT, Manifest, RunState, TensorEntry, TensorKind};
use super::{MANIFEST, MANIFEST_HASH};
use crate::optimizer::OptimizerState;
use crate::recipe::Checkpoint;
use crate::{Error, Ranks, RunDirectory};

/// Writes the checkpoint of `state`, each rank's shard into its own files, and returns its
/// directory.
///
/// # Errors
/// Fails if a file cannot be written, on any rank; no partial checkpoint is left under a
/// checkpoint's name.
pub fn write<B: Backend, T: Element, M: Element>(
    run: &RunDirectory,
    ranks: &mut Ranks<B>,
    state: &RunState,
    config: Map<String, Value>,
    model: &Model<B, T>,
    optimizer: &OptimizerState<B, M>,
) -> Result<PathBuf, Error> {
    let place = run.checkpoint(state.step);
    // All ranks write into the directory that the first one creates and, after an error, removes.
    let folder = PendingDirectory::shared_path(&place);
    let mut pending = None;
    ranks.first_does(|| {
        pending = Some(PendingDirectory::create_shared(&place).map_err(Error::io(&folder))?);
        Ok(())
    })?;
    let written = write_shards(&folder, ranks.group(), model, optimizer);
    let entries = ranks.agree(written)?;
    // A list of plain structs always serialises.
    let text = serde_json::to_vec(&entries)
        .map_err(|error| Error::io(&folder)(std::io::Error::from(error)))?;
    let texts = ranks.gather(text)?;
    ranks.first_does(|| {
        write_manifest(&folder, &manifest(&folder, state, config, &texts)?)?;
        match pending.take() {
            Some(pending) => pending.publish().map_err(Error::io(&place)),
            None => Ok(()),
        }
    })?;
    Ok(place)
}

/// Writes this rank's shard; returns its manifest entries.
fn write_shards<B: Backend, T: Element, M: Element>(
    folder: &Path,
    group: &Group,
    model: &Model<B, T>,
    optimizer: &OptimizerState<B, M>,
) -> Result<Vec<TensorEntry>, Error> {
    let mut entries = Vec::new();
    for kind in TensorKind::ALL {
        let file = ShardFile {
            folder,
            name: kind.file(group.rank(), group.size()),
            kind,
            shard: optimizer.shard(),
        };
        let (backend, layout) = (model.backend(), model.layout());
        let moments = |buffers: &FlatBuffers<B, M>| {
            let read = |flat, range| Ok(buffers.read_range(backend, flat, range)?);
            file.write(layout, M::DTYPE, &read)
        };
        entries.extend(match kind {
            TensorKind::Weight => file.write(layout, DType::F32, &|flat, range| {
                optimizer.exact_weights(model, flat, range)
            }),
            TensorKind::FirstMoment => moments(&optimizer.first_moment),
            TensorKind::SecondMoment => moments(&optimizer.second_moment),
        }?);
    }
    Ok(entries)
}

/// The most bytes of the host that [`write`] holds of a tensor at a time, on one of `ranks` ranks that
/// share the optimiser's state.
pub(crate) fn staging_bytes(layout: &ModelLayout, ranks: usize) -> u64 {
    // The elements in f32, and in the type of the device or the file, which is no wider.
    const BYTES: u64 = 4 + 4;
    let parts = layout.flats.iter().flat_map(|flat| {
        let shard = flat.len / ranks.max(1);
        let counted = flat.segments.iter().filter(|segment| segment.counted);
        counted.map(move |segment| segment.range.len().min(shard))
    });
    (parts.max().unwrap_or(0) as u64).saturating_mul(BYTES)
}

/// The manifest of all ranks' entries.
fn manifest(
    folder: &Path,
    state: &RunState,
    config: Map<String, Value>,
    texts: &[Vec<u8>],
) -> Result<Manifest, Error> {
    let mut tensors = Vec::new();
    for text in texts {
        let entries: Vec<TensorEntry> = serde_json::from_slice(text)
            .map_err(|error| Error::io(folder)(std::io::Error::from(error)))?;
        tensors.extend(entries);
    }
    Ok(Manifest { format: FORMAT, state: state.clone(), config, tensors })
}

/// Removes the checkpoints that `retention` does not keep, and leftovers of earlier processes.
///
/// # Errors
/// Fails if a directory cannot be removed.
pub fn prune(run: &RunDirectory, retention: &Checkpoint) -> Result<(), Error> {
    let all = run.checkpoints();
    let steps = run.checkpoint_steps()?;
    let newest =
        steps.len().saturating_sub(usize::try_from(retention.keep.max(1)).unwrap_or(usize::MAX));
    for &step in &steps[..newest] {
        if retention.keep_every > 0 && step.is_multiple_of(retention.keep_every) {
            continue;
        }
        // Renamed first, so that a partially removed checkpoint never looks complete.
        let doomed = all.join(format!("{TEMPORARY}removed-step-{step}"));
        fs::rename(run.checkpoint(step), &doomed).map_err(Error::io(&doomed))?;
    }
    for entry in fs::read_dir(&all).map_err(Error::io(&all))? {
        let path = entry.map_err(Error::io(&all))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(TEMPORARY) {
            fs::remove_dir_all(&path).map_err(Error::io(&path))?;
        }
    }
    Ok(())
}

/// Reads a range of a flat buffer from the device.
type Read<'a> = dyn Fn(usize, Range<usize>) -> Result<Vec<f32>, Error> + 'a;

/// A shard of a tensor on the device, read and hashed when the writer requests its bytes.
struct DeviceTensor<'a> {
    read: &'a Read<'a>,
    flat: usize,
    range: Range<usize>,
    name: &'a str,
    shape: Vec<usize>,
    dtype: DType,
    hash: &'a RefCell<HashMap<String, Result<blake3::Hash, Error>>>,
}

impl View for DeviceTensor<'_> {
    fn dtype(&self) -> safetensors::Dtype {
        header_type(self.dtype)
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let (bytes, hash) = match (self.read)(self.flat, self.range.clone()) {
            Ok(values) => {
                let mut bytes = vec![0; self.data_len()];
                self.dtype.write(&values, &mut bytes);
                let hash = blake3::hash(&bytes);
                (bytes, Ok(hash))
            }
            // The writer cannot be stopped here; the error is found among the hashes.
            Err(error) => (vec![0; self.data_len()], Err(error)),
        };
        self.hash.borrow_mut().insert(self.name.to_owned(), hash);
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.range.len() * self.dtype.bytes()
    }
}

/// A file of one rank's shards of all tensors of one kind.
struct ShardFile<'a> {
    folder: &'a Path,
    name: String,
    kind: TensorKind,
    shard: Shard,
}

impl ShardFile<'_> {
    fn write(
        &self,
        layout: &ModelLayout,
        dtype: DType,
        read: &Read<'_>,
    ) -> Result<Vec<TensorEntry>, Error> {
        let path = &self.folder.join(&self.name);
        let shards: Vec<_> = (layout.segments())
            // A tensor that several ranks replicate is written by the rank where it counts.
            .filter(|(_, segment)| segment.counted)
            .filter_map(|(flat, segment)| self.shard(layout, flat, segment, dtype))
            .collect();
        let hash = RefCell::new(HashMap::new());
        let tensors = shards.iter().map(|(flat, range, entry)| {
            let tensor = DeviceTensor {
                read,
                flat: *flat,
                range: range.clone(),
                name: &entry.name,
                // The range lies within the slice, as the layout ensures.
                shape: entry.stored_shape().unwrap_or_default(),
                dtype,
                hash: &hash,
            };
            (entry.name.as_str(), tensor)
        });
        safetensors::serialize_to_file(tensors, None, path)
            .map_err(|error| Error::io(path)(std::io::Error::other(error)))?;
        File::open(path).and_then(|file| file.sync_all()).map_err(Error::io(path))?;
        let mut hashes = hash.into_inner();
        let with_hash = |(_, _, mut entry): (usize, Range<usize>, TensorEntry)| {
            if let Some(hash) = hashes.remove(&entry.name) {
                entry.blake3 = hash?.to_hex().to_string();
            }
            Ok(entry)
        };
        shards.into_iter().map(with_hash).collect()
    }

    /// The tensor's elements in the shard, with an entry that lacks only the hash.
    fn shard(
        &self,
        layout: &ModelLayout,
        flat: usize,
        segment: &Segment,
        dtype: DType,
    ) -> Option<(usize, Range<usize>, TensorEntry)> {
        let range = overlap(&segment.range, &self.shard.range(layout.flats[flat].len));
        let start = segment.range.start;
        let entry = TensorEntry {
            name: segment.name.clone(),
            kind: self.kind,
            file: self.name.clone(),
            dtype: format!("{dtype:?}"),
            shape: segment.shape().to_vec(),
            slice: segment.slice.indices().iter().map(|ranges| bounds(ranges)).collect(),
            range: [range.start.saturating_sub(start), range.end.saturating_sub(start)],
            blake3: String::new(),
        };
        (!range.is_empty()).then_some((flat, range, entry))
    }
}

/// Start and end of each range.
fn bounds(ranges: &[Range<usize>]) -> Vec<[usize; 2]> {
    ranges.iter().map(|range| [range.start, range.end]).collect()
}

fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<(), Error> {
    let path = folder.join(MANIFEST);
    let text = serde_json::to_vec_pretty(manifest)
        .map_err(|error| Error::io(&path)(std::io::Error::from(error)))?;
    let hash = format!("{}  {MANIFEST}\n", blake3::hash(&text));
    write_synced(&path, &text).map_err(Error::io(&path))?;
    let path = folder.join(MANIFEST_HASH);
    write_synced(&path, hash.as_bytes()).map_err(Error::io(&path))
}
