//! The results of a conversion, which `moh-convert --receipt` writes.

use std::path::PathBuf;
use std::time::Instant;

use moh_hf::model_directory::{TensorSpec, Written};
use moh_kernels::DType;
use moh_model::HeadCounts;
use moh_model::flops::Flops;
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
    /// What is weak about the counts that the share of active heads became.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weakness: Option<String>,
    /// What was measured of the source, and chosen by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationReceipt>,
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
    /// Wall-clock time.
    pub seconds: f64,
    /// Every tensor of the output.
    pub tensors: Vec<TensorReceipt>,
    /// What a user should know about the source's files, or about the output, in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// The conversion of one tensor.
#[derive(Debug, Clone, Serialize)]
pub struct TensorReceipt {
    /// Its name.
    pub name: String,
    /// Element type in the source; `None` of a tensor that it does not have.
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

impl Receipt {
    /// Describes the output of `plan` since `start`.
    pub(crate) fn new(plan: &Plan<'_>, written: &Written, start: Instant) -> Result<Self, Error> {
        let Plan { options, source, config, tensors, .. } = plan;
        let original = &source.file.config;
        let tensors = tensors.iter().zip(&written.hashes);
        let tensors = tensors.map(|(spec, hash)| TensorReceipt::new(plan, spec, hash));
        let tensors = tensors.collect::<Result<_, Error>>()?;
        let length = config.max_position_embeddings;
        let flops = [original, config].map(|config| config.flops_per_token(length));
        let layers = 0..config.num_hidden_layers;
        Ok(Receipt {
            source: match &options.checkpoint {
                Some(checkpoint) => checkpoint.run.checkpoint(checkpoint.step),
                None => options.source.clone(),
            },
            out: options.out.clone(),
            heads: config.num_attention_heads,
            shared_heads: layers
                .clone()
                .map(|layer| config.layer_heads(layer).shared.len())
                .collect(),
            routed_heads: layers.clone().map(|layer| config.routed_heads(layer)).collect(),
            routed_top_k: layers.map(|layer| config.layer_heads(layer).top_k).collect(),
            active_heads: config.active_heads(),
            rounding: options.attention.rounding(original).filter(|_| options.calibrated.is_none()),
            weakness: options.attention.weakness(original).filter(|_| options.calibrated.is_none()),
            calibration: options.calibrated.as_ref().map(|calibrated| calibrated.receipt()),
            parameters: config.num_parameters(),
            vocab_size: [original.vocab_size, config.vocab_size],
            flops_length: length,
            attention_flops_per_token: flops.map(|flops| flops.attention),
            flops_per_token: flops.map(|flops| Flops::forward(&flops)),
            bytes: written.bytes,
            shards: written.shards,
            seconds: start.elapsed().as_secs_f64(),
            tensors,
            warning: warning(plan),
        })
    }

    /// Number of tensors copied unchanged.
    pub fn num_unchanged(&self) -> usize {
        self.tensors.iter().filter(|tensor| tensor.unchanged).count()
    }

    /// Number of tensors with another element type than the source's.
    pub fn num_converted(&self) -> usize {
        let is_converted = |tensor: &&TensorReceipt| {
            tensor.source_dtype.is_some_and(|dtype| dtype != tensor.dtype) && !tensor.refitted
        };
        self.tensors.iter().filter(is_converted).count()
    }

    /// Number of the source's tensors whose values a calibration computed anew.
    pub fn num_refitted(&self) -> usize {
        let is_refitted =
            |tensor: &&TensorReceipt| tensor.refitted && tensor.source_dtype.is_some();
        self.tensors.iter().filter(is_refitted).count()
    }

    /// Number of tensors that a calibration computed and the source does not have.
    pub fn num_fitted(&self) -> usize {
        let is_fitted = |tensor: &&TensorReceipt| tensor.refitted && tensor.source_dtype.is_none();
        self.tensors.iter().filter(is_fitted).count()
    }

    /// Number of tensors that the source does not have and no calibration computed, which are zeros.
    pub fn num_added(&self) -> usize {
        self.tensors.iter().filter(|it| it.source_dtype.is_none() && !it.refitted).count()
    }
}

/// What a user should know about the source's files, the tokenizers' files, and a dense model of refitted projections.
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
            // A copied tensor's bytes were hashed on their way out of the source's mapping.
            source_blake3: unchanged.then(|| blake3.clone()),
            blake3,
            unchanged,
            refitted,
        })
    }
}
