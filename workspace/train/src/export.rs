//! The export of a finished run: the model in Hugging Face layout.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use moh_checkpoint::{RunState, StoredCheckpoint};
use moh_hf::PendingModel;
use moh_hf::model_directory::{self, Contents, DEFAULT_SHARD_BYTES, Sink, TensorSpec};
use moh_kernels::{Backend, Element};
use moh_model::Model;
use moh_model::layout::ModelLayout;
use moh_recipe::Recipe;
use moh_run_directory::RunDirectory;
use moh_run_directory::export_record::{self, ExportRecord};
use moh_step::TensorKind;

use crate::source::ModelSource;
use crate::{Error, model_card};

/// Whether an export is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exported {
    Complete,
    /// The run was asked to stop; nothing is written.
    Stopped,
}

/// Why an export ended early.
enum Ended {
    Stopped,
    Failed(Error),
}

impl<E: Into<Error>> From<E> for Ended {
    fn from(error: E) -> Self {
        Ended::Failed(error.into())
    }
}

/// Writes the model to the run's `export/`, in its training dtype, with the tokenizer and
/// generation files of the source model, and a card of the training. Replaces an older export once the new
/// one is complete. Tensors of other ranks are read from the last checkpoint. `go_on` is asked before each
/// tensor.
pub(crate) fn write<B: Backend, T: Element>(
    run: &RunDirectory,
    source: &ModelSource,
    recipe: &Recipe,
    model: &Model<B, T>,
    state: &RunState,
    go_on: &mut dyn FnMut() -> Result<bool, Error>,
) -> Result<Exported, Error> {
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
        let origin = model_card::trained_origin(source.origin(), recipe, state);
        companions.extend_from_slice(&origin.terms);
        moh_hf::model_card::text(&origin, model.config())
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
    match model_directory::prepare_model(&run.export(), true, &described, &mut fill) {
        Ok(model) => publish(run, model).map(|()| Exported::Complete),
        Err(Ended::Stopped) => Ok(Exported::Stopped),
        Err(Ended::Failed(error)) => Err(error),
    }
}

/// Records the files of an export, and gives it its name. Where a process ends between the two, the next export keeps
/// an older one that it would have replaced.
fn publish(run: &RunDirectory, model: PendingModel) -> Result<(), Error> {
    ExportRecord::new(model.written().files.clone()).write(run)?;
    model.publish()?;
    Ok(())
}

/// Moves an export aside that is not as the run has written it, and which the next export would delete; returns where
/// it is then.
pub(crate) fn keep_changed(run: &RunDirectory, step: u64) -> Result<Option<PathBuf>, Error> {
    let place = run.export();
    let is_absent = match std::fs::read_dir(&place) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    if is_absent || export_record::is_unchanged(run)? {
        return Ok(None);
    }
    let aside = run.export_aside(step);
    std::fs::rename(&place, &aside).map_err(moh_files::io(&aside))?;
    moh_files::sync_directory(run.root()).map_err(moh_files::io(run.root()))?;
    Ok(Some(aside))
}

/// The elements of a tensor of the checkpoint at `path`.
fn stored_values(
    stored: &StoredCheckpoint,
    path: &Path,
    spec: &TensorSpec,
) -> Result<Vec<f32>, Error> {
    let mut values = vec![0f32; spec.shape.iter().product()];
    let read = stored.read_f32(TensorKind::Weight, &spec.name, &mut values);
    read.map_err(|error| Error::from(moh_files::unusable(path, error.to_string())))?;
    Ok(values)
}

/// The elements of a tensor of a whole model; none of a tensor that it does not have.
fn own_values<B: Backend, T: Element>(
    model: &Model<B, T>,
    spec: &TensorSpec,
) -> Result<Vec<f32>, Error> {
    let mut segments = model.layout().segments();
    match segments.find(|(_, segment)| segment.name == spec.name) {
        Some((flat, segment)) => Ok(model.weights().read(model.backend(), flat, segment)?),
        None => Ok(Vec::new()),
    }
}
