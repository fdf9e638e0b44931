//! The shape of a tiny model, for unit tests.

use std::path::Path;

use moh_hf::ConfigFile;
use moh_model::ModelConfig;

/// A dense Llama of two blocks, two heads of width 4 and sequences of 8 tokens.
pub fn tiny_model(kv_heads: usize, vocab_size: usize, tied: bool) -> ModelConfig {
    let fields = serde_json::json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": kv_heads, "vocab_size": vocab_size,
        "max_position_embeddings": 8, "tie_word_embeddings": tied,
    });
    ConfigFile::from_value(fields, Path::new("config.json")).unwrap().config
}
