//! `config.json`, `tokenizer.json` and recipes.

use std::path::Path;

use moh_hf::ConfigFile;
use moh_recipe::Recipe;
use moh_text::TextTokenizer;

use crate::{outcome, repository, run_on_file, target};

#[test]
fn a_mutated_configuration_is_read_or_refused() {
    let mixture = br#"{"model_type": "moh_llama", "architectures": ["MohLlamaForCausalLM"], "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}, "tie_word_embeddings": true, "hidden_act": "silu",
        "moh_router": "query-norm", "moh_shared_heads": [1, 2], "moh_routed_top_k": 1, "eos_token_id": [1, 2]}"#;
    let seeds = &[repository("recipes/quickstart/config.json"), mixture.to_vec()];
    run_on_file(target("config", seeds, 16), "config.json", |path| outcome(ConfigFile::read(path)));
}

#[test]
fn a_mutated_tokenizer_is_read_or_refused() {
    let seeds = &[repository("recipes/quickstart/tokenizer.json")];
    run_on_file(target("tokenizer", seeds, 64), "tokenizer.json", |path| {
        let tokenizer = TextTokenizer::load(path).map_err(|error| error.to_string())?;
        outcome(tokenizer.encode("One day, a boat."))
    });
}

#[test]
fn a_mutated_recipe_is_read_or_refused() {
    let seeds = ["quickstart", "moh-llama3-8b", "stories260k"]
        .map(|name| repository(&format!("recipes/{name}.toml")));
    target("recipe", &seeds, 64).run(|input| {
        let text = String::from_utf8_lossy(input);
        outcome(Recipe::parse(&text, Path::new("recipe.toml"), &[]))
    });
}
