//! The export of a finished run: the model in Hugging Face layout.

use std::path::{Path, PathBuf};

use moh_checkpoint::{RunDirectory, RunState, StoredCheckpoint};
use moh_hf::check_destination;
use moh_hf::model_directory::{Contents, DEFAULT_SHARD_BYTES, Sink, TensorSpec, write_model};
use moh_kernels::Backend;
use moh_model::{Model, ModelLayout};
use moh_recipe::Recipe;
use moh_step::TensorKind;

use crate::{Error, ModelSource, Result, model_card};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exported {
    Complete,
    /// The run was asked to stop. Nothing is written.
    Stopped,
}

/// The reason that an export ended early.
enum Ended {
    Stopped,
    Failed(Error),
}

impl<E: Into<Error>> From<E> for Ended {
    fn from(error: E) -> Self {
        Ended::Failed(error.into())
    }
}

/// Writes the model to the run's `export/`, in its training dtype. Adds the source model's tokenizer and generation
/// files, and a card of the training. Replaces an older export once the new one is complete. Tensors of other ranks are
/// read from the last checkpoint. Calls `go_on` before each tensor.
pub(crate) fn write<B: Backend>(
    run: &RunDirectory,
    source: &ModelSource,
    recipe: &Recipe,
    model: &Model<B>,
    state: &RunState,
    go_on: &mut dyn FnMut() -> Result<bool>,
) -> Result<Exported> {
    let (dtype, step) = (recipe.run.dtype.dtype(), state.step);
    let config = source.fields(recipe, state, model.config(), Some(dtype));
    let stored = match model.is_whole() {
        true => None,
        false => Some(run.stored(step)?),
    };
    let tensors: Vec<TensorSpec> = (ModelLayout::new(model.config()).segments())
        .map(|(_, segment)| TensorSpec {
            name: segment.name.clone(),
            shape: segment.shape().to_vec(),
            dtype,
        })
        .collect();
    let mut companions = source.companions()?;
    let card = model.config().moh.is_some().then(|| {
        let card = model_card::trained(&source.card, recipe, state);
        companions.extend_from_slice(&card.terms);
        card.text(model.config())
    });
    let described = Contents {
        config: &config,
        tensors: &tensors,
        max_shard_bytes: DEFAULT_SHARD_BYTES,
        companions: &companions,
        card: card.as_deref(),
    };
    let mut fill = |spec: &TensorSpec, sink: &mut Sink<'_, Ended>| {
        if !go_on()? {
            return Err(Ended::Stopped);
        }
        let values = match &stored {
            Some(stored) => stored_values(stored, &run.checkpoint(step), spec)?,
            None => own_values(model, spec)?,
        };
        let mut bytes = vec![0; values.len() * dtype.bytes()];
        dtype.write(&values, &mut bytes);
        sink(&bytes)
    };
    match write_model(&run.export(), true, &described, &mut fill) {
        Ok(_) => Ok(Exported::Complete),
        Err(Ended::Stopped) => Ok(Exported::Stopped),
        Err(Ended::Failed(error)) => Err(error),
    }
}

/// Renames an export that has other files than a model directory's, which the next export may not replace. Returns the
/// new path.
pub(crate) fn keep_foreign(run: &RunDirectory, step: u64) -> Result<Option<PathBuf>> {
    let place = run.export();
    if check_destination(&place, true).is_ok() {
        return Ok(None);
    }
    let aside = run.export_aside(step);
    std::fs::rename(&place, &aside).map_err(moh_files::io(&aside))?;
    moh_files::sync_directory(run.root()).map_err(moh_files::io(run.root()))?;
    Ok(Some(aside))
}

/// Returns the elements of a tensor of the checkpoint at `path`.
fn stored_values(stored: &StoredCheckpoint, path: &Path, spec: &TensorSpec) -> Result<Vec<f32>> {
    let mut values = vec![0f32; spec.shape.iter().product()];
    let read = stored.read_f32(TensorKind::Weight, &spec.name, &mut values);
    read.map_err(|error| Error::from(moh_files::unusable(path, error.to_string())))?;
    Ok(values)
}

/// Returns the elements of a tensor of a whole model; an empty list for a tensor that the model does not have.
fn own_values<B: Backend>(model: &Model<B>, spec: &TensorSpec) -> Result<Vec<f32>> {
    let mut segments = model.layout().segments();
    match segments.find(|(_, segment)| segment.name == spec.name) {
        Some((flat, segment)) => Ok(model.weights().read(model.backend(), flat, segment)?),
        None => Ok(Vec::new()),
    }
}
