//! A model to evaluate: a directory, a repository of the hub, or a checkpoint of a run, `RUN` or `RUN@STEP`,
//! whose weights are read where they are.

use std::path::PathBuf;

use moh_checkpoint::StoredCheckpoint;
use moh_checkpoint::run_directory::RunCheckpoint;
use moh_hf::ConfigFile;
use moh_kernels::{Backend, DType, Element};
use moh_model::{Model, ModelConfig};
use moh_step::TensorKind;
use moh_text::TextTokenizer;

/// A model before its weights are read.
pub(crate) struct NamedModel {
    /// As the user names it.
    pub name: String,
    pub config: ModelConfig,
    pub tokenizer: Option<TextTokenizer>,
    weights: Weights,
}

/// Writes a tensor by its name.
pub(crate) type Tensors<'a> = Box<dyn FnMut(&str, &mut [f32]) -> anyhow::Result<()> + Send + 'a>;

/// Where the weights are.
enum Weights {
    Directory(PathBuf),
    /// A checkpoint, and the element type of an export of it.
    Checkpoint(Box<StoredCheckpoint>, DType),
}

impl NamedModel {
    /// Finds the model `name`; one of the hub is downloaded if necessary. Fails if there is no such model, or if its
    /// configuration or tokenizer cannot be read.
    pub(crate) fn open(name: &str, revision: Option<&str>) -> anyhow::Result<Self> {
        if let Some(checkpoint) = RunCheckpoint::from_name(name)? {
            let RunCheckpoint { run, step } = &checkpoint;
            let (stored, file) = run.stored_model(*step)?;
            let tokenizer = run.tokenizer().map(|path| TextTokenizer::load(&path)).transpose()?;
            let weights = Weights::Checkpoint(Box::new(stored), checkpoint.export_type()?);
            return Ok(NamedModel {
                name: name.to_owned(),
                config: file.config,
                tokenizer,
                weights,
            });
        }
        let directory = moh_program::models::locate(name, revision)?;
        Ok(NamedModel {
            name: name.to_owned(),
            config: ConfigFile::read(&directory)?.config,
            tokenizer: moh_program::models::tokenizer(&directory)?,
            weights: Weights::Directory(directory),
        })
    }

    /// Loads the weights for sequences of up to `positions` tokens. Those of a checkpoint are what an export of it has.
    /// Fails if they cannot be read, or if the device has no room.
    pub(crate) fn load<B: Backend, T: Element>(
        &self,
        backend: B,
        positions: usize,
    ) -> anyhow::Result<Model<B, T>> {
        match &self.weights {
            Weights::Directory(directory) => {
                moh_program::models::load(backend, directory, positions)
            }
            Weights::Checkpoint(..) => {
                let mut read = self.tensors()?;
                let config = self.config.clone();
                Model::new(backend, config, positions, |segment, values: &mut [f32]| {
                    read(&segment.name, values)
                })
            }
        }
    }

    /// What writes each tensor by its name, in f32.
    pub(crate) fn tensors(&self) -> anyhow::Result<Tensors<'_>> {
        let (stored, dtype) = match &self.weights {
            Weights::Directory(directory) => {
                let stored = moh_program::models::stored(directory)?;
                return Ok(Box::new(move |name, values| {
                    Ok(stored.weights.read_f32(name, values)?)
                }));
            }
            Weights::Checkpoint(stored, dtype) => (stored, *dtype),
        };
        let mut bytes = Vec::new();
        Ok(Box::new(move |name, values| {
            stored.read_f32(TensorKind::Weight, name, values)?;
            if dtype != DType::F32 {
                bytes.resize(values.len() * dtype.bytes(), 0);
                dtype.write(values, &mut bytes);
                dtype.read(&bytes, values);
            }
            Ok(())
        }))
    }
}
