use moh_model::{Architecture, HeadCounts, MohConfig, RopeConfig, RouterKind, SharedHeadSets};

use super::*;

/// A `config.json` as transformers 4 writes it, with one field replaced (null removes it).
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

#[test]
fn both_styles_of_rope_are_read() {
    let old = with("rope_theta", json!(10_000)).unwrap().config;
    assert_eq!(old.rope, RopeConfig { theta: 10_000.0, scaling: None });
    let new = with("rope_parameters", json!({"rope_theta": 20.5, "rope_type": "default"}));
    assert_eq!(new.unwrap().config.rope, RopeConfig { theta: 20.5, scaling: None });
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let expected = Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64,
    };
    let old = with("rope_scaling", scaling.clone()).unwrap().config;
    assert_eq!(old.rope, RopeConfig { theta: 500_000.0, scaling: Some(expected) });
    let mut new = scaling.clone();
    new["rope_theta"] = json!(7.0);
    let new = with("rope_parameters", new).unwrap().config;
    assert_eq!(new.rope, RopeConfig { theta: 7.0, scaling: Some(expected) });
    let mut older = scaling;
    older["type"] = json!("llama3");
    older.as_object_mut().unwrap().shift_remove("rope_type");
    let older = with("rope_scaling", older).unwrap().config;
    assert_eq!(older.rope.scaling, Some(expected));
}

#[test]
fn the_base_of_default_rope_is_written_in_both_styles() {
    let theta_of = |file: &ConfigFile| file.to_json(&file.config, None).get("rope_theta").cloned();
    let new_style = |rope: Value| {
        let mut fields = with("rope_parameters", rope).unwrap().fields;
        fields.shift_remove("rope_theta");
        read(Value::Object(fields)).unwrap()
    };
    let default = new_style(json!({"rope_type": "default", "rope_theta": 20.5}));
    assert_eq!(theta_of(&default), Some(json!(20.5)));
    let written = read(Value::Object(default.to_json(&default.config, None))).unwrap();
    assert_eq!(written.config, default.config);
    // The reader prefers the newer style, so the older one follows it.
    let both = with("rope_parameters", json!({"rope_theta": 20.5})).unwrap();
    assert_eq!(both.fields["rope_theta"], json!(500_000.0));
    assert_eq!(theta_of(&both), Some(json!(20.5)));
    // Read without the rest, the base of scaled RoPE would be that of another model.
    let scaled = new_style(json!({
        "rope_type": "llama3", "rope_theta": 20.5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }));
    assert_eq!(theta_of(&scaled), None);
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
        ("hidden_act", json!("gelu"), "hidden_act = \"gelu\": must be \"silu\""),
        ("attention_bias", json!(true), "attention_bias = true"),
        ("mlp_bias", json!(true), "mlp_bias = true"),
        ("quantization_config", json!({"bits": 4}), "quantization_config: quantised"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor = 0.5"),
        ("rope_scaling", json!({"rope_type": "yarn"}), "rope_scaling.rope_type = \"yarn\""),
        ("rope_scaling", json!({"type": "linear", "factor": 2}), "rope_scaling.type = \"linear\""),
        ("rope_scaling", json!([1]), "rope_scaling: expected an object"),
        ("rope_scaling", json!({"rope_type": "llama3"}), "rope_scaling.factor is missing"),
        ("rope_parameters", json!({"rope_theta": 0}), "rope_parameters.rope_theta = 0"),
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
        ("rms_norm_eps", json!(-1), "rms_norm_eps = -1: must be above 0"),
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

/// Four shared heads, and two of the others for each token.
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
    // Equal numbers are written as one, and read as one.
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
    // Sets of first heads are written as their numbers.
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
    // and back
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
    config.rope.scaling = Some(Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64,
    });
    config.eos_token_ids = vec![2, 3];
    let file = ConfigFile::new(&config);
    assert_eq!(read(Value::Object(file.fields)).unwrap().config, config);
}

/// A Qwen3's `config.json`, with one field replaced.
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
        ("rope_scaling", json!({"rope_type": "yarn"}), "rope_scaling.rope_type = \"yarn\""),
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
    assert_eq!(scaled.rope.scaling.unwrap().factor, 8.0);
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
