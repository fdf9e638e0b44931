//! Converts a checkpoint to Mixture-of-Head, or back to dense.
//!
//! The query-norm router has no parameters, so conversion changes no weight: tensors are copied
//! from the mapped source to the output in pieces, which several threads check and hash while they are written.
//! The system reads the next pieces meanwhile (`read_ahead`), and what was written before is synced and read back
//! ([`moh_hf::model_directory`]). On request the element type changes and the vocabulary grows (see
//! [`moh_hf::vocabulary`]). A conversion uses constant memory.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use moh_device::OpenDevice;
use moh_hf::model_directory::{
    Contents, DEFAULT_SHARD_BYTES, PIECE_BYTES, PendingModel, ReadBack, Sink, TensorSpec,
    companion_files, prepare_model,
};
use moh_hf::vocabulary::DEFAULT_MULTIPLE;
use moh_hf::{Expansion, check_destination, model_card};
use moh_kernels::DType;
use moh_model::flops::Flops;
use moh_model::tensors::{has_vocabulary_rows, tensor_shapes};
use moh_model::{HeadCounts, HeadRequest, ModelConfig, MohConfig};
use rayon::prelude::*;
use serde::Serialize;

use crate::read_ahead::ReadAhead;
use crate::source::{Checkpoint, Source, Weights};
use crate::{Error, Verification, card, verify};

/// The attention of the converted model.
#[derive(Debug, Clone, PartialEq)]
pub enum Attention {
    /// All heads active for every token: a dense model of the architecture.
    Dense,
    /// Mixture-of-Head.
    Moh(HeadRequest),
}

impl Attention {
    /// The Mixture-of-Head configuration for `model`.
    ///
    /// # Errors
    /// Fails if the counts do not fit the model.
    pub fn configure(&self, model: &ModelConfig) -> Result<Option<MohConfig>, Error> {
        match self {
            Attention::Dense => Ok(None),
            Attention::Moh(request) => Ok(Some(request.for_model(model)?)),
        }
    }

    /// What a share of active heads became for `model`, if it could not be met exactly.
    pub fn rounding(&self, model: &ModelConfig) -> Option<String> {
        match self {
            Attention::Dense => None,
            Attention::Moh(request) => {
                request.rounding(model.num_attention_heads, model.moh.as_ref())
            }
        }
    }
}

/// The input, output and settings of a conversion.
#[derive(Debug, Clone)]
pub struct Options {
    /// The model directory to read; of a run, its `model/`.
    pub source: PathBuf,
    /// The checkpoint of a run to convert, instead of the weights in `source`.
    pub checkpoint: Option<Checkpoint>,
    /// What the user calls the source, if that is not its directory: its id on the hub.
    pub name: Option<String>,
    /// The model directory to write.
    pub out: PathBuf,
    /// The output's attention.
    pub attention: Attention,
    /// The output's element type; each source tensor's own if `None`.
    pub dtype: Option<DType>,
    /// Maximum bytes of a weight file.
    pub max_shard_bytes: u64,
    /// Whether an existing model directory at `out` is replaced.
    pub force: bool,
    /// A directory with the tokenizer whose larger vocabulary the model adopts.
    pub tokenizer: Option<PathBuf>,
    /// Grow the vocabulary to a multiple of this; if `None`, to a multiple of [`DEFAULT_MULTIPLE`] with
    /// `tokenizer`, and not at all without.
    pub pad_vocab_to: Option<usize>,
}

impl Options {
    /// Mixture-of-Head with the defaults of the command line.
    pub fn new(source: impl Into<PathBuf>, out: impl Into<PathBuf>) -> Self {
        Options {
            source: source.into(),
            checkpoint: None,
            name: None,
            out: out.into(),
            attention: Attention::Moh(HeadRequest::default()),
            dtype: None,
            max_shard_bytes: DEFAULT_SHARD_BYTES,
            force: false,
            tokenizer: None,
            pad_vocab_to: None,
        }
    }
}

/// The progress of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes written.
    pub bytes: u64,
    /// Bytes to write.
    pub total: u64,
}

/// The results of a conversion.
#[derive(Debug, Clone, Serialize)]
pub struct Receipt {
    /// The directory that was read.
    pub source: PathBuf,
    /// The directory that was written.
    pub out: PathBuf,
    /// Query heads of a block.
    pub heads: usize,
    /// Shared heads; all heads of a dense model.
    pub shared_heads: HeadCounts,
    /// Routed heads.
    pub routed_heads: HeadCounts,
    /// Active routed heads per token.
    #[serde(skip)]
    pub routed_top_k: HeadCounts,
    /// Active heads per token.
    pub active_heads: HeadCounts,
    /// What the share of active heads became, if it could not be met exactly.
    #[serde(skip)]
    pub rounding: Option<String>,
    /// Parameters of the output; a tied head counts once.
    pub parameters: u64,
    /// Rows of the vocabulary before and after.
    pub vocab_size: [usize; 2],
    /// Sequence length of the operation counts below: `max_position_embeddings`.
    pub flops_length: usize,
    /// Forward FLOPs of the attention core per token, before and after.
    pub attention_flops_per_token: [f64; 2],
    /// Forward FLOPs of the whole model per token, before and after.
    pub flops_per_token: [f64; 2],
    /// Bytes of the output's tensors.
    pub bytes: u64,
    /// Weight files.
    pub shards: usize,
    /// What was read back of the output.
    pub read_back: ReadBack,
    /// Wall-clock time.
    pub seconds: f64,
    /// Every tensor of the output.
    pub tensors: Vec<TensorReceipt>,
    /// What a user should know about the source's files, in a sentence.
    #[serde(skip)]
    pub warning: Option<String>,
}

/// The conversion of one tensor.
#[derive(Debug, Clone, Serialize)]
pub struct TensorReceipt {
    /// Its name.
    pub name: String,
    /// Element type in the source.
    pub source_dtype: &'static str,
    /// Element type in the output.
    pub dtype: &'static str,
    /// BLAKE3 of the source's bytes, if they were copied unchanged.
    pub source_blake3: Option<String>,
    /// BLAKE3 of the output's bytes, read back.
    pub blake3: String,
    /// Whether the output has the source's bytes.
    pub unchanged: bool,
}

impl Receipt {
    /// Number of tensors copied unchanged.
    pub fn num_unchanged(&self) -> usize {
        self.tensors.iter().filter(|tensor| tensor.unchanged).count()
    }

    /// Number of tensors with another element type than the source's.
    pub fn num_converted(&self) -> usize {
        self.tensors.iter().filter(|tensor| tensor.source_dtype != tensor.dtype).count()
    }
}

/// A conversion whose output does not have its name yet; dropping it removes the output.
#[derive(Debug)]
pub struct Conversion {
    receipt: Receipt,
    /// Leading rows of the vocabulary that are the source's.
    kept_rows: usize,
    pending: PendingModel,
}

impl Conversion {
    /// The results.
    pub fn receipt(&self) -> &Receipt {
        &self.receipt
    }

    /// Compares the output with the source on a device.
    ///
    /// # Errors
    /// Fails if a model cannot be read, or if they differ by more than rounding explains.
    pub fn verify(&self, device: OpenDevice) -> Result<Verification, Error> {
        verify::verify(&self.receipt.source, self.pending.path(), self.kept_rows, device)
    }

    /// Gives the output its name. A model directory that it replaces has the name until then.
    ///
    /// # Errors
    /// Fails if the destination has changed in the meantime, or if a directory cannot be renamed.
    pub fn publish(self) -> Result<Receipt, Error> {
        self.pending.publish()?;
        Ok(self.receipt)
    }
}

/// Converts a model directory, or a checkpoint of a run. [`Conversion::publish`] gives the output its name. `progress` is called for every piece and can stop the conversion
/// with `ControlFlow::Break`.
///
/// # Errors
/// Fails if the source is not a complete model with finite weights, if the options do not fit it,
/// or if the output cannot be written; nothing is left behind.
pub fn convert(
    options: &Options,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Conversion, Error> {
    let start = Instant::now();
    refuse_overlap(&options.source, &options.out)?;
    check_destination(&options.out, options.force)?;
    let Source { file: source, weights, warning } =
        Source::open(&options.source, options.checkpoint.as_ref())?;
    let mut config =
        ModelConfig { moh: options.attention.configure(&source.config)?, ..source.config.clone() };
    if options.max_shard_bytes == 0 {
        return Err(Error::Option("the largest shard must have at least one byte".to_string()));
    }
    let expansion = plan_expansion(options, source.config.vocab_size)?;
    if let Some(expansion) = &expansion {
        config.vocab_size = expansion.num_rows();
    }

    let mut specs = Vec::new();
    for (name, shape) in tensor_shapes(&config) {
        let dtype = match options.dtype {
            Some(dtype) => dtype,
            None => weights.dtype(&name)?,
        };
        specs.push(TensorSpec { name, shape, dtype });
    }
    // The configuration names one type: that of the widest part of the model, its embedding.
    let dtype = options.dtype.or(specs.first().map(|spec| spec.dtype));
    let fields = source.to_json(&config, dtype);
    let first_tokenizer = first_tokenizer(options);
    let mut companions = match options.tokenizer.as_deref().or(first_tokenizer.as_deref()) {
        Some(tokenizer) => companion_files(&options.source, tokenizer)?,
        None => Vec::new(),
    };
    let card = match config.moh {
        None => None,
        Some(_) => {
            let origin = card::origin(options, &source.config, &config)?;
            companions.extend_from_slice(&origin.terms);
            Some(model_card::text(&origin, &config))
        }
    };
    let model = Contents {
        config: &fields,
        tensors: &specs,
        max_shard_bytes: options.max_shard_bytes,
        companions: &companions,
        card: card.as_deref(),
    };

    let total = specs.iter().map(TensorSpec::num_bytes).sum();
    let mut done = 0;
    let mut read_ahead = ReadAhead::start(&weights, &specs)?;
    let pending = prepare_model(&options.out, options.force, &model, &mut |spec, sink| {
        let mut counted = |bytes: &[u8]| {
            sink(bytes)?;
            done += bytes.len() as u64;
            match progress(Progress { bytes: done, total }) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(Error::Interrupted),
            }
        };
        let expansion = expansion.as_ref().filter(|_| has_vocabulary_rows(&spec.name));
        write_tensor(&weights, spec, expansion, &mut read_ahead, &mut counted)
    })?;

    let tensors = specs
        .iter()
        .zip(&pending.written().hashes)
        .map(|(spec, hash)| {
            let source_dtype = weights.dtype(&spec.name)?;
            let grown = expansion.is_some() && has_vocabulary_rows(&spec.name);
            let unchanged = !grown && source_dtype == spec.dtype;
            let blake3 = hash.to_hex().to_string();
            Ok(TensorReceipt {
                name: spec.name.clone(),
                source_dtype: source_dtype.name(),
                dtype: spec.dtype.name(),
                // A copied tensor's bytes were hashed on their way out of the source's mapping.
                source_blake3: unchanged.then(|| blake3.clone()),
                blake3,
                unchanged,
            })
        })
        .collect::<Result<_, Error>>()?;
    let length = config.max_position_embeddings;
    let flops = [&source.config, &config].map(|config| config.flops_per_token(length));
    let heads = config.num_attention_heads;
    let layers = 0..config.num_hidden_layers;
    let kept_rows = expansion.as_ref().map_or(source.config.vocab_size, Expansion::num_kept);
    let receipt = Receipt {
        source: match &options.checkpoint {
            Some(checkpoint) => checkpoint.run.checkpoint(checkpoint.step),
            None => options.source.clone(),
        },
        out: options.out.clone(),
        heads,
        shared_heads: layers.clone().map(|layer| config.layer_heads(layer).shared).collect(),
        routed_heads: layers.clone().map(|layer| config.routed_heads(layer)).collect(),
        routed_top_k: layers.map(|layer| config.layer_heads(layer).top_k).collect(),
        active_heads: config.active_heads(),
        rounding: options.attention.rounding(&source.config),
        parameters: config.num_parameters(),
        vocab_size: [source.config.vocab_size, config.vocab_size],
        flops_length: length,
        attention_flops_per_token: flops.map(|flops| flops.attention),
        flops_per_token: flops.map(|flops| Flops::forward(&flops)),
        bytes: pending.written().bytes,
        shards: pending.written().shards,
        read_back: pending.written().read_back,
        seconds: start.elapsed().as_secs_f64(),
        tensors,
        warning,
    };
    Ok(Conversion { receipt, kept_rows, pending })
}

/// The directory of the source's tokenizer; `None` for a run that has none.
fn first_tokenizer(options: &Options) -> Option<PathBuf> {
    match &options.checkpoint {
        Some(checkpoint) => checkpoint.run.tokenizer(),
        None => Some(options.source.clone()),
    }
}

/// Replacing the source, or a directory that contains it, would delete the input.
fn refuse_overlap(source: &Path, out: &Path) -> Result<(), Error> {
    if let (Ok(source), Ok(out)) = (source.canonicalize(), out.canonicalize())
        && source.starts_with(&out)
    {
        return Err(Error::file(&out, "holds the source model: choose another --out"));
    }
    Ok(())
}

fn plan_expansion(options: &Options, rows: usize) -> Result<Option<Expansion>, Error> {
    let expansion = match (&options.tokenizer, options.pad_vocab_to) {
        (None, None) => return Ok(None),
        (None, Some(multiple)) => Expansion::padding(rows, multiple)?,
        (Some(tokenizer), multiple) => {
            let multiple = multiple.unwrap_or(DEFAULT_MULTIPLE);
            let source = first_tokenizer(options).unwrap_or_else(|| options.source.clone());
            Expansion::plan(&source, tokenizer, rows, Some(multiple))?
        }
    };
    Ok(Some(expansion).filter(|expansion| !expansion.is_identity()))
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

    /// Ends the work on a piece of the source.
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

/// Elements per parallel task.
const PARALLEL_ELEMENTS: usize = 1 << 16;

/// Index of the first element that is infinite or not a number.
fn first_not_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    let blocks = bytes.par_chunks(PARALLEL_ELEMENTS * dtype.bytes()).enumerate();
    blocks.find_map_first(|(block, bytes)| {
        Some(block * PARALLEL_ELEMENTS + dtype.first_not_finite(bytes)?)
    })
}

#[cfg(test)]
mod tests;
