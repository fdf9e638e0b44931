//! The model to convert: files in Hugging Face layout, or a checkpoint of a run.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use moh_checkpoint::StoredCheckpoint;
use moh_checkpoint::run_directory::RunCheckpoint;
use moh_hf::{ConfigFile, StoredModel, TensorBytes, WeightFiles};
use moh_kernels::DType;
use moh_model::tensors::tensor_shapes;
use moh_step::TensorKind;

use crate::Error;

pub(crate) struct Source {
    pub file: ConfigFile,
    pub weights: Weights,
    /// A sentence for the user about the files.
    pub warning: Option<String>,
}

pub(crate) enum Weights {
    Files(WeightFiles),
    /// Tensors of a run. A tensor is read on use, compared with its hash, and rounded to the type of the run's
    /// export.
    Checkpoint {
        stored: Box<StoredCheckpoint>,
        dtype: DType,
        elements: HashMap<String, usize>,
        directory: PathBuf,
    },
}

impl Weights {
    /// Returns a text that identifies the weights.
    pub fn identity(&self) -> String {
        match self {
            Weights::Files(files) => files.sample().to_hex().to_string(),
            Weights::Checkpoint { stored, dtype, .. } => {
                format!("{} in {}", moh_train::parts_identity(stored), dtype.name())
            }
        }
    }
}

impl Source {
    pub(crate) fn open(
        directory: &Path,
        checkpoint: Option<&RunCheckpoint>,
    ) -> Result<Self, Error> {
        let Some(checkpoint) = checkpoint else {
            let StoredModel { file, weights, warning } = StoredModel::open(directory)?;
            return Ok(Source { file, weights: Weights::Files(weights), warning });
        };
        let (stored, file) = checkpoint.run.stored_model(checkpoint.step)?;
        let directory = checkpoint.run.checkpoint(checkpoint.step);
        let shapes = tensor_shapes(&file.config).into_iter();
        let elements = shapes.map(|(name, shape)| (name, shape.iter().product())).collect();
        let (stored, dtype) = (Box::new(stored), checkpoint.export_type()?);
        let weights = Weights::Checkpoint { stored, dtype, elements, directory };
        Ok(Source { file, weights, warning: None })
    }
}

impl Weights {
    pub(crate) fn dtype(&self, name: &str) -> Result<DType, Error> {
        match self {
            Weights::Files(files) => Ok(files.get(name)?.dtype),
            Weights::Checkpoint { dtype, .. } => Ok(*dtype),
        }
    }

    /// Returns a tensor's type and little-endian bytes.
    pub(crate) fn bytes(&self, name: &str) -> Result<(DType, Cow<'_, [u8]>), Error> {
        match self {
            Weights::Files(files) => {
                let TensorBytes { dtype, bytes, .. } = files.get(name)?;
                Ok((dtype, Cow::Borrowed(bytes)))
            }
            Weights::Checkpoint { stored, dtype, elements, .. } => {
                let elements = elements.get(name).copied().unwrap_or(0);
                let mut values = vec![0f32; elements];
                stored.read_f32(TensorKind::Weight, name, &mut values)?;
                let mut bytes = vec![0; elements * dtype.bytes()];
                dtype.write(&values, &mut bytes);
                Ok((*dtype, Cow::Owned(bytes)))
            }
        }
    }

    pub(crate) fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<(), Error> {
        match self {
            Weights::Files(files) => Ok(files.read_f32(name, out)?),
            Weights::Checkpoint { stored, dtype, .. } => {
                Ok(stored.read_exported(*dtype, name, out)?)
            }
        }
    }

    /// Returns the error of a tensor's element that is not finite.
    pub(crate) fn not_finite(&self, name: &str, element: usize) -> Error {
        match self {
            Weights::Files(files) => files.not_finite(name, element).into(),
            Weights::Checkpoint { directory, .. } => {
                let reason = format!("{name} has a value that is not finite, at element {element}");
                Error::file(directory, reason)
            }
        }
    }

    /// Returns the file or directory of a tensor, for messages.
    pub(crate) fn path_of(&self, name: &str) -> &Path {
        match self {
            Weights::Files(files) => files.file_of(name),
            Weights::Checkpoint { directory, .. } => directory,
        }
    }

    /// Returns the bytes of a tensor in the source's files, or 0 if they are not mapped.
    pub(crate) fn stored_bytes(&self, name: &str) -> Result<usize, Error> {
        match self {
            Weights::Files(files) => Ok(files.get(name)?.bytes.len()),
            Weights::Checkpoint { .. } => Ok(0),
        }
    }

    /// Requests that the system reads a part of a mapped tensor soon.
    pub(crate) fn prefetch(&self, name: &str, part: Range<usize>) {
        if let Weights::Files(files) = self {
            files.prefetch(name, part);
        }
    }

    /// Releases mapped memory.
    pub(crate) fn release(&self, name: &str, part: Range<usize>) {
        if let Weights::Files(files) = self {
            files.release(name, part);
        }
    }
}
