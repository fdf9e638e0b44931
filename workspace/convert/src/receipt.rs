//! The results of a conversion, which `moh-convert --receipt` writes.

use std::path::PathBuf;
use std::time::Instant;

use moh_hf::model_directory::{TensorSpec, Written};
use moh_kernels::DType;
use moh_model::flops::Flops;
use moh_model::{HeadCounts, ModelConfig};
use serde::Serialize;

use crate::convert::Plan;
use crate::{CalibrationReceipt, Error};

/// The results of a conversion.
#[derive(Debug, Clone, Serialize)]
pub struct Receipt {
    /// The directory that was read.
    pub source: PathBuf,
    /// The directory that was written.
    pub out: PathBuf,
    /// Query heads of a block.
    pub heads: usize,
    /// Shared heads. For a dense model, all heads.
    pub shared_heads: HeadCounts,
    /// Routed heads.
    pub routed_heads: HeadCounts,
    /// Active routed heads per token.
    #[serde(skip)]
    pub routed_top_k: HeadCounts,
    /// Active heads per token.
    pub active_heads: HeadCounts,
    /// The share of active heads after rounding, if the requested share was not possible.
    #[serde(skip)]
    pub rounding: Option<String>,
    /// The measurements of the source, and the choices from them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationReceipt>,
    /// Parameters of the output. A tied head counts once.
    pub parameters: u64,
    /// Rows of the vocabulary before and after.
    pub vocab_size: [usize; 2],
    /// Sequence length of the operation counts below: `max_position_embeddings`.
    pub flops_length: usize,
    /// Forward FLOPs of the attention core per token, before and after.
    pub attention_flops_per_token: [f64; 2],
    /// Forward FLOPs of the whole model per token, before and after.
    pub flops_per_token: [f64; 2],
    /// The remaining share of forward FLOPs, at some lengths.
    #[serde(skip)]
    pub flops_left: Vec<(usize, f64)>,
    /// Bytes of the output's tensors.
    pub bytes: u64,
    /// Weight files.
    pub shards: usize,
    /// Wall-clock time.
    pub seconds: f64,
    /// Every tensor of the output.
    pub tensors: Vec<TensorReceipt>,
    /// A sentence for the user about the source's files or the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// The conversion of one tensor.
#[derive(Debug, Clone, Serialize)]
pub struct TensorReceipt {
    /// Its name.
    pub name: String,
    /// Element type in the source. `None` for a tensor that the source lacks.
    pub source_dtype: Option<&'static str>,
    /// Element type in the output.
    pub dtype: &'static str,
    /// BLAKE3 of the source's bytes, if they were copied unchanged.
    pub source_blake3: Option<String>,
    /// BLAKE3 of the output's bytes, as they were written.
    pub blake3: String,
    /// Whether the output has the source's bytes.
    pub unchanged: bool,
    /// Whether its values were computed by a calibration.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub refitted: bool,
}

/// A typical length of texts, at which attention is a small part of a model's work.
const SHORT: usize = 512;

/// Returns the share of a model's forward FLOPs that remains after a conversion, at a short and at its longest length.
fn flops_left(before: &ModelConfig, after: &ModelConfig) -> Vec<(usize, f64)> {
    let longest = after.max_position_embeddings;
    let mut lengths = vec![SHORT.min(longest), longest];
    lengths.dedup();
    let forward = |config: &ModelConfig, length| Flops::forward(&config.flops_per_token(length));
    let left = |length| (length, forward(after, length) / forward(before, length));
    lengths.into_iter().map(left).collect()
}

impl Receipt {
    /// Returns whether tokens use fewer heads than in the source.
    pub fn loses_heads(&self) -> bool {
        let [before, after] = self.attention_flops_per_token;
        after < before
    }

    /// Describes the output of `plan`, with the time since `start`.
    pub(crate) fn new(plan: &Plan<'_>, written: &Written, start: Instant) -> Result<Self, Error> {
        let Plan { options, source, config, tensors, .. } = plan;
        let original: &ModelConfig = &source.file.config;
        let tensors = tensors.iter().zip(&written.hashes);
        let tensors = tensors.map(|(spec, hash)| TensorReceipt::new(plan, spec, hash));
        let tensors = tensors.collect::<Result<_, Error>>()?;
        let length = config.max_position_embeddings;
        let flops = [original, config].map(|config| config.flops_per_token(length));
        let layers = 0..config.num_hidden_layers;
        // Measured heads do not come from a share.
        let request = options.attention.request().filter(|_| options.calibrated.is_none());
        let ModelConfig { num_attention_heads: heads, num_key_value_heads: kv_heads, .. } =
            *original;
        let moh = original.moh.as_ref();
        Ok(Receipt {
            source: match &options.checkpoint {
                Some(checkpoint) => checkpoint.run.checkpoint(checkpoint.step),
                None => options.source.clone(),
            },
            out: options.out.clone(),
            heads,
            shared_heads: layers
                .clone()
                .map(|layer| config.layer_heads(layer).shared.len())
                .collect(),
            routed_heads: layers.clone().map(|layer| config.routed_heads(layer)).collect(),
            routed_top_k: layers.map(|layer| config.layer_heads(layer).top_k).collect(),
            active_heads: config.active_heads(),
            rounding: request.and_then(|request| request.rounding(heads, kv_heads, moh)),
            calibration: options.calibrated.as_ref().map(|calibrated| calibrated.receipt()),
            parameters: config.num_parameters(),
            vocab_size: [original.vocab_size, config.vocab_size],
            flops_length: length,
            attention_flops_per_token: flops.map(|flops| flops.attention),
            flops_per_token: flops.map(|flops| Flops::forward(&flops)),
            flops_left: flops_left(original, config),
            bytes: written.bytes,
            shards: written.shards,
            seconds: start.elapsed().as_secs_f64(),
            tensors,
            warning: warning(plan),
        })
    }

    /// Returns the number of tensors copied unchanged.
    pub fn num_unchanged(&self) -> usize {
        self.tensors.iter().filter(|tensor| tensor.unchanged).count()
    }
}

/// Returns a warning about the source's files, the tokenizers' files, or a dense model of refitted projections.
fn warning(plan: &Plan<'_>) -> Option<String> {
    let refitted = plan.is_dense_of_refitted().then(|| {
        format!(
            "{}: its output projections were refitted to the heads that tokens compute: with all heads it is \
             another model than the one it was converted from",
            plan.options.source.display()
        )
    });
    let of_tokenizers = plan.expansion.iter().flat_map(|expansion| expansion.remarks.clone());
    let of_source = plan.source.warning.clone().into_iter();
    let warnings: Vec<String> = of_source.chain(of_tokenizers).chain(refitted).collect();
    (!warnings.is_empty()).then(|| warnings.join("; "))
}

impl TensorReceipt {
    fn new(plan: &Plan<'_>, spec: &TensorSpec, hash: &blake3::Hash) -> Result<Self, Error> {
        let source_dtype = match plan.added.contains(&spec.name) {
            true => None,
            false => Some(plan.source.weights.dtype(&spec.name)?),
        };
        let refitted = plan.has_refitted(&spec.name);
        let unchanged = plan.expansion_of(&spec.name).is_none()
            && source_dtype == Some(spec.dtype)
            && !refitted;
        let blake3 = hash.to_hex().to_string();
        Ok(TensorReceipt {
            name: spec.name.clone(),
            source_dtype: source_dtype.map(DType::name),
            dtype: spec.dtype.name(),
            // A copied tensor's bytes were hashed as they were read from the source's mapping.
            source_blake3: unchanged.then(|| blake3.clone()),
            blake3,
            unchanged,
            refitted,
        })
    }
}
