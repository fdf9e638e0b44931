use moh_model::{
    Architecture, HeadCounts, Llama3Scaling, MohConfig, RopeConfig, RopeScaling, RouterKind,
    SharedHeadSets, YarnScaling,
};

use super::*;

/// Returns the file of a small Llama, with a vocabulary of 6 tokens of 4 elements.
pub(crate) fn small_llama(tied: bool) -> ConfigFile {
    read(json!({
        "model_type": "llama", "vocab_size": 6, "hidden_size": 4, "intermediate_size": 6,
        "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": tied, "eos_token_id": 2,
    }))
    .unwrap()
}

/// Returns a `config.json` as transformers 4 writes it, with one field replaced (null removes it).
fn with(key: &str, value: Value) -> Result<ConfigFile, String> {
    let mut fields = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "attention_bias": false, "mlp_bias": false, "hidden_act": "silu",
        "vocab_size": 160, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": null, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": false, "initializer_range": 0.02, "unknown_to_us": {"kept": 1},
    });
    if value.is_null() {
        fields.as_object_mut().unwrap().shift_remove(key);
    } else {
        fields[key] = value;
    }
    read(fields)
}

fn read(fields: Value) -> Result<ConfigFile, String> {
    ConfigFile::from_value(fields, Path::new("m/config.json")).map_err(|error| error.to_string())
}

fn refusal(key: &str, value: Value) -> String {
    let message = with(key, value).unwrap_err();
    assert!(message.starts_with("m/config.json: "), "{message}");
    assert!(!message.contains('\n'), "{message}");
    message["m/config.json: ".len()..].to_string()
}

fn moh(
    router: &str,
    shared: impl Into<Value>,
    top_k: impl Into<Value>,
) -> Result<ConfigFile, String> {
    let mut fields = Value::Object(with("x", json!(1)).unwrap().fields);
    fields["architectures"] = json!(["MohLlamaForCausalLM"]);
    fields["model_type"] = json!("moh_llama");
    fields["moh_router"] = json!(router);
    fields["moh_shared_heads"] = shared.into();
    fields["moh_routed_top_k"] = top_k.into();
    read(fields)
}

/// Returns the file without `rope_theta` and with these entries.
fn with_rope(entries: Value) -> Result<ConfigFile, String> {
    let mut fields = with("rope_theta", Value::Null).unwrap().fields;
    fields.extend(entries.as_object().unwrap().clone());
    read(Value::Object(fields))
}

#[test]
fn rope_is_read_as_transformers_reads_it() {
    let linear = |factor| Some(RopeScaling::Linear { factor });
    let llama3 = |original_max_position_embeddings| {
        let (factor, low_freq_factor, high_freq_factor) = (8.0, 1.0, 4.0);
        Some(RopeScaling::Llama3(Llama3Scaling {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        }))
    };
    let three = json!({
        "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let plus = |table: &Value, key: &str, value: Value| {
        let mut table = table.clone();
        table[key] = value;
        table
    };
    let scaled = json!({"type": "linear", "factor": 2});
    let default = json!({"rope_type": "default", "rope_theta": 20.5});
    for (entries, theta, scaling) in [
        (json!({}), 1e4, None),
        (json!({"rope_theta": 7, "rope_scaling": null}), 7.0, None),
        (json!({"rope_theta": 7, "rope_parameters": {}, "rope_scaling": {}}), 7.0, None),
        (json!({"rope_theta": 7, "rope_parameters": default}), 20.5, None),
        (json!({"rope_theta": 7, "rope_scaling": three}), 7.0, llama3(64)),
        (json!({"rope_parameters": plus(&three, "rope_theta", json!(7.5))}), 7.5, llama3(64)),
        (json!({"rope_scaling": plus(&three, "rope_theta", json!(7.5))}), 7.5, llama3(64)),
        (json!({"rope_scaling": scaled, "rope_parameters": default}), 1e4, linear(2.0)),
        (json!({"rope_scaling": {}, "rope_parameters": scaled, "rope_theta": 7}), 7.0, linear(2.0)),
        (json!({"rope_scaling": plus(&scaled, "rope_type", json!("default"))}), 1e4, None),
        (json!({"rope_scaling": three, "original_max_position_embeddings": 32}), 1e4, llama3(32)),
    ] {
        let file = with_rope(entries.clone()).unwrap();
        assert_eq!(file.config.rope, RopeConfig { theta, scaling }, "{entries}");
        // The written file reads back the same, also for readers that use only one table.
        let written = file.to_json(&file.config, None);
        for ignored in ["", "rope_parameters", "rope_scaling"] {
            let mut fields = written.clone();
            let other = ["rope_scaling", "rope_parameters"].map(|key| fields.get(key).cloned());
            let alone = other.iter().flatten().filter(|table| table.is_object()).count() < 2;
            if ignored == "rope_scaling" && alone {
                continue;
            }
            fields.shift_remove(ignored);
            let found = read(Value::Object(fields)).unwrap().config.rope;
            assert_eq!(found, file.config.rope, "{entries} without {ignored:?}");
        }
    }
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128});
    let attention = 0.1 * 4f64.ln() + 1.0;
    let many = json!({"mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 16, "truncate": false});
    let quotient = (0.2 * 4f64.ln() + 1.0) / (0.05 * 4f64.ln() + 1.0);
    for (more, factor, [beta_fast, attention_factor], truncate) in [
        (json!({}), 4.0, [32.0, attention], true),
        (json!({"factor": null}), 4.0, [32.0, attention], true),
        (json!({"attention_factor": 1.5}), 4.0, [32.0, 1.5], true),
        (json!({"mscale": 2.0, "mscale_all_dim": 0}), 4.0, [32.0, attention], true),
        (json!({"factor": 0.5, "truncate": null}), 0.5, [32.0, 1.0], false),
        (many, 4.0, [16.0, quotient], false),
    ] {
        let mut table = yarn.clone();
        table.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let found = with_rope(json!({"rope_scaling": table})).unwrap().config.rope;
        let (original_max_position_embeddings, beta_slow) = (128, 1.0);
        let expected = YarnScaling {
            factor,
            original_max_position_embeddings,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate,
        };
        assert_eq!(found, RopeConfig { theta: 1e4, scaling: Some(RopeScaling::Yarn(expected)) });
    }
    for (entries, expected) in [
        (json!({"rope_theta": null}), "rope_theta is null"),
        (
            json!({"rope_theta": 7, "rope_scaling": {"rope_theta": null}}),
            "rope_scaling.rope_theta is",
        ),
        (json!({"rope_parameters": {"rope_theta": 0}}), "rope_parameters.rope_theta = 0.0"),
        (json!({"rope_theta": 1e308}), "rope_theta = 1e308: must be above 0 and within"),
        (
            json!({"rope_parameters": {"full_attention": default}}),
            "rope_parameters.full_attention is a",
        ),
        (json!({"rope_scaling": [1]}), "rope_scaling: expected an object"),
        (json!({"rope_scaling": {"rope_type": "dynamic"}}), "rope_scaling.rope_type = \"dynamic\""),
        (json!({"rope_scaling": {"type": "longrope"}}), "rope_scaling.type = \"longrope\": must"),
        (json!({"rope_scaling": {"type": null}}), "rope_scaling.type is missing"),
        (json!({"rope_scaling": {"rope_type": "llama3"}}), "rope_scaling.factor is missing"),
        (json!({"rope_scaling": {"rope_type": "yarn"}}), "rope_scaling.factor is missing"),
        (
            json!({"rope_theta": 1, "rope_scaling": yarn}),
            "rope_scaling.rope_theta = 1: must be above",
        ),
        (
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
            "rope_parameters.partial_rotary",
        ),
    ] {
        let message = with_rope(entries).unwrap_err();
        assert!(message.starts_with(&format!("m/config.json: {expected}")), "{message}");
    }
}

#[test]
fn absent_fields_take_hugging_faces_defaults() {
    let config = with("num_key_value_heads", Value::Null).unwrap().config;
    assert_eq!(config.num_key_value_heads, 8);
    let config = with("hidden_size", json!(64)).unwrap();
    let mut fields = config.fields;
    fields.shift_remove("head_dim");
    for key in ["rope_theta", "rms_norm_eps", "eos_token_id", "bos_token_id", "hidden_act"] {
        fields.shift_remove(key);
    }
    let config = read(Value::Object(fields)).unwrap().config;
    assert_eq!((config.head_dim, config.rope.theta, config.rms_norm_eps), (8, 1e4, 1e-6));
    assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![]));
}

#[test]
fn the_end_token_is_one_or_a_list() {
    assert_eq!(with("eos_token_id", json!(7)).unwrap().config.eos_token_ids, [7]);
    assert_eq!(with("eos_token_id", json!([7, 9])).unwrap().config.eos_token_ids, [7, 9]);
    assert!(refusal("eos_token_id", json!("</s>")).starts_with("eos_token_id: expected a token"));
    assert!(refusal("eos_token_id", json!([-1])).starts_with("eos_token_id: expected a token"));
}

#[test]
fn other_architectures_are_refused() {
    for (key, value, expected) in [
        ("model_type", json!("mistral"), "model_type = \"mistral\": only Llama"),
        ("model_type", json!("moh_llama"), "architectures contradicts model_type"),
        ("model_type", json!(3), "model_type: expected a string, found 3"),
        ("architectures", json!(["Qwen2ForCausalLM"]), "architectures = [\"Qwen2ForCausalLM\"]"),
        ("architectures", json!("LlamaForCausalLM"), "architectures: expected a list"),
        ("hidden_act", json!("gelu"), "hidden_act = \"gelu\": other activations"),
        ("attention_bias", json!(true), "attention_bias = true"),
        ("mlp_bias", json!(true), "mlp_bias = true"),
        ("quantization_config", json!({"bits": 4}), "quantization_config = an object: quantised"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor = 0.5"),
        ("is_causal", json!(false), "is_causal = false: only causal"),
        ("sliding_window", json!(64), "sliding_window = 64: sliding windows"),
        ("attention_chunk_size", json!(64), "attention_chunk_size = 64: attention in chunks"),
        ("layer_types", json!(["full_attention", "x"]), "layer_types has \"x\": every layer"),
        ("per_layer_config", json!({"0": {}}), "per_layer_config = an object: layers of"),
        ("rms_norm_eps", json!(1e300), "rms_norm_eps = 1e300: must be above 0 and within"),
    ] {
        let message = refusal(key, value);
        assert!(message.starts_with(expected), "{message}");
    }
    let mut fields = with("x", json!(1)).unwrap().fields;
    fields.shift_remove("model_type");
    assert!(read(Value::Object(fields.clone())).is_ok());
    fields.shift_remove("architectures");
    let message = read(Value::Object(fields)).unwrap_err();
    assert!(message.contains("model_type is missing"), "{message}");
}

#[test]
fn sizes_that_make_no_model_are_refused() {
    for (key, value, expected) in [
        ("vocab_size", Value::Null, "vocab_size is missing"),
        ("vocab_size", json!(0), "vocab_size = 0: must be from 1"),
        ("vocab_size", json!("160"), "vocab_size: expected a whole number, found \"160\""),
        ("hidden_size", json!(-4), "hidden_size: expected a whole number, found -4"),
        ("hidden_size", json!(48.5), "hidden_size: expected a whole number, found 48.5"),
        ("intermediate_size", json!(u64::MAX), "intermediate_size = 18446744073709551615"),
        ("num_hidden_layers", json!(1_000_000), "num_hidden_layers = 1000000"),
        ("num_attention_heads", json!(7), "num_attention_heads = 7: must be a multiple"),
        ("num_key_value_heads", json!(3), "num_attention_heads = 8: must be a multiple"),
        ("num_key_value_heads", json!(0), "num_key_value_heads = 0"),
        ("head_dim", json!(0), "head_dim = 0"),
        ("head_dim", json!(15), "head_dim = 15: must be even"),
        ("rms_norm_eps", json!(-1), "rms_norm_eps = -1.0: must be above 0"),
        ("tie_word_embeddings", json!(1), "tie_word_embeddings: expected true or false"),
        ("max_position_embeddings", json!(0), "max_position_embeddings = 0"),
    ] {
        let message = refusal(key, value);
        assert!(message.starts_with(expected), "{message}");
    }
    let mut fields = Value::Object(with("x", json!(1)).unwrap().fields);
    fields["intermediate_size"] = json!(1 << 24);
    fields["hidden_size"] = json!(1 << 24);
    fields["num_hidden_layers"] = json!(9999);
    let message = read(fields.clone()).unwrap_err();
    assert!(message.contains("parameters, more than"), "{message}");
    fields["hidden_size"] = json!(50);
    fields.as_object_mut().unwrap().shift_remove("head_dim");
    let message = read(fields).unwrap_err();
    assert!(message.contains("head_dim is missing, and hidden_size = 50"), "{message}");
}

/// Returns four shared heads, and two of the other heads for each token.
fn four_and_two() -> MohConfig {
    let router = RouterKind::QueryNorm;
    MohConfig { router, shared_heads: 4.into(), routed_top_k: 2.into() }
}

#[test]
fn moh_fields_are_read_and_checked() {
    assert_eq!(moh("query-norm", 4, 2).unwrap().config.moh, Some(four_and_two()));
    for (router, shared, top_k, expected) in [
        ("learned", 4, 2, "moh_router = \"learned\": unknown router"),
        ("query-norm", 9, 0, "moh_shared_heads = 9: the model has 8 heads"),
        ("query-norm", 7, 1, "moh_shared_heads = 7 of 8 leaves one routed head"),
        ("query-norm", 4, 5, "moh_routed_top_k = 5: must be at most the 4"),
    ] {
        let message = moh(router, shared, top_k).unwrap_err();
        assert!(message.starts_with(&format!("m/config.json: {expected}")), "{message}");
    }
    let message = refusal("moh_shared_heads", json!(4));
    assert!(message.contains("model_type \"moh_llama\""), "{message}");
}

#[test]
fn head_counts_may_differ_by_layer() {
    let counts = |list: [usize; 3]| list.into_iter().collect::<HeadCounts>();
    let file = moh("query-norm", json!([8, 1, 4]), json!([0, 5, 2])).unwrap();
    let config = file.config.moh.clone().unwrap();
    assert_eq!(config.shared_heads, counts([8, 1, 4]).into());
    assert_eq!(config.routed_top_k, counts([0, 5, 2]));
    let mut written = file.to_json(&file.config, None);
    assert!(written.shift_remove("auto_map").is_some());
    assert_eq!(written, file.fields);
    // Equal numbers are written as a single number, and read from it.
    let equal = moh("query-norm", json!([4, 4, 4]), json!(2)).unwrap();
    assert_eq!(equal.config, moh("query-norm", 4, 2).unwrap().config);
    assert_eq!(equal.to_json(&equal.config, None)["moh_shared_heads"], json!(4));
    for (shared, top_k, expected) in [
        (json!([4, 4]), json!(2), "moh_shared_heads has 2 entries, and the model 3 layers"),
        (json!(4), json!([2, 2, 2, 2]), "moh_routed_top_k has 4 entries, and the model 3 layers"),
        (json!([]), json!(2), "moh_shared_heads has 0 entries"),
        (json!([8, 9, 8]), json!(0), "moh_shared_heads of layer 1 = 9: the model has 8 heads"),
        (json!([8, 1, 7]), json!([0, 1, 1]), "moh_shared_heads of layer 2 = 7 of 8 leaves one"),
        (json!([8, 1, 4]), json!([0, 1, 5]), "moh_routed_top_k of layer 2 = 5: must be at most"),
        (
            json!([4, -1, 4]),
            json!(2),
            "moh_shared_heads: expected a list of whole numbers, found -1",
        ),
        (json!([4, 4.5, 4]), json!(2), "moh_shared_heads: expected a list of whole numbers"),
        (json!([[4], 4, 4]), json!(2), "moh_shared_heads: expected a list of whole numbers"),
        (json!({}), json!(2), "moh_shared_heads: expected a whole number, found an object"),
        (json!(4), json!([u64::MAX, 2, 2]), "moh_routed_top_k of layer 0 = 18446744073709551615"),
    ] {
        let message = moh("query-norm", shared, top_k).unwrap_err();
        assert!(message.starts_with(&format!("m/config.json: {expected}")), "{message}");
    }
}

#[test]
fn shared_heads_may_be_a_set_for_each_layer() {
    let with = |ids: Value, counts: Value| {
        let mut fields = moh("query-norm", 4, 2).unwrap().fields;
        fields.insert("moh_shared_head_ids".to_string(), ids);
        fields.insert("moh_shared_heads".to_string(), counts);
        read(Value::Object(fields))
    };
    let ids = json!([[7, 0], [1, 2, 3], []]);
    let file = with(ids, Value::Null).unwrap();
    let moh = file.config.moh.clone().unwrap();
    let sets = SharedHeadSets::from_ids(&[vec![0, 7], vec![1, 2, 3], vec![]]).unwrap();
    assert_eq!(moh.shared_heads, sets);
    let written = file.to_json(&file.config, None);
    assert_eq!(written["moh_shared_head_ids"], json!([[0, 7], [1, 2, 3], []]));
    assert!(!written.contains_key("moh_shared_heads"));
    // Sets of first heads are written as numbers.
    let first = with(json!([[0, 1], [1, 0], [0, 1]]), Value::Null).unwrap();
    let written = first.to_json(&first.config, None);
    assert_eq!(written["moh_shared_heads"], json!(2));
    assert!(!written.contains_key("moh_shared_head_ids"));
    for (ids, expected) in [
        (json!([[0], [0]]), "moh_shared_head_ids has 2 entries, and the model 3 layers"),
        (json!([[0], [8], [0]]), "moh_shared_head_ids of layer 1 has head 8: the heads"),
        (json!([[0], [3, 3], [0]]), "moh_shared_head_ids of layer 1 has head 3 twice"),
        (json!([0, 1, 2]), "moh_shared_head_ids: expected a list of whole numbers for"),
        (json!([[0], [-1], [0]]), "moh_shared_head_ids: expected a list of whole"),
        (Value::Null, "moh_shared_heads is missing"),
    ] {
        let message = with(ids, Value::Null).unwrap_err();
        assert!(message.starts_with(&format!("m/config.json: {expected}")), "{message}");
    }
    let message = with(json!([[0], [0], [0]]), json!(1)).unwrap_err();
    assert!(
        message.contains(": moh_shared_head_ids is there beside moh_shared_heads"),
        "{message}"
    );
}

#[test]
fn conversion_changes_only_its_own_fields() {
    let source = with("auto_map", json!({"AutoConfig": "x.Y"})).unwrap();
    let mut config = source.config.clone();
    config.vocab_size = 256;
    config.moh = Some(four_and_two());
    let fields = source.to_json(&config, Some(DType::BF16));
    assert_eq!(fields["architectures"], json!(["MohLlamaForCausalLM"]));
    assert_eq!(fields["torch_dtype"], json!("bfloat16"));
    assert!(!fields.contains_key("dtype"));
    assert_eq!(fields["auto_map"]["AutoConfig"], json!("configuration_moh_llama.MohLlamaConfig"));
    assert_eq!(fields["unknown_to_us"], json!({"kept": 1}));
    let order = |fields: &Map<String, Value>| fields.keys().take(20).cloned().collect::<Vec<_>>();
    assert_eq!(order(&fields), order(&source.fields));
    let converted = read(Value::Object(fields)).unwrap();
    assert_eq!(converted.config, config);
    // And back.
    let mut dense = converted.to_json(&ModelConfig { moh: None, ..config }, None);
    dense["vocab_size"] = json!(160);
    dense["torch_dtype"] = json!("float32");
    let mut expected = source.fields.clone();
    expected.shift_remove("auto_map");
    assert_eq!(dense, expected);
}

#[test]
fn a_new_file_reads_back_as_its_configuration() {
    let mut config = moh("query-norm", 4, 2).unwrap().config;
    config.eos_token_ids = vec![2, 3];
    for table in [
        json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}),
        json!({"rope_type": "yarn", "factor": 8, "truncate": false, "beta_slow": 0.5}),
        json!({"rope_type": "linear", "factor": 8}),
    ] {
        config.rope = with_rope(json!({"rope_scaling": table})).unwrap().config.rope;
        let file = ConfigFile::new(&config);
        assert_eq!(read(Value::Object(file.fields)).unwrap().config, config);
    }
}

/// Returns a Qwen3's `config.json`, with one field replaced.
fn qwen3(key: &str, value: Value) -> Result<ConfigFile, String> {
    let mut fields = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false,
        "vocab_size": 160, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_window_layers": 28,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "sliding_window": null,
        "use_sliding_window": false, "torch_dtype": "bfloat16", "tie_word_embeddings": true,
        "layer_types": ["full_attention", "full_attention", "full_attention"],
    });
    fields[key] = value;
    read(fields)
}

#[test]
fn a_qwen3_is_read_converted_and_written() {
    let source = qwen3("head_dim", Value::Null).unwrap();
    let mut config = source.config.clone();
    assert_eq!(config.architecture, Architecture::Qwen3);
    assert_eq!((config.head_dim, config.max_position_embeddings), (128, 32_768));
    assert_eq!(qwen3("head_dim", json!(16)).unwrap().config.head_dim, 16);
    config.moh = Some(four_and_two());
    let fields = source.to_json(&config, None);
    assert_eq!(fields["architectures"], json!(["MohQwen3ForCausalLM"]));
    assert_eq!(fields["model_type"], json!("moh_qwen3"));
    let converted = read(Value::Object(fields)).unwrap();
    assert_eq!(converted.config, config);
    let dense = converted.to_json(&ModelConfig { moh: None, ..config.clone() }, None);
    assert_eq!(dense, source.fields);
    let new = ConfigFile::new(&config);
    assert!(!new.fields.contains_key("mlp_bias") && new.fields.contains_key("max_window_layers"));
    assert_eq!(read(Value::Object(new.fields)).unwrap().config, config);
}

#[test]
fn what_a_qwen3_may_have_and_is_not_computed_is_refused() {
    for (key, value, expected) in [
        ("attention_bias", json!(true), "attention_bias = true"),
        ("use_sliding_window", json!(true), "use_sliding_window = true: sliding windows are not"),
        ("layer_types", json!(["sliding_attention"]), "layer_types has \"sliding_attention\""),
        ("layer_types", json!([7]), "layer_types has 7"),
        ("layer_types", json!("full_attention"), "layer_types: expected a list"),
        ("num_key_value_heads", Value::Null, "num_key_value_heads is missing"),
        ("rope_scaling", json!({"rope_type": "dynamic"}), "rope_scaling.rope_type = \"dynamic\""),
        ("model_type", json!("moh_llama"), "architectures contradicts model_type"),
        ("moh_routed_top_k", json!(2), "moh_routed_top_k: a model with Mixture-of-Head fields has"),
    ] {
        let message = qwen3(key, value).unwrap_err();
        assert!(message.starts_with(&format!("m/config.json: {expected}")), "{message}");
    }
    let message = qwen3("moh_shared_heads", json!(4)).unwrap_err();
    assert!(message.contains("model_type \"moh_qwen3\""), "{message}");
}

#[test]
fn files_that_are_no_configuration_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let message = |path: &Path| ConfigFile::read(path).unwrap_err().to_string();
    assert!(message(&path).contains("config.json: No such file"), "{}", message(&path));
    assert!(message(dir.path()).ends_with("has no config.json, so it is not a model"));
    // Not even root reads a directory as a file.
    std::fs::create_dir(&path).unwrap();
    assert!(message(dir.path()).contains("config.json: "));
    std::fs::remove_dir(&path).unwrap();
    for (bytes, expected) in [
        (&b""[..], "not valid JSON"),
        (b"{\"model_type\": \"llama\"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, found a list"),
        (b"{}", "model_type is missing"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        assert!(message(dir.path()).contains(expected), "{}", message(dir.path()));
    }
    std::fs::write(&path, "[".repeat(1_000_000)).unwrap();
    assert!(message(&path).contains("not valid JSON"));
    std::fs::File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
    assert!(message(&path).contains("a configuration has at most"));
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn the_fixtures_configurations_are_read() {
    let fixtures = moh_testkit::programs::fixtures();
    let old = ConfigFile::read(&fixtures.join("stories260K")).unwrap().config;
    let new = ConfigFile::read(&fixtures.join("stories260K-sharded-bf16")).unwrap().config;
    assert_eq!(old, new);
    assert_eq!(old.num_parameters(), 260_032);
    let scaled = ConfigFile::read(&fixtures.join("tiny-h8kv2")).unwrap().config;
    assert!(
        matches!(scaled.rope.scaling, Some(RopeScaling::Llama3(llama3)) if llama3.factor == 8.0)
    );
    assert_eq!((scaled.head_dim, scaled.num_key_value_heads), (16, 2));
}

proptest::proptest! {
    #[test]
    fn no_value_of_any_field_makes_it_panic(field in 0usize..22, value in 0usize..12) {
        let values = [
            json!(null), json!(true), json!(0), json!(-1), json!(1e308), json!(u64::MAX), json!(""),
            json!([]), json!({}), json!([[]]), json!(3), json!({"rope_type": {}}),
        ];
        let mut fields = with("x", json!(1)).unwrap().fields;
        let key = fields.keys().nth(field).unwrap().clone();
        fields[&key] = values[value].clone();
        let _ = read(Value::Object(fields));
    }
}
