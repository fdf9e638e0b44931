//! Converts a checkpoint to Mixture-of-Head, or back to dense.
//!
//! A conversion changes no weight, unless the output projections are refitted ([`crate::calibrated`]). A router with
//! matrices adds its own weights, which are zeros or fitted. Tensors are copied from the mapped source to the output in
//! pieces, which several threads check and hash while they are written ([`moh_hf::model_directory`]).
//! At the same time the system reads the next pieces (`read_ahead`). On request the element type changes and the
//! vocabulary grows (see `vocabulary.rs`). A conversion uses constant memory.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use moh_checkpoint::run_directory::RunCheckpoint;
use moh_hf::config_file::OUTPUT_REFITTED;
use moh_hf::model_directory::{
    Contents, DEFAULT_SHARD_BYTES, PIECE_BYTES, PendingModel, Sink, TensorSpec, companion_files,
    prepare_model,
};
use moh_hf::{ConfigFile, check_destination};
use moh_kernels::DType;
use moh_kernels::open_device::OpenDevice;
use moh_model::tensors::{has_vocabulary_rows, tensor_shapes};
use moh_model::{HeadRequest, ModelConfig, MohConfig};
use rayon::prelude::*;

use crate::read_ahead::ReadAhead;
use crate::source::{Source, Weights};
use crate::vocabulary::{DEFAULT_MULTIPLE, Expansion};
use crate::{Calibrated, Error, Receipt, Verification, card, verify};

/// The attention of the converted model.
#[derive(Debug, Clone, PartialEq)]
pub enum TargetAttention {
    /// All heads active for every token: a dense model of the architecture.
    Dense,
    /// Mixture-of-Head.
    Moh(HeadRequest),
}

impl TargetAttention {
    pub(crate) fn request(&self) -> Option<&HeadRequest> {
        match self {
            TargetAttention::Dense => None,
            TargetAttention::Moh(request) => Some(request),
        }
    }

    /// Returns the Mixture-of-Head configuration for `model`.
    pub fn configure(&self, model: &ModelConfig) -> Result<Option<MohConfig>, Error> {
        Ok(self.request().map(|request| request.for_model(model)).transpose()?)
    }
}

/// The input, output and settings of a conversion.
#[derive(Debug, Clone)]
pub struct ConversionOptions {
    /// The model directory to read. For a run, its `model/`.
    pub source: PathBuf,
    /// The checkpoint of a run to convert, instead of the weights in `source`.
    pub checkpoint: Option<RunCheckpoint>,
    /// The ids of the base models in the card. If empty, the source's.
    pub base_models: Vec<String>,
    /// The id of the licence in the card. If `None`, the source's.
    pub license: Option<String>,
    /// The model directory to write.
    pub out: PathBuf,
    /// The output's attention.
    pub attention: TargetAttention,
    /// Measured heads and projections, which replace `attention`. If `None`, the heads of `attention` and the source's
    /// weights.
    pub calibrated: Option<Arc<Calibrated>>,
    /// The output's element type. If `None`, each source tensor's own type.
    pub dtype: Option<DType>,
    /// Maximum bytes of a weight file.
    pub max_shard_bytes: u64,
    /// Whether an existing model directory at `out` is replaced.
    pub force: bool,
    /// A directory with a tokenizer. The model adopts its larger vocabulary.
    pub tokenizer: Option<PathBuf>,
    /// The vocabulary grows to a multiple of this number. If `None`, it grows to a multiple of 128 with `tokenizer`,
    /// and does not grow without it.
    pub pad_vocab_to: Option<usize>,
}

impl ConversionOptions {
    /// Creates options for Mixture-of-Head with the defaults of the command line.
    pub fn new(source: impl Into<PathBuf>, out: impl Into<PathBuf>) -> Self {
        ConversionOptions {
            source: source.into(),
            checkpoint: None,
            base_models: Vec::new(),
            license: None,
            out: out.into(),
            attention: TargetAttention::Moh(HeadRequest::default()),
            calibrated: None,
            dtype: None,
            max_shard_bytes: DEFAULT_SHARD_BYTES,
            force: false,
            tokenizer: None,
            pad_vocab_to: None,
        }
    }

    /// Returns the directory of the source's tokenizer, or `None` for a run without a tokenizer.
    pub fn source_tokenizer(&self) -> Option<PathBuf> {
        match &self.checkpoint {
            Some(checkpoint) => checkpoint.run.tokenizer(),
            None => Some(self.source.clone()),
        }
    }

    /// Returns the configuration of the source.
    pub fn source_config(&self) -> Result<ModelConfig, Error> {
        match &self.checkpoint {
            Some(checkpoint) => Ok(checkpoint.config_file()?.config),
            None => Ok(ConfigFile::read(&self.source)?.config),
        }
    }

    /// Rejects an output that the conversion may not write.
    pub(crate) fn check_destination(&self) -> Result<(), Error> {
        refuse_overlap(&self.source, &self.out)?;
        Ok(check_destination(&self.out, self.force)?)
    }
}

/// A conversion with its output under a temporary name. Dropping it removes the output.
#[derive(Debug)]
pub struct Conversion {
    /// The results.
    pub receipt: Receipt,
    /// Leading rows of the vocabulary that are equal to the source's.
    kept_rows: usize,
    pending: PendingModel,
    calibrated: Option<Arc<Calibrated>>,
}

impl Conversion {
    /// Returns the output under its temporary name.
    pub fn path(&self) -> &Path {
        self.pending.path()
    }

    /// Compares the output with the source on a device.
    pub fn verify(&self, device: OpenDevice) -> Result<Verification, Error> {
        let refit = self.receipt.calibration.as_ref().is_some_and(|calibration| calibration.refit);
        verify::verify(&self.receipt.source, self.pending.path(), self.kept_rows, refit, device)
    }

    /// Renames the output to its final name. Until then, an existing model directory keeps that name.
    pub fn publish(self) -> Result<Receipt, Error> {
        self.pending.publish()?;
        self.calibrated.map_or(Ok(()), |calibrated| calibrated.remove_log())?;
        Ok(self.receipt)
    }
}

/// Converts a model directory, or a checkpoint of a run. [`Conversion::publish`] renames the output to its final
/// name. `progress` is called for every piece, with the bytes written so far and the total bytes. It can stop the
/// conversion with `ControlFlow::Break`.
///
/// # Errors
/// Fails if the source is not a complete model with finite weights, if the options do not fit the model,
/// or if the output cannot be written. Removes the partial output.
pub fn convert(
    options: &ConversionOptions,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Conversion, Error> {
    let start = Instant::now();
    options.check_destination()?;
    let source = Source::open(&options.source, options.checkpoint.as_ref())?;
    let plan = Plan::new(options, &source)?;
    let pending = plan.write(progress)?;
    let receipt = Receipt::new(&plan, &pending.written, start)?;
    let kept_rows =
        plan.expansion.as_ref().map_or(source.file.config.vocab_size, Expansion::num_kept);
    Ok(Conversion { receipt, kept_rows, pending, calibrated: options.calibrated.clone() })
}

/// The output of a conversion.
pub(crate) struct Plan<'a> {
    pub options: &'a ConversionOptions,
    pub source: &'a Source,
    /// The output's configuration.
    pub config: ModelConfig,
    /// The output's tensors.
    pub tensors: Vec<TensorSpec>,
    /// The growth of the vocabulary. `None` if the vocabulary is unchanged.
    pub expansion: Option<Expansion>,
    /// Matrices of a router that the source does not have. Matrices that a calibration did not fit start as zeros.
    /// With zeros, every active head of one-stage and two-stage routing has weight 1.
    pub added: HashSet<String>,
}

impl<'a> Plan<'a> {
    fn new(options: &'a ConversionOptions, source: &'a Source) -> Result<Self, Error> {
        let original = &source.file.config;
        let moh = match &options.calibrated {
            Some(calibrated) => Some(calibrated.moh().clone()),
            None => options.attention.configure(original)?,
        };
        let mut config = ModelConfig { moh, ..original.clone() };
        if options.max_shard_bytes == 0 {
            let reason = "the largest shard must have at least one byte";
            return Err(Error::Option(reason.to_string()));
        }
        let expansion = plan_expansion(options, original.vocab_size)?;
        if let Some(expansion) = &expansion {
            config.vocab_size = expansion.num_rows();
        }
        let stored: HashSet<String> = tensor_shapes(original).into_iter().map(|it| it.0).collect();
        let (mut tensors, mut added) = (Vec::new(), HashSet::new());
        for (name, shape) in tensor_shapes(&config) {
            let is_stored = stored.contains(&name);
            let dtype = match options.dtype {
                Some(dtype) => dtype,
                None if is_stored => source.weights.dtype(&name)?,
                None => tensors.last().map_or(DType::F32, |last: &TensorSpec| last.dtype),
            };
            if !is_stored {
                added.insert(name.clone());
            }
            tensors.push(TensorSpec { name, shape, dtype });
        }
        if !added.is_empty()
            && options.calibrated.is_none()
            && config.moh.as_ref().is_some_and(|moh| moh.router.needs_fit())
        {
            let reason = "the router \"linear\" begins with matrices that are fitted to a text, as zeros or random \
                          ones would select heads that do not matter: give a text, --calibration, or choose another \
                          --router";
            return Err(Error::Option(reason.to_string()));
        }
        Ok(Plan { options, source, config, tensors, expansion, added })
    }

    pub fn has_refitted(&self, tensor: &str) -> bool {
        self.options.calibrated.as_ref().is_some_and(|calibrated| calibrated.has_refitted(tensor))
    }

    pub fn is_source_refitted(&self) -> bool {
        self.source.file.fields.get(OUTPUT_REFITTED).is_some_and(|refitted| refitted == true)
    }

    /// Returns whether the output is a dense model of a Mixture-of-Head model's refitted output projections. Such a
    /// model equals neither the Mixture-of-Head model nor the dense model from which that model was converted.
    pub fn is_dense_of_refitted(&self) -> bool {
        self.config.moh.is_none() && self.is_source_refitted()
    }

    /// Returns the growth of a tensor's rows.
    pub fn expansion_of(&self, tensor: &str) -> Option<&Expansion> {
        self.expansion.as_ref().filter(|_| has_vocabulary_rows(tensor))
    }

    fn write(
        &self,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<PendingModel, Error> {
        let Plan { options, source: Source { file, weights, .. }, config, tensors, .. } = self;
        // The configuration names a single type: the type of the embedding, the model's widest part.
        let dtype = options.dtype.or(tensors.first().map(|tensor| tensor.dtype));
        let (companions, card) = self.companions_and_card()?;
        let mut fields = file.to_json(config, dtype);
        if options.calibrated.as_ref().is_some_and(|calibrated| calibrated.is_refitted()) {
            fields.insert(OUTPUT_REFITTED.to_owned(), true.into());
        }
        let model = Contents {
            config: &fields,
            tensors,
            max_shard_bytes: options.max_shard_bytes,
            companions: &companions,
            card: card.as_deref(),
        };
        let total = tensors.iter().map(TensorSpec::num_bytes).sum();
        let mut done = 0;
        let stored = tensors.iter().filter(|tensor| !self.added.contains(&tensor.name));
        let mut read_ahead = ReadAhead::start(weights, stored)?;
        prepare_model(&options.out, options.force, &model, &mut |spec, sink| {
            let mut counted = |bytes: &[u8]| {
                sink(bytes)?;
                done += bytes.len() as u64;
                match progress(done, total) {
                    ControlFlow::Continue(()) => Ok(()),
                    ControlFlow::Break(()) => Err(Error::Interrupted),
                }
            };
            let refitted = match &options.calibrated {
                Some(calibrated) => calibrated.refitted(&spec.name)?,
                None => None,
            };
            if let Some(values) = refitted {
                return write_refitted(weights, spec, &values, &mut read_ahead, &mut counted);
            }
            if self.added.contains(&spec.name) {
                let fitted = options.calibrated.as_ref().and_then(|it| it.router(&spec.name));
                return match fitted {
                    Some(values) => write_fitted(spec, values, &mut counted),
                    None => write_zeros(spec, &mut counted),
                };
            }
            let expansion = self.expansion_of(&spec.name);
            write_tensor(weights, spec, expansion, &mut read_ahead, &mut counted)
        })
    }

    /// Returns the files that are copied, and the text of the model card if the output has one.
    fn companions_and_card(&self) -> Result<(Vec<PathBuf>, Option<String>), Error> {
        let Plan { options, config, .. } = self;
        let first_tokenizer = options.source_tokenizer();
        let mut companions = match options.tokenizer.as_deref().or(first_tokenizer.as_deref()) {
            Some(tokenizer) => companion_files(&options.source, tokenizer)?,
            None => Vec::new(),
        };
        if config.moh.is_none() && !self.is_dense_of_refitted() {
            return Ok((companions, None));
        }
        let card = card::card(self)?;
        companions.extend_from_slice(&card.terms);
        Ok((companions, Some(card.text(config))))
    }
}

/// Rejects an output that is the source or contains it: replacing the output would delete the input.
fn refuse_overlap(source: &Path, out: &Path) -> Result<(), Error> {
    if let (Ok(source), Ok(out)) = (source.canonicalize(), out.canonicalize())
        && source.starts_with(&out)
    {
        return Err(Error::file(&out, "holds the source model: choose another --out"));
    }
    Ok(())
}

fn plan_expansion(options: &ConversionOptions, rows: usize) -> Result<Option<Expansion>, Error> {
    let expansion = match (&options.tokenizer, options.pad_vocab_to) {
        (None, None) => return Ok(None),
        (None, Some(multiple)) => Expansion::padding(rows, multiple)?,
        (Some(tokenizer), multiple) => {
            let multiple = multiple.unwrap_or(DEFAULT_MULTIPLE);
            let source = options.source_tokenizer().unwrap_or_else(|| options.source.clone());
            Expansion::plan(&source, tokenizer, rows, Some(multiple))?
        }
    };
    Ok(Some(expansion).filter(|expansion| !expansion.is_identity()))
}

/// Writes values that replace the source's.
fn write_refitted(
    weights: &Weights,
    spec: &TensorSpec,
    values: &[f32],
    read_ahead: &mut ReadAhead<'_>,
    sink: &mut Sink<'_, Error>,
) -> Result<(), Error> {
    let mut converter = Converter { weights, spec, read_ahead, buffers: (Vec::new(), Vec::new()) };
    for (number, values) in values.chunks(PIECE_BYTES / 4).enumerate() {
        converter.round(values, number * (PIECE_BYTES / 4), sink)?;
    }
    let stored = weights.stored_bytes(&spec.name)?;
    converter.release(0, stored);
    Ok(())
}

/// Writes the fitted tensor of a router.
fn write_fitted(
    spec: &TensorSpec,
    values: &[f32],
    sink: &mut Sink<'_, Error>,
) -> Result<(), Error> {
    let mut bytes = Vec::new();
    for values in values.chunks(PIECE_BYTES / 4) {
        bytes.resize(values.len() * spec.dtype.bytes(), 0);
        spec.dtype.write(values, &mut bytes);
        if first_not_finite(spec.dtype, &bytes).is_some() {
            return Err(Error::Option(format!(
                "{} has a fitted value that {} cannot hold: choose another --dtype",
                spec.name,
                spec.dtype.torch_name()
            )));
        }
        sink(&bytes)?;
    }
    Ok(())
}

/// Writes the tensor of a router that the source does not have, with its initial values.
fn write_zeros(spec: &TensorSpec, sink: &mut Sink<'_, Error>) -> Result<(), Error> {
    let zeros = vec![0; PIECE_BYTES];
    let bytes = spec.num_bytes();
    let pieces = (0..bytes).step_by(PIECE_BYTES);
    pieces.map(|start| (bytes - start).min(PIECE_BYTES as u64)).try_for_each(|length| {
        // At most a piece's bytes.
        sink(&zeros[..length as usize])
    })
}

fn write_tensor(
    weights: &Weights,
    spec: &TensorSpec,
    expansion: Option<&Expansion>,
    read_ahead: &mut ReadAhead<'_>,
    sink: &mut Sink<'_, Error>,
) -> Result<(), Error> {
    let name = &spec.name;
    let (dtype, bytes) = weights.bytes(name)?;
    let mut converter = Converter { weights, spec, read_ahead, buffers: (Vec::new(), Vec::new()) };
    match expansion {
        None => converter.pass(dtype, &bytes, sink)?,
        Some(expansion) => {
            if let Some(element) = first_not_finite(dtype, &bytes) {
                return Err(weights.not_finite(name, element));
            }
            let width = spec.shape.iter().skip(1).product::<usize>();
            let row_bytes = width * dtype.bytes();
            let row = |id: u32, out: &mut [f32]| {
                let start = id as usize * row_bytes;
                dtype.read(&bytes[start..start + row_bytes], out);
            };
            let rows = expansion.rows(width, &row);
            let kept = expansion.num_kept();
            converter.pass(dtype, &bytes[..kept * row_bytes], sink)?;
            converter.read_ahead.passed(weights, bytes.len() - kept * row_bytes);
            let per_piece = (PIECE_BYTES / 4 / width).max(1);
            let mut values = Vec::new();
            for start in (kept..expansion.num_rows()).step_by(per_piece) {
                let end = (start + per_piece).min(expansion.num_rows());
                values.resize((end - start) * width, 0.0);
                for (row, out) in values.chunks_exact_mut(width).enumerate() {
                    rows.read(start + row, out);
                }
                converter.round(&values, start * width, sink)?;
            }
        }
    }
    weights.release(name, 0..bytes.len());
    Ok(())
}

/// Checks pieces of a tensor and converts their element type if requested.
struct Converter<'a, 't> {
    weights: &'a Weights,
    spec: &'a TensorSpec,
    read_ahead: &'a mut ReadAhead<'t>,
    buffers: (Vec<f32>, Vec<u8>),
}

impl Converter<'_, '_> {
    /// Writes the next bytes of the tensor, unchanged or converted.
    fn pass(
        &mut self,
        dtype: DType,
        bytes: &[u8],
        sink: &mut Sink<'_, Error>,
    ) -> Result<(), Error> {
        for (number, piece) in bytes.chunks(PIECE_BYTES).enumerate() {
            let first = number * (PIECE_BYTES / dtype.bytes());
            if let Some(element) = first_not_finite(dtype, piece) {
                return Err(self.weights.not_finite(&self.spec.name, first + element));
            }
            if dtype == self.spec.dtype {
                sink(piece)?;
                self.release(first * dtype.bytes(), piece.len());
                continue;
            }
            let mut values = std::mem::take(&mut self.buffers.0);
            values.resize(piece.len() / dtype.bytes(), 0.0);
            let block = PARALLEL_ELEMENTS;
            values
                .par_chunks_mut(block)
                .zip(piece.par_chunks(block * dtype.bytes()))
                .for_each(|(out, bytes)| dtype.read(bytes, out));
            let result = self.round(&values, first, sink);
            self.buffers.0 = values;
            result?;
            self.release(first * dtype.bytes(), piece.len());
        }
        Ok(())
    }

    /// Releases a piece of the source after use.
    fn release(&mut self, start: usize, length: usize) {
        self.read_ahead.passed(self.weights, length);
        self.weights.release(&self.spec.name, start..start + length);
    }

    /// Rounds values to the output's type and writes them.
    fn round(
        &mut self,
        values: &[f32],
        first: usize,
        sink: &mut Sink<'_, Error>,
    ) -> Result<(), Error> {
        let TensorSpec { name, dtype, .. } = self.spec;
        let mut bytes = std::mem::take(&mut self.buffers.1);
        bytes.resize(values.len() * dtype.bytes(), 0);
        let block = PARALLEL_ELEMENTS;
        bytes
            .par_chunks_mut(block * dtype.bytes())
            .zip(values.par_chunks(block))
            .for_each(|(out, values)| dtype.write(values, out));
        if let Some(element) = first_not_finite(*dtype, &bytes) {
            let reason = format!(
                "{name} has a value that {} cannot hold, at element {}: choose another --dtype",
                dtype.torch_name(),
                first + element
            );
            return Err(Error::file(self.weights.path_of(name), reason));
        }
        let result = sink(&bytes);
        self.buffers.1 = bytes;
        result
    }
}

const PARALLEL_ELEMENTS: usize = 1 << 16;

/// Returns the index of the first element that is infinite or not a number.
fn first_not_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    let blocks = bytes.par_chunks(PARALLEL_ELEMENTS * dtype.bytes()).enumerate();
    blocks.find_map_first(|(block, bytes)| {
        Some(block * PARALLEL_ELEMENTS + dtype.first_not_finite(bytes)?)
    })
}

#[cfg(test)]
mod tests;
