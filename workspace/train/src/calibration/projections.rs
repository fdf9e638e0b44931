//! The output projections that a calibration has refitted: a safetensors file with those of all layers in order, in f32.
//!
//! Its header follows from the model's shape, so a file with another one is not read. Each projection has a hash in the
//! calibration's record, which is written after the file.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use moh_files::PendingFile;
use moh_hf::weight_files::safetensors_header;
use moh_kernels::DType;
use moh_model::ModelConfig;
use moh_model::tensors::{OUTPUT_PROJECTION, in_layer};

use crate::Error;

/// Bytes of a projection.
fn bytes(config: &ModelConfig) -> usize {
    config.hidden_size * config.query_width() * DType::F32.bytes()
}

/// The length of the header and the header of the file of a model.
fn header(config: &ModelConfig) -> io::Result<Vec<u8>> {
    let shape = [config.hidden_size, config.query_width()];
    let layers = 0..config.num_hidden_layers;
    let names = layers.map(|layer| in_layer(layer, OUTPUT_PROJECTION));
    safetensors_header(None, names.map(|name| (name, DType::F32, shape.to_vec())))
}

/// A file that is being written.
pub(super) struct ProjectionWriter {
    file: PendingFile,
    bytes: Vec<u8>,
    hashes: Vec<String>,
}

impl ProjectionWriter {
    /// Begins the file of a model.
    pub fn create(path: &Path, config: &ModelConfig) -> Result<Self, Error> {
        let create = || {
            let mut file = PendingFile::create(path)?;
            file.write_all(&header(config)?)?;
            Ok(file)
        };
        let file = create().map_err(moh_files::io(path))?;
        Ok(ProjectionWriter { file, bytes: vec![0; bytes(config)], hashes: Vec::new() })
    }

    /// Adds the projection of the next layer.
    pub fn add(&mut self, values: &[f32]) -> Result<(), Error> {
        DType::F32.write(values, &mut self.bytes);
        self.hashes.push(blake3::hash(&self.bytes).to_hex().to_string());
        let written = self.file.write_all(&self.bytes);
        Ok(written.map_err(moh_files::io(self.file.path()))?)
    }

    /// Gives the file its name, in place of an earlier one; returns the hashes of the projections.
    pub fn finish(self) -> Result<Vec<String>, Error> {
        let path = self.file.path().to_owned();
        self.file.replace().map_err(moh_files::io(&path))?;
        Ok(self.hashes)
    }
}

/// A complete file.
pub(super) struct ProjectionReader {
    path: PathBuf,
    file: File,
    /// Where the projections begin.
    start: usize,
    bytes: usize,
}

impl ProjectionReader {
    /// Opens the file of a model.
    ///
    /// # Errors
    /// Fails if it cannot be read, or has another header.
    pub fn open(path: &Path, config: &ModelConfig) -> Result<Self, Error> {
        let mut file = File::open(path).map_err(moh_files::io(path))?;
        let expected = header(config).map_err(moh_files::io(path))?;
        let mut found = vec![0; expected.len()];
        file.read_exact(&mut found).map_err(moh_files::io(path))?;
        if found != expected {
            let reason = "does not have the output projections of the run's model: remove it, and the run \
                          computes them again";
            return Err(moh_files::unusable(path, reason.to_owned()).into());
        }
        let start = expected.len();
        Ok(ProjectionReader { path: path.to_owned(), file, start, bytes: bytes(config) })
    }

    /// The projection of a layer, `[hidden_size, heads * head_dim]`, which has this hash.
    ///
    /// # Errors
    /// Fails if it cannot be read, or has another hash.
    pub fn read(&mut self, layer: usize, hash: &str) -> Result<Vec<f32>, Error> {
        let mut bytes = vec![0; self.bytes];
        let start = SeekFrom::Start((self.start + layer * self.bytes) as u64);
        let read = self.file.seek(start).and_then(|_| self.file.read_exact(&mut bytes));
        read.map_err(moh_files::io(&self.path))?;
        if blake3::hash(&bytes).to_hex().as_str() != hash {
            let reason = format!(
                "the output projection of layer {layer} does not match its hash: remove the file, and the run \
                 computes it again"
            );
            return Err(moh_files::unusable(&self.path, reason).into());
        }
        let mut values = vec![0f32; self.bytes / DType::F32.bytes()];
        DType::F32.read(&bytes, &mut values);
        Ok(values)
    }
}
