//! Starting a run: the directory is locked, the recipe resolved and stored, and the training
//! started with the element types that the recipe names.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use half::bf16;
use moh_kernels::{Backend, Cpu, Element};

use crate::event::{Event, Outcome};
use crate::recipe::{DType, Device};
use crate::run_data::RunData;
use crate::source::ModelSource;
use crate::summary::Summary;
use crate::trainer::{Inputs, train};
use crate::{Error, Recipe, RunDirectory};

/// Runs `recipe`, or continues it where its run directory has checkpoints; `path` is what messages
/// call the recipe, and `directory` is where its `[model] from` is on this machine. Setting `stop`
/// ends the run after the step in progress, with a checkpoint.
///
/// # Errors
/// Everything that the recipe, the model, the data, the run directory or the device refuses.
pub fn run(
    recipe: &mut Recipe,
    path: &Path,
    directory: Option<&Path>,
    stop: &AtomicBool,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, Error> {
    // A device that is missing leaves no directory behind either.
    let device = open_device(recipe, path)?;
    if let Some(stage) = recipe.stages.iter().find(|stage| {
        let parallel = stage.parallel;
        parallel.tensor * parallel.pipeline > 1
    }) {
        return Err(Error::NotParallel { path: path.to_owned(), stage: stage.name.clone() });
    }
    let source = ModelSource::open(recipe, path, directory)?;
    recipe.resolve(path, source.original_config())?;
    let run = RunDirectory::new(&recipe.run.dir);
    // Faults of the data leave no directory behind, and a finished run has no need of its data.
    let data = match RunData::open(recipe, &source) {
        Err(error) if !run.root().exists() => return Err(error),
        opened => opened,
    };
    let _lock = run.lock()?;
    run.store_recipe(recipe)?;
    if let Some(summary) = Summary::read(&run.summary())?
        && run.export().join("config.json").is_file()
        && !run.checkpoint_steps()?.is_empty()
    {
        return Ok(Outcome::AlreadyFinished(summary));
    }
    let data = data?;
    run.clear_remains()?;
    let inputs = Inputs { recipe, source: &source, run: &run, stop };
    match device {
        OpenDevice::Cpu => with_weights(Cpu, inputs, data, events),
        #[cfg(feature = "cuda")]
        OpenDevice::Cuda(cuda) => with_weights(cuda, inputs, data, events),
    }
}

/// What computes, ready to.
enum OpenDevice {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(moh_kernels::Cuda),
}

fn open_device(recipe: &Recipe, path: &Path) -> Result<OpenDevice, Error> {
    match recipe.run.device {
        Device::Cpu => Ok(OpenDevice::Cpu),
        #[cfg(feature = "cuda")]
        Device::Cuda => moh_kernels::Cuda::new(0)
            .map(OpenDevice::Cuda)
            .map_err(|source| Error::Device { path: path.to_owned(), source }),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => Err(Error::NoDevice { path: path.to_owned() }),
    }
}

fn with_weights<B: Backend + Clone>(
    backend: B,
    inputs: Inputs<'_>,
    data: RunData,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, Error> {
    match inputs.recipe.run.dtype {
        DType::F32 => with_gradients::<B, f32>(backend, inputs, data, events),
        DType::Bf16 => with_gradients::<B, bf16>(backend, inputs, data, events),
    }
}

fn with_gradients<B: Backend + Clone, T: Element>(
    backend: B,
    inputs: Inputs<'_>,
    data: RunData,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, Error> {
    match (inputs.recipe.precision.gradients, inputs.recipe.precision.moments) {
        (DType::F32, DType::F32) => train::<B, T, f32, f32>(backend, inputs, data, events),
        (DType::F32, DType::Bf16) => train::<B, T, f32, bf16>(backend, inputs, data, events),
        (DType::Bf16, DType::F32) => train::<B, T, bf16, f32>(backend, inputs, data, events),
        (DType::Bf16, DType::Bf16) => train::<B, T, bf16, bf16>(backend, inputs, data, events),
    }
}
