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
use serde::Serialize;
use serde_json::{Map, Value};

use super::manifest::{Manifest, RunState, TensorKind};
use super::part::{Part, TensorEntry, TensorFile};
use super::{MANIFEST, MANIFEST_HASH, MAX_TEXT_BYTES};
use crate::optimizer::OptimizerState;
use crate::recipe::Checkpoint;
use crate::run_directory::REWOUND;
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
    let written = write_part(&folder, ranks.group(), model, optimizer);
    let part = ranks.agree(written)?;
    // Plain text always serialises.
    let text = serde_json::to_vec(&part)
        .map_err(|error| Error::io(&folder)(std::io::Error::from(error)))?;
    let texts = ranks.gather(text)?;
    ranks.first_does(|| {
        let mut parts = Vec::new();
        for text in &texts {
            let part = serde_json::from_slice(text);
            parts.push(part.map_err(|error| Error::io(&folder)(std::io::Error::from(error)))?);
        }
        write_manifest(&folder, &Manifest::new(state.clone(), config, parts))?;
        match pending.take() {
            Some(pending) => pending.publish().map_err(Error::io(&place)),
            None => Ok(()),
        }
    })?;
    Ok(place)
}

/// A part's file, its blake3, and the names of its tensors.
type WrittenPart = (String, String, Vec<String>);

/// Writes this rank's shards of the tensors, and the list of them.
fn write_part<B: Backend, T: Element, M: Element>(
    folder: &Path,
    group: &Group,
    model: &Model<B, T>,
    optimizer: &OptimizerState<B, M>,
) -> Result<WrittenPart, Error> {
    let (rank, size) = (group.rank(), group.size());
    let (backend, layout) = (model.backend(), model.layout());
    let mut shards: Vec<TensorShard> = (layout.segments())
        // A tensor that several ranks replicate is written by the rank where it counts.
        .filter(|(_, segment)| segment.counted)
        .filter_map(|(flat, segment)| share(layout, flat, segment, optimizer.shard()))
        .collect();
    let files = TensorKind::ALL.map(|kind| {
        let dtype = if kind == TensorKind::Weight { DType::F32 } else { M::DTYPE };
        TensorFile { file: kind.file(rank, size), dtype: format!("{dtype:?}") }
    });
    for kind in TensorKind::ALL {
        let file = ShardFile { path: folder.join(kind.file(rank, size)), kind };
        let moments = |buffers: &FlatBuffers<B, M>, shards: &mut [TensorShard]| {
            let read = |flat, range| Ok(buffers.read_range(backend, flat, range)?);
            file.write(shards, M::DTYPE, &read)
        };
        match kind {
            TensorKind::Weight => file.write(&mut shards, DType::F32, &|flat, range| {
                optimizer.exact_weights(model, flat, range)
            }),
            TensorKind::FirstMoment => moments(&optimizer.first_moment, &mut shards),
            TensorKind::SecondMoment => moments(&optimizer.second_moment, &mut shards),
        }?;
    }
    let tensors: Vec<TensorEntry> = shards.into_iter().map(|share| share.entry).collect();
    let names = tensors.iter().map(|entry| entry.name.clone()).collect();
    let file = Part::file_name(rank, size);
    let hash = write_text(&folder.join(&file), &Part { files, tensors })?;
    Ok((file, hash.to_hex().to_string(), names))
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

/// Removes the checkpoints that `retention` does not keep, those that a rewind has left, and leftovers of
/// earlier processes.
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
        if name.starts_with(TEMPORARY) || name.starts_with(REWOUND) {
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

/// A rank's elements of a tensor: a range of a flat buffer, and its entry, which lacks the hashes.
struct TensorShard {
    flat: usize,
    range: Range<usize>,
    entry: TensorEntry,
}

/// The elements of a tensor in a rank's shard; `None` if there are none.
fn share(
    layout: &ModelLayout,
    flat: usize,
    segment: &Segment,
    shard: Shard,
) -> Option<TensorShard> {
    let range = overlap(&segment.range, &shard.range(layout.flats[flat].len));
    let start = segment.range.start;
    let indices = segment.slice.indices();
    let entry = TensorEntry {
        name: segment.name.clone(),
        shape: segment.shape().to_vec(),
        slice: match segment.slice.is_whole() {
            true => Vec::new(),
            false => indices.iter().map(|ranges| bounds(ranges)).collect(),
        },
        range: [range.start.saturating_sub(start), range.end.saturating_sub(start)],
        blake3: Default::default(),
    };
    (!range.is_empty()).then_some(TensorShard { flat, range, entry })
}

/// A file of one rank's shards of all tensors of one kind.
struct ShardFile {
    path: PathBuf,
    kind: TensorKind,
}

impl ShardFile {
    /// Writes the shards and enters their hashes.
    fn write(
        &self,
        shards: &mut [TensorShard],
        dtype: DType,
        read: &Read<'_>,
    ) -> Result<(), Error> {
        let path = &self.path;
        let hash = RefCell::new(HashMap::new());
        let tensors = shards.iter().map(|TensorShard { flat, range, entry }| {
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
        for TensorShard { entry, .. } in shards {
            if let Some(hash) = hashes.remove(&entry.name) {
                entry.blake3[self.kind as usize] = hash?.to_hex().to_string();
            }
        }
        Ok(())
    }
}

/// Start and end of each range.
fn bounds(ranges: &[Range<usize>]) -> Vec<[usize; 2]> {
    ranges.iter().map(|range| [range.start, range.end]).collect()
}

fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<(), Error> {
    let hash = write_text(&folder.join(MANIFEST), manifest)?;
    let path = folder.join(MANIFEST_HASH);
    write_synced(&path, format!("{hash}  {MANIFEST}\n").as_bytes()).map_err(Error::io(&path))
}

/// Writes a value as JSON that a reader takes; returns the hash of the text.
fn write_text(path: &Path, value: &impl Serialize) -> Result<blake3::Hash, Error> {
    let io = Error::io(path);
    let text = match serde_json::to_vec(value) {
        Ok(text) => text,
        Err(error) => return Err(io(error.into())),
    };
    if text.len() as u64 > MAX_TEXT_BYTES {
        let reason = format!("{} bytes, but a manifest has at most {MAX_TEXT_BYTES}", text.len());
        return Err(Error::Checkpoint { path: path.to_owned(), reason });
    }
    write_synced(path, &text).map_err(io)?;
    Ok(blake3::hash(&text))
}

#[cfg(test)]
mod tests {
    use moh_hf::ConfigFile;
    use moh_model::model_parallel::Part as ModelPart;

    use super::*;

    #[test]
    fn the_manifest_of_many_ranks_is_small() {
        // Meta-Llama-3-8B on 1,536 data ranks.
        let fields = serde_json::json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
            "max_position_embeddings": 8192,
        });
        let config = ConfigFile::from_value(fields, Path::new("config.json")).unwrap().config;
        let size = 1536;
        let layout = ModelLayout::of_part(&config, size, &ModelPart::whole(&config));
        let mut longest = 0;
        let parts = (0..size).map(|rank| {
            let shares = layout.segments().filter_map(|(flat, segment)| {
                let hash = || "0".repeat(64);
                let mut entry = share(&layout, flat, segment, Shard { rank, size })?.entry;
                entry.blake3 = [hash(), hash(), hash()];
                Some(entry)
            });
            let tensors: Vec<TensorEntry> = shares.collect();
            longest = longest.max(serde_json::to_vec(&tensors).unwrap().len());
            let names = tensors.into_iter().map(|entry| entry.name).collect();
            (Part::file_name(rank, size), "0".repeat(64), names)
        });
        let manifest = Manifest::new(RunState::default(), Map::new(), parts.collect());
        let whole = serde_json::to_vec(&manifest).unwrap().len();
        assert!(whole < 2_000_000 && longest < 50_000, "{whole} and {longest} bytes");
        assert_eq!(manifest.tensors.len(), 291);
    }
}
