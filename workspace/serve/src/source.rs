//! The model that is served: a directory in Hugging Face layout, or a checkpoint of a run as it stands.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use moh_checkpoint::run_directory::{RunCheckpoint, RunDirectory};
use moh_hf::ConfigFile;
use moh_kernels::{Backend, Element};
use moh_model::{Model, ModelConfig};
use moh_step::TensorKind;

/// Where the weights are.
#[derive(Debug, Clone)]
pub enum Source {
    /// A model in a directory.
    Directory(PathBuf),
    /// A checkpoint of a run.
    Checkpoint(RunCheckpoint),
}

impl Source {
    /// The model that `name` names: a run, as `RUN` for its newest checkpoint or `RUN@STEP`, a directory, or a
    /// repository of the hub, which is downloaded if necessary.
    pub fn locate(name: &str, revision: Option<&str>) -> anyhow::Result<Self> {
        match RunCheckpoint::from_name(name)? {
            Some(checkpoint) => Ok(Source::Checkpoint(checkpoint)),
            None => Ok(Source::Directory(moh_program::models::locate(name, revision)?)),
        }
    }

    /// The model's configuration.
    pub fn config(&self) -> anyhow::Result<ModelConfig> {
        match self {
            Source::Directory(directory) => Ok(ConfigFile::read(directory)?.config),
            Source::Checkpoint(checkpoint) => Ok(checkpoint.config_file()?.config),
        }
    }

    /// The directory with the tokenizer.
    pub fn tokenizer(&self) -> anyhow::Result<PathBuf> {
        match self {
            Source::Directory(directory) => Ok(directory.clone()),
            Source::Checkpoint(RunCheckpoint { run, .. }) => run.tokenizer().with_context(|| {
                format!("{}: the run has no tokenizer, which text requires", run.root().display())
            }),
        }
    }

    /// The directory with the other files of the model.
    pub fn files(&self) -> PathBuf {
        match self {
            Source::Directory(directory) => directory.clone(),
            Source::Checkpoint(checkpoint) => checkpoint.run.model(),
        }
    }

    /// The step of the checkpoint, if it is one.
    pub fn step(&self) -> Option<u64> {
        match self {
            Source::Directory(_) => None,
            Source::Checkpoint(checkpoint) => Some(checkpoint.step),
        }
    }

    /// The run of the checkpoint.
    pub fn run(&self) -> anyhow::Result<&RunDirectory> {
        match self {
            Source::Checkpoint(checkpoint) => Ok(&checkpoint.run),
            Source::Directory(directory) => bail!(
                "{}: is not a run, whose checkpoints --watch-run follows: leave it out",
                directory.display()
            ),
        }
    }

    /// Another checkpoint of the same run.
    pub fn at(&self, step: u64) -> Self {
        match self {
            Source::Checkpoint(RunCheckpoint { run, .. }) => {
                Source::Checkpoint(RunCheckpoint { run: run.clone(), step })
            }
            directory @ Source::Directory(_) => directory.clone(),
        }
    }

    /// Loads the model for sequences of up to `positions` tokens.
    pub fn load<B: Backend, T: Element>(
        &self,
        backend: B,
        positions: usize,
    ) -> anyhow::Result<Model<B, T>> {
        match self {
            Source::Directory(directory) => {
                moh_program::models::load(backend, directory, positions)
            }
            Source::Checkpoint(RunCheckpoint { run, step }) => {
                let stored = run.stored(*step)?;
                Model::new(backend, self.config()?, positions, |segment, values| {
                    Ok(stored.read_f32(TensorKind::Weight, &segment.name, values)?)
                })
            }
        }
    }
}
