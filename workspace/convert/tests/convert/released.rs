//! The released MoH-LLaMA3-8B, `Chat-UniVi/MoH-LLaMA3-8B` on the hub, in small.
//!
//! Its `config.json` is a Llama's, and its own code has the head counts: half of the heads shared, a quarter
//! chosen. There is a pickled shard for each layer and another for the other tensors. A pull request adds the same
//! tensors as safetensors. The tokenizer is sentencepiece's.

use std::fs;
use std::path::Path;

use moh_hf::weight_files::{INDEX_FILE, WEIGHTS_FILE};
use moh_hf::{ConfigFile, write_random_model};
use moh_kernels::DType;
use moh_testkit::programs::{assert_has, exits, names, read_json};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};

use crate::moh_convert;

const LAYERS: usize = 3;

/// Returns the fields and values of the released `config.json`, with other sizes.
fn released_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"},
        "model_type": "llama", "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "hidden_act": "silu", "hidden_size": 128, "initializer_range": 0.02,
        "intermediate_size": 48, "max_position_embeddings": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-05,
        "rotary_percent": 1.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_cache": true, "transformers_version": "4.33.1", "rope_theta": 500000,
    })
}

/// Writes a random model with the released model's files to `dir`.
fn write_released(dir: &Path) {
    let config = released_config();
    let file = ConfigFile::from_value(config.clone(), Path::new("config.json")).unwrap();
    write_random_model(dir, &file, DType::BF16, u64::MAX, 1).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let single = dir.join(WEIGHTS_FILE);
    let bytes = fs::read(&single).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let (mut map, mut total) = (Map::new(), 0);
    for number in 1..=LAYERS + 1 {
        let shard = format!("pytorch_model-{number:05}-of-{:05}.safetensors", LAYERS + 1);
        let layer = |name: &str| {
            let layer = name.strip_prefix("model.layers.")?.split('.').next()?;
            Some(layer.parse::<usize>().unwrap() + 1)
        };
        let of_shard: Vec<(String, TensorView<'_>)> = tensors
            .tensors()
            .into_iter()
            .filter(|(name, _)| layer(name).unwrap_or(LAYERS + 1) == number)
            .collect();
        for (name, tensor) in &of_shard {
            map.insert(name.clone(), shard.clone().into());
            total += tensor.data().len();
        }
        fs::write(dir.join(shard), safetensors::serialize(of_shard, None).unwrap()).unwrap();
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    fs::write(dir.join(INDEX_FILE), index.to_string()).unwrap();
    fs::remove_file(single).unwrap();
    let token = |text: &str| {
        json!({"__type": "AddedToken", "content": text, "lstrip": false, "normalized": false,
               "rstrip": false, "single_word": false})
    };
    let special =
        json!({"bos_token": token("<s>"), "eos_token": token("</s>"), "unk_token": token("<unk>")});
    let mut tokenizer = special.clone();
    tokenizer["tokenizer_class"] = "LlamaTokenizer".into();
    tokenizer["pad_token"] = Value::Null;
    tokenizer["add_bos_token"] = false.into();
    let generation = json!({"_from_model_config": true, "bos_token_id": 1, "eos_token_id": 2,
                            "pad_token_id": 0, "transformers_version": "4.33.1"});
    for (name, text) in [
        ("special_tokens_map.json", special.to_string()),
        ("tokenizer_config.json", tokenizer.to_string()),
        ("generation_config.json", generation.to_string()),
        ("tokenizer.model", "not read".to_owned()),
        ("modeling_llama.py", "raise SystemExit\n".to_owned()),
        ("pytorch_model.bin.index.json", "{}".to_owned()),
        ("README.md", "---\nlicense: apache-2.0\n---\n".to_owned()),
    ] {
        fs::write(dir.join(name), text).unwrap();
    }
}

#[test]
fn the_released_model_becomes_one_of_ours() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_released(&root.join("MoH-LLaMA3-8B"));
    let line = "--from MoH-LLaMA3-8B --shared-heads 16 --routed-top-k 8 --out ours";
    let (stdout, stderr) = exits(moh_convert(root, &[]).args(line.split(' ')), 0);
    assert!(stderr.is_empty(), "{stderr}");
    let parts = ["16 shared + 8 of 16 routed = 24 of 32 active", "30 of 30 unchanged, bit by bit"];
    assert_has(&stdout, &parts);
    assert_has(&stdout, &["logits with all heads on are equal to the source's"]);

    let fields = read_json(&root.join("ours/config.json"));
    // Another program would run the released code, which only has the head counts of 32 heads.
    assert!(fields.get("auto_map").is_none_or(|map| !map.to_string().contains("modeling_llama.")));
    let expected = [
        ("architectures", json!(["MohLlamaForCausalLM"])),
        ("model_type", json!("moh_llama")),
        ("moh_shared_heads", json!(16)),
        ("moh_routed_top_k", json!(8)),
        ("rotary_percent", json!(1.0)),
        ("torch_dtype", json!("bfloat16")),
        ("rope_theta", json!(500000)),
    ];
    for (key, value) in expected {
        assert_eq!(fields.get(key), Some(&value), "{key}");
    }
    let files = names(&root.join("ours"));
    assert!(
        !files.iter().any(|name| name == "modeling_llama.py" || name.ends_with("bin.index.json"))
    );
    for name in ["tokenizer.model", "tokenizer_config.json", "generation_config.json"] {
        assert!(files.iter().any(|found| found == name), "{name} of {files:?}");
    }
}
