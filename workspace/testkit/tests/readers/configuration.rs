//! `config.json`.

use moh_hf::ConfigFile;
use moh_testkit::fuzz::Target;

use crate::{ALLOCATOR, outcome, repository};

#[test]
fn a_mutated_configuration_is_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let mixture = br#"{"model_type": "moh_llama", "architectures": ["MohLlamaForCausalLM"], "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}, "tie_word_embeddings": true, "hidden_act": "silu",
        "moh_router": "query-norm", "moh_shared_heads": [1, 2], "moh_routed_top_k": 1, "eos_token_id": [1, 2]}"#;
    let target = Target {
        name: "config",
        seeds: &[repository("recipes/quickstart/config.json"), mixture.to_vec()],
        memory: 16 << 20,
        allocator: &ALLOCATOR,
    };
    target.run(|input| {
        std::fs::write(&path, input).unwrap();
        outcome(ConfigFile::read(&path))
    });
}
