//! Writes a checkpoint: to a temporary name, synced, then renamed. The functions run on a background
//! thread of each rank and use no collectives.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fs, thread};

use moh_files::{PendingDirectory, write_synced};
use moh_kernels::{Element as _, for_element};
use moh_step::TensorKind;
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Map, Value};

use super::manifest::{Manifest, RunState, tensor_file};
use super::part::{RankPart, TensorEntry, TensorFile};
use super::snapshot::{ShardTensor, Snapshot};
use super::{MANIFEST, MANIFEST_HASH, MAX_TEXT_BYTES, shard_file};
use crate::run_directory::RunDirectory;
use crate::{Error, Result};

/// Maximum threads of a rank that convert and hash a checkpoint's bytes.
const MAX_THREADS: usize = 4;

/// Creates the directory in which all ranks write the checkpoint of `step`, and removes the files of an
/// earlier attempt. Dropping the result removes the directory, unless [`publish`] has renamed it.
pub fn begin(run: &RunDirectory, step: u64) -> Result<PendingDirectory> {
    let all = run.checkpoints();
    moh_files::create_directory(&all).map_err(moh_files::io(&all))?;
    Ok(PendingDirectory::create_shared(&run.checkpoint(step))
        .map_err(moh_files::io(&folder(run, step)))?)
}

/// Returns the directory of an incomplete checkpoint.
fn folder(run: &RunDirectory, step: u64) -> PathBuf {
    PendingDirectory::shared_path(&run.checkpoint(step))
}

/// A part's file, its blake3, and the names of its tensors.
type WrittenPart = (String, String, Vec<String>);

/// Writes the files of rank `rank` of `size`, and the list of its tensors, into the directory that
/// [`begin`] has created. Returns the description of the part for [`publish`].
pub fn write_part(
    run: &RunDirectory,
    step: u64,
    rank: usize,
    size: usize,
    snapshot: &Snapshot,
) -> Result<Vec<u8>> {
    let folder = folder(run, step);
    let threads = thread::available_parallelism().map_or(1, |count| count.get().min(MAX_THREADS));
    // Its threads have the low priority of the thread that starts them.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| moh_files::io(&folder)(std::io::Error::other(error)))?;
    pool.install(|| check_finite(&folder, snapshot))?;
    let mut tensors: Vec<TensorEntry> = snapshot.shard.tensors.iter().map(entry).collect();
    let mut files = TensorKind::ALL
        .map(|kind| TensorFile { file: tensor_file(kind, rank, size), dtype: String::new() });
    for (kind, file) in TensorKind::ALL.into_iter().zip(&mut files) {
        let path = folder.join(&file.file);
        let written = pool.install(|| shard_file::write(&path, snapshot, kind));
        let written = written.map_err(moh_files::io(&path))?;
        for (entry, hash) in tensors.iter_mut().zip(&written.hashes) {
            entry.blake3[kind as usize] = hash.to_hex().to_string();
        }
        file.dtype = format!("{:?}", written.dtype);
    }
    let names = tensors.iter().map(|entry| entry.name.clone()).collect();
    let file = RankPart::file_name(rank, size);
    let hash = write_text(&folder.join(&file), &RankPart { files, tensors })?;
    let written: WrittenPart = (file, hash.to_hex().to_string(), names);
    // Plain text always serialises.
    Ok(serde_json::to_vec(&written).map_err(|error| moh_files::io(&folder)(error.into()))?)
}

/// Rejects weights that are not finite, of a run that has diverged.
fn check_finite(folder: &Path, snapshot: &Snapshot) -> Result<(), Error> {
    for tensor in &snapshot.shard.tensors {
        let weights = snapshot.weights.view(tensor.host.clone());
        let is_finite = for_element!(T: weights.element() => {
            weights.typed::<T>().par_iter().all(|weight| weight.to_f32().is_finite())
        });
        if !is_finite {
            let reason = format!("{} has values that are not finite", tensor.segment.name);
            return Err(moh_files::unusable(folder, reason).into());
        }
    }
    Ok(())
}

/// Returns the entry of a tensor, without the hashes.
fn entry(tensor: &ShardTensor) -> TensorEntry {
    let segment = &tensor.segment;
    let bounds =
        |ranges: &Vec<Range<usize>>| ranges.iter().map(|range| [range.start, range.end]).collect();
    TensorEntry {
        name: segment.name.clone(),
        shape: segment.shape().to_vec(),
        slice: match segment.slice.is_whole() {
            true => Vec::new(),
            false => segment.slice.indices().iter().map(bounds).collect(),
        },
        range: tensor.range,
        blake3: Default::default(),
    }
}

/// Writes the manifest of the parts of all ranks, and renames the directory.
pub fn publish(
    run: &RunDirectory,
    pending: PendingDirectory,
    state: RunState,
    config: Map<String, Value>,
    parts: &[Vec<u8>],
) -> Result<()> {
    let folder = folder(run, state.step);
    let place = run.checkpoint(state.step);
    let mut written: Vec<WrittenPart> = Vec::new();
    for part in parts {
        let part = serde_json::from_slice(part);
        written.push(part.map_err(|error| moh_files::io(&folder)(error.into()))?);
    }
    for (file, _, _) in &written {
        // If the directory is not shared, it contains only the first rank's files.
        let path = folder.join(file);
        fs::metadata(&path).map_err(moh_files::io(&path))?;
    }
    let hash = write_text(&folder.join(MANIFEST), &Manifest::new(state, config, written))?;
    let (path, line) = (folder.join(MANIFEST_HASH), format!("{hash}  {MANIFEST}\n"));
    write_synced(&path, line.as_bytes()).map_err(moh_files::io(&path))?;
    Ok(pending.publish().map_err(moh_files::io(&place))?)
}

/// Writes a value as JSON within the readers' size limit. Returns the hash of the text.
fn write_text(path: &Path, value: &impl Serialize) -> Result<blake3::Hash> {
    let io = moh_files::io(path);
    let text = serde_json::to_vec(value).map_err(|error| io(error.into()))?;
    if text.len() as u64 > MAX_TEXT_BYTES {
        let reason = format!("{} bytes, but a manifest has at most {MAX_TEXT_BYTES}", text.len());
        return Err(Error::from(moh_files::unusable(path, reason)));
    }
    write_synced(path, &text).map_err(io)?;
    Ok(blake3::hash(&text))
}

#[cfg(test)]
mod tests {
    use moh_hf::ConfigFile;
    use moh_model::layout::ModelLayout;
    use moh_model::model_parallel::ModelPart;
    use moh_model::parameters::Shard;

    use super::super::snapshot::ShardTensors;
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
            let shards = ShardTensors::new(&layout, Shard { rank, size }).tensors;
            let hashed = shards.iter().map(|tensor| {
                let hash = || "0".repeat(64);
                TensorEntry { blake3: [hash(), hash(), hash()], ..entry(tensor) }
            });
            let tensors: Vec<TensorEntry> = hashed.collect();
            longest = longest.max(serde_json::to_vec(&tensors).unwrap().len());
            let names = tensors.into_iter().map(|entry| entry.name).collect();
            (RankPart::file_name(rank, size), "0".repeat(64), names)
        });
        let manifest = Manifest::new(RunState::default(), Map::new(), parts.collect());
        let whole = serde_json::to_vec(&manifest).unwrap().len();
        assert!(whole < 2_000_000 && longest < 50_000, "{whole} and {longest} bytes");
        assert_eq!(manifest.tensors.len(), 291);
    }
}
