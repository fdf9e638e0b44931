//! The source's logits by candle's Llama, an implementation that shares nothing with this program's:
//! what both get right, neither got right by copying a mistake.

use std::collections::HashMap;

use candle_core::{DType as CandleType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, Llama3RopeConfig, Llama3RopeType};
use moh_hf::WeightFiles;
use moh_kernels::DType;
use moh_model::ModelConfig;
use moh_model::tensors::tensor_shapes;

use crate::Error;

/// Why candle's Llama cannot compute a model.
pub(crate) fn obstacle(config: &ModelConfig) -> Option<&'static str> {
    if config.moh.is_some() {
        return Some("the source is a Mixture-of-Head model");
    }
    if config.head_dim * config.num_attention_heads != config.hidden_size {
        return Some("head_dim is not hidden_size / num_attention_heads");
    }
    let bytes = config.num_parameters().saturating_mul(4);
    match available_bytes() {
        Some(available) if bytes > available => Some("its weights do not fit into memory in f32"),
        _ => None,
    }
}

/// Logits of the last of `ids`, `[V]`; each tensor is rounded to a type first.
pub(crate) fn last_logits(
    weights: &WeightFiles,
    config: &ModelConfig,
    ids: &[u32],
    rounded: impl Fn(&str) -> Result<DType, moh_hf::Error>,
) -> Result<Vec<f32>, Error> {
    let mut tensors = HashMap::new();
    for (name, shape) in tensor_shapes(config) {
        let mut values = vec![0f32; shape.iter().product()];
        weights.read_f32(&name, &mut values)?;
        crate::verify::round(rounded(&name)?, &mut values);
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).map_err(failed)?;
        tensors.insert(name, tensor);
    }
    let config = candle_config(config, ids.len());
    let weights = VarBuilder::from_tensors(tensors, CandleType::F32, &Device::Cpu);
    let compute = || {
        let llama = Llama::load(weights, &config)?;
        let mut cache = Cache::new(false, CandleType::F32, &config, &Device::Cpu)?;
        let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu)?;
        llama.forward(&ids, 0, &mut cache)?.flatten_all()?.to_vec1()
    };
    compute().map_err(failed)
}

fn failed(error: candle_core::Error) -> Error {
    Error::Option(format!("candle could not compute the source: {error}; use --no-verify"))
}

/// The configuration for `positions` positions, of which candle keeps a table.
fn candle_config(config: &ModelConfig, positions: usize) -> Config {
    Config {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        vocab_size: config.vocab_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        num_key_value_heads: config.num_key_value_heads,
        use_flash_attn: false,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.rope.theta as f32,
        bos_token_id: config.bos_token_id,
        eos_token_id: None,
        rope_scaling: config.rope.scaling.map(|scaling| Llama3RopeConfig {
            factor: scaling.factor as f32,
            low_freq_factor: scaling.low_freq_factor as f32,
            high_freq_factor: scaling.high_freq_factor as f32,
            original_max_position_embeddings: scaling.original_max_position_embeddings,
            rope_type: Llama3RopeType::Llama3,
        }),
        max_position_embeddings: positions,
        tie_word_embeddings: config.tie_word_embeddings,
    }
}

/// Memory that this machine has free, where it says so.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}
