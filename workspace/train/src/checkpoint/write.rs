//! Writing a checkpoint: beside its place, synced, renamed.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use half::bf16;
use moh_kernels::{Backend, DType, Element};
use moh_model::Model;
use moh_model::layout::Segment;
use moh_model::parameters::FlatBuffers;
use safetensors::tensor::{Dtype, View};
use serde_json::{Map, Value};

use super::manifest::{FORMAT, Manifest, RunState, TensorEntry, TensorKind};
use super::{MANIFEST, MANIFEST_HASH};
use crate::optimizer::OptimizerState;
use crate::recipe::Checkpoint;
use crate::{Error, RunDirectory};

/// Prefix of what is not complete yet, or not any more.
pub(super) const TEMPORARY: &str = ".tmp-";

/// Writes the checkpoint of `state` and returns its directory.
///
/// # Errors
/// When a file cannot be written; nothing half-written stays under a checkpoint's name.
pub fn write<B: Backend, T: Element, M: Element>(
    run: &RunDirectory,
    state: &RunState,
    config: Map<String, Value>,
    model: &Model<B, T>,
    optimizer: &OptimizerState<B, M>,
) -> Result<PathBuf, Error> {
    let all = run.checkpoints();
    fs::create_dir_all(&all).map_err(Error::io(&all))?;
    let folder = tempfile::Builder::new()
        .prefix(&format!("{TEMPORARY}step-{}-", state.step))
        .tempdir_in(&all)
        .map_err(Error::io(&all))?;
    let mut tensors = Vec::new();
    for kind in TensorKind::ALL {
        let file = folder.path().join(kind.file());
        tensors.extend(match (kind, &optimizer.master) {
            (TensorKind::Weight, None) => write_file(kind, &file, model, model.weights()),
            (TensorKind::Weight, Some(master)) => write_file(kind, &file, model, master),
            (TensorKind::FirstMoment, _) => write_file(kind, &file, model, &optimizer.first_moment),
            (TensorKind::SecondMoment, _) => {
                write_file(kind, &file, model, &optimizer.second_moment)
            }
        }?);
    }
    let manifest = Manifest { format: FORMAT, state: state.clone(), config, tensors };
    write_manifest(folder.path(), &manifest)?;
    sync(folder.path())?;
    let place = run.checkpoint(state.step);
    // A temporary directory is private; a checkpoint need not be.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))
            .map_err(Error::io(folder.path()))?;
    }
    fs::rename(folder.path(), &place).map_err(Error::io(&place))?;
    let _renamed = folder.keep();
    sync(&all)?;
    Ok(place)
}

/// Removes the checkpoints that `kept` does not keep, and what earlier processes left unfinished.
///
/// # Errors
/// When a directory cannot be removed.
pub fn prune(run: &RunDirectory, kept: &Checkpoint) -> Result<(), Error> {
    let all = run.checkpoints();
    let steps = run.checkpoint_steps()?;
    let newest =
        steps.len().saturating_sub(usize::try_from(kept.keep.max(1)).unwrap_or(usize::MAX));
    for &step in &steps[..newest] {
        if kept.keep_every > 0 && step.is_multiple_of(kept.keep_every) {
            continue;
        }
        // Renamed first, so that a half-removed checkpoint is never taken for a whole one.
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

/// A tensor on the device, read when the writer asks for its bytes and hashed on the way.
struct DeviceTensor<'a, B: Backend, S: Element> {
    backend: &'a B,
    buffers: &'a FlatBuffers<B, S>,
    flat: usize,
    segment: &'a Segment,
    dtype: Dtype,
    hash: &'a RefCell<Vec<(String, Result<blake3::Hash, Error>)>>,
}

impl<B: Backend, S: Element> View for DeviceTensor<'_, B, S> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.segment.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = self.buffers.read(self.backend, self.flat, self.segment);
        let (bytes, hash) = match values {
            Ok(values) => {
                let bytes = to_bytes(self.dtype, &values);
                let hash = blake3::hash(&bytes);
                (bytes, Ok(hash))
            }
            // The writer cannot be stopped from here; the error is found among the hashes.
            Err(error) => (vec![0; self.data_len()], Err(Error::from(error))),
        };
        self.hash.borrow_mut().push((self.segment.name.clone(), hash));
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.segment.range.len() * self.dtype.bitsize() / 8
    }
}

fn to_bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// Writes all tensors of one kind; returns their entries.
fn write_file<B: Backend, T: Element, S: Element>(
    kind: TensorKind,
    path: &Path,
    model: &Model<B, T>,
    buffers: &FlatBuffers<B, S>,
) -> Result<Vec<TensorEntry>, Error> {
    let dtype = if S::DTYPE == DType::BF16 { Dtype::BF16 } else { Dtype::F32 };
    let hash = RefCell::new(Vec::new());
    let tensors = model.layout().segments().map(|(flat, segment)| {
        let backend = model.backend();
        let tensor = DeviceTensor { backend, buffers, flat, segment, dtype, hash: &hash };
        (segment.name.as_str(), tensor)
    });
    safetensors::serialize_to_file(tensors, None, path)
        .map_err(|error| Error::io(path)(std::io::Error::other(error)))?;
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io(path))?;
    let mut hashes = std::collections::HashMap::new();
    for (name, hash) in hash.into_inner() {
        hashes.insert(name, hash?);
    }
    let entry = |(_, segment): (usize, &Segment)| TensorEntry {
        name: segment.name.clone(),
        kind,
        file: kind.file().to_owned(),
        dtype: format!("{dtype:?}"),
        shape: segment.shape.clone(),
        slice: segment.shape.iter().map(|&end| [0, end]).collect(),
        blake3: hashes.get(&segment.name).map(|hash| hash.to_hex().to_string()).unwrap_or_default(),
    };
    Ok(model.layout().segments().map(entry).collect())
}

fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<(), Error> {
    let path = folder.join(MANIFEST);
    let text = serde_json::to_vec_pretty(manifest)
        .map_err(|error| Error::io(&path)(std::io::Error::from(error)))?;
    let hash = format!("{}  {MANIFEST}\n", blake3::hash(&text));
    write_synced(&path, &text)?;
    write_synced(&folder.join(MANIFEST_HASH), hash.as_bytes())
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    File::create(path)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .map_err(Error::io(path))
}

/// Puts a directory's entries on the disk; only Unix can.
pub(super) fn sync(directory: &Path) -> Result<(), Error> {
    #[cfg(unix)]
    File::open(directory).and_then(|file| file.sync_all()).map_err(Error::io(directory))?;
    Ok(())
}
