//! The source's logits by candle's models, which share no code with this program's: a mistake in one is
//! not repeated in the other.

use std::collections::HashMap;

use candle_core::{DType as CandleType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::llama::{Cache, Config, Llama, Llama3RopeConfig, Llama3RopeType};
use candle_transformers::models::qwen3;
use moh_kernels::open_device::available_memory;
use moh_model::tensors::tensor_shapes;
use moh_model::{Architecture, ModelConfig, RopeScaling};

use crate::Error;

/// Returns why candle cannot compute a model.
pub(crate) fn obstacle(config: &ModelConfig) -> Option<&'static str> {
    if config.moh.is_some() {
        return Some("the source is a Mixture-of-Head model");
    }
    let other_width = config.head_dim * config.num_attention_heads != config.hidden_size;
    match config.architecture {
        Architecture::Llama if other_width => {
            return Some("head_dim is not hidden_size / num_attention_heads");
        }
        Architecture::Llama | Architecture::Qwen3 => {}
    }
    match (config.rope.scaling, config.architecture) {
        (None, _) | (Some(RopeScaling::Llama3(_)), Architecture::Llama) => {}
        _ => return Some("the model scales RoPE"),
    }
    let bytes = config.num_parameters().saturating_mul(4);
    match available_memory() {
        Some(available) if bytes > available => Some("its weights do not fit into memory in f32"),
        _ => None,
    }
}

/// Returns the logits after the last of `ids`, `[V]`, of a model. `read` reads its tensors by name.
pub(crate) fn last_logits(
    config: &ModelConfig,
    ids: &[u32],
    read: impl Fn(&str, &mut [f32]) -> Result<(), Error>,
) -> Result<Vec<f32>, Error> {
    let mut tensors = HashMap::new();
    for (name, shape) in tensor_shapes(config) {
        let mut values = vec![0f32; shape.iter().product()];
        read(&name, &mut values)?;
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).map_err(failed)?;
        tensors.insert(name, tensor);
    }
    logits(config, ids, tensors).map_err(failed)
}

fn logits(
    config: &ModelConfig,
    ids: &[u32],
    tensors: HashMap<String, Tensor>,
) -> candle_core::Result<Vec<f32>> {
    let weights = VarBuilder::from_tensors(tensors, CandleType::F32, &Device::Cpu);
    let input = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu)?;
    let logits = match config.architecture {
        Architecture::Llama => {
            let config = llama_config(config, ids.len());
            let mut cache = Cache::new(false, CandleType::F32, &config, &Device::Cpu)?;
            Llama::load(weights, &config)?.forward(&input, 0, &mut cache)?
        }
        Architecture::Qwen3 => {
            let config = qwen3_config(config, ids.len());
            qwen3::ModelForCausalLM::new(&config, weights)?.forward(&input, 0)?
        }
    };
    logits.flatten_all()?.to_vec1()
}

fn failed(error: candle_core::Error) -> Error {
    Error::Option(format!("candle could not compute the source: {error}; use --no-verify"))
}

/// Returns the configuration for `positions` positions: candle precomputes a table of that length.
fn llama_config(config: &ModelConfig, positions: usize) -> Config {
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
        rope_scaling: match config.rope.scaling {
            Some(RopeScaling::Llama3(scaling)) => Some(Llama3RopeConfig {
                factor: scaling.factor as f32,
                low_freq_factor: scaling.low_freq_factor as f32,
                high_freq_factor: scaling.high_freq_factor as f32,
                original_max_position_embeddings: scaling.original_max_position_embeddings,
                rope_type: Llama3RopeType::Llama3,
            }),
            _ => None,
        },
        max_position_embeddings: positions,
        tie_word_embeddings: config.tie_word_embeddings,
    }
}

/// Returns the configuration of a Qwen3 model, as [`llama_config`] does for a Llama model.
fn qwen3_config(config: &ModelConfig, positions: usize) -> qwen3::Config {
    qwen3::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        head_dim: config.head_dim,
        attention_bias: false,
        num_key_value_heads: config.num_key_value_heads,
        max_position_embeddings: positions,
        sliding_window: None,
        max_window_layers: 0,
        tie_word_embeddings: config.tie_word_embeddings,
        rope_theta: config.rope.theta,
        rms_norm_eps: config.rms_norm_eps,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    }
}
