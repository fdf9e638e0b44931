//! The matrices that a calibration has fitted: a safetensors file with the output projections of all layers, if they are
//! refitted, and then the matrices of their routers, if the router is learned, in order and in f32.
//!
//! Its header follows from the model's shape, so a file with another one is not read. Each matrix has a hash in the
//! calibration's record, which is written after the file.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use moh_files::PendingFile;
use moh_hf::weight_files::safetensors_header;
use moh_kernels::DType;
use moh_model::ModelConfig;
use moh_model::tensors::{OUTPUT_PROJECTION, ROUTER, in_layer};

use crate::Result;

/// What a file has of each layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fitted {
    /// Its output projection.
    pub projections: bool,
    /// The matrix of its router; zeros in a layer without routed heads.
    pub routers: bool,
}

impl Fitted {
    pub fn is_empty(self) -> bool {
        !self.projections && !self.routers
    }

    /// The matrices of a file, in order: names and shapes.
    fn matrices(self, config: &ModelConfig) -> Vec<(String, [usize; 2])> {
        let projection = [config.hidden_size, config.query_width()];
        let router = [config.num_attention_heads, config.hidden_size];
        let parts =
            [(self.projections, OUTPUT_PROJECTION, projection), (self.routers, ROUTER, router)];
        let of_part = |(is_there, name, shape)| {
            let layers = if is_there { config.num_hidden_layers } else { 0 };
            (0..layers).map(move |layer| (in_layer(layer, name), shape))
        };
        parts.into_iter().flat_map(of_part).collect()
    }
}

/// The header of a file with these matrices, after its length.
fn header(matrices: &[(String, [usize; 2])]) -> io::Result<Vec<u8>> {
    let tensors = matrices.iter().map(|(name, shape)| (name.clone(), DType::F32, shape.to_vec()));
    safetensors_header(None, tensors)
}

/// A file that is being written.
pub(super) struct FittedWriter {
    file: PendingFile,
    bytes: Vec<u8>,
    hashes: Vec<String>,
}

impl FittedWriter {
    /// Begins the file of a model.
    pub fn create(path: &Path, config: &ModelConfig, fitted: Fitted) -> Result<Self> {
        let create = || {
            let mut file = PendingFile::create(path)?;
            file.write_all(&header(&fitted.matrices(config))?)?;
            Ok(file)
        };
        let file = create().map_err(moh_files::io(path))?;
        Ok(FittedWriter { file, bytes: Vec::new(), hashes: Vec::new() })
    }

    /// Adds the next matrix.
    pub fn add(&mut self, values: &[f32]) -> Result<()> {
        self.bytes.resize(size_of_val(values), 0);
        DType::F32.write(values, &mut self.bytes);
        self.hashes.push(blake3::hash(&self.bytes).to_hex().to_string());
        let written = self.file.write_all(&self.bytes);
        Ok(written.map_err(moh_files::io(self.file.path()))?)
    }

    /// Gives the file its name, in place of an earlier one; returns the hashes of the matrices.
    pub fn finish(self) -> Result<Vec<String>> {
        let path = self.file.path().to_owned();
        self.file.replace().map_err(moh_files::io(&path))?;
        Ok(self.hashes)
    }
}

/// A complete file.
pub(super) struct FittedReader {
    path: PathBuf,
    file: File,
    matrices: Vec<Matrix>,
}

struct Matrix {
    name: String,
    /// BLAKE3 of its bytes.
    hash: String,
    /// Where its bytes begin.
    start: u64,
    elements: usize,
}

impl FittedReader {
    /// Opens the file of a model, whose matrices have these hashes.
    pub fn open(
        path: &Path,
        config: &ModelConfig,
        fitted: Fitted,
        hashes: &[&str],
    ) -> Result<Self> {
        let mut file = File::open(path).map_err(moh_files::io(path))?;
        let matrices = fitted.matrices(config);
        let expected = header(&matrices).map_err(moh_files::io(path))?;
        let mut found = vec![0; expected.len()];
        file.read_exact(&mut found).map_err(moh_files::io(path))?;
        if found != expected || hashes.len() != matrices.len() {
            let reason = "does not have the fitted matrices of the run's model: remove it, and the run \
                          computes them again";
            return Err(moh_files::unusable(path, reason.to_owned()).into());
        }
        let mut start = expected.len() as u64;
        let matrix = |((name, shape), hash): ((String, [usize; 2]), &&str)| {
            let (hash, elements) = ((*hash).to_owned(), shape.iter().product());
            let matrix = Matrix { name, hash, start, elements };
            start += (matrix.elements * DType::F32.bytes()) as u64;
            matrix
        };
        let matrices = matrices.into_iter().zip(hashes).map(matrix).collect();
        Ok(FittedReader { path: path.to_owned(), file, matrices })
    }

    /// Reads all matrices, to check their hashes.
    pub fn check(&self) -> Result<()> {
        self.matrices.iter().try_for_each(|matrix| self.values(matrix).map(|_| ()))
    }

    /// The matrix that is the tensor of this name; `None` if the file has none.
    pub fn read(&self, tensor: &str) -> Result<Option<Vec<f32>>> {
        let matrix = self.matrices.iter().find(|matrix| matrix.name == tensor);
        matrix.map(|matrix| self.values(matrix)).transpose()
    }

    fn values(&self, matrix: &Matrix) -> Result<Vec<f32>> {
        let Matrix { name, hash, start, elements } = matrix;
        let (mut bytes, mut file) = (vec![0; elements * DType::F32.bytes()], &self.file);
        let read = file.seek(SeekFrom::Start(*start)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(moh_files::io(&self.path))?;
        if blake3::hash(&bytes).to_hex().as_str() != hash {
            let reason = format!(
                "{name} does not match its hash: remove the file, and the run computes it again"
            );
            return Err(moh_files::unusable(&self.path, reason).into());
        }
        let mut values = vec![0f32; *elements];
        DType::F32.read(&bytes, &mut values);
        Ok(values)
    }
}
