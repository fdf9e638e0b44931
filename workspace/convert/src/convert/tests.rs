use std::fs;

use moh_hf::{ConfigFile, WeightFiles, write_random_model};
use moh_model::tensors::{EMBEDDING, OUTPUT_HEAD};
use moh_model::{Active, HeadCounts, RouterKind};
use moh_testkit::assert_refused;
use moh_testkit::programs::{fixtures, read_json};
use serde_json::{Value, json};

use super::*;

fn model(dir: &Path, dtype: DType, tied: bool) -> PathBuf {
    let fields = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 37,
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
        "tie_word_embeddings": tied, "max_position_embeddings": 64, "torch_dtype": "float32",
    });
    let file = ConfigFile::from_value(fields, Path::new("config.json")).unwrap();
    let path = dir.join("source");
    write_random_model(&path, &file, dtype, 8_000, 1).unwrap();
    path
}

/// Returns a directory with an f32 model.
fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path(), DType::F32, false);
    (dir, source)
}

fn values(files: &WeightFiles, name: &str) -> Vec<f32> {
    let tensor = files.get(name).unwrap();
    let mut values = vec![0.0; tensor.shape.iter().product()];
    files.read_f32(name, &mut values).unwrap();
    values
}

fn go(options: &ConversionOptions) -> Result<Receipt, Error> {
    convert(options, &mut |_, _| ControlFlow::Continue(()))?.publish()
}

/// Writes a conversion, and compares it with its source.
fn verified(options: &ConversionOptions) -> Conversion {
    let conversion = convert(options, &mut |_, _| ControlFlow::Continue(())).unwrap();
    conversion.verify(OpenDevice::Cpu).unwrap();
    conversion
}

fn config(dir: &Path) -> Value {
    read_json(&dir.join("config.json"))
}

#[test]
fn conversion_changes_no_weight() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let source = model(&dir.path().join(dtype.torch_name()), dtype, false);
        let out = source.with_file_name("out");
        let receipt = go(&ConversionOptions::new(&source, &out)).unwrap();
        let counts = (receipt.heads, receipt.shared_heads.clone(), receipt.active_heads.clone());
        assert_eq!(counts, (8, 4.into(), 6.into()));
        assert_eq!(receipt.num_unchanged(), receipt.tensors.len());
        let [before, after] = receipt.attention_flops_per_token;
        assert_eq!(after, 0.75 * before);
        let (from, to) = (WeightFiles::open(&source).unwrap(), WeightFiles::open(&out).unwrap());
        to.check(&ConfigFile::read(&out).unwrap().config).unwrap();
        assert_eq!(from.names().count(), to.names().count());
        for tensor in &receipt.tensors {
            let bytes = from.get(&tensor.name).unwrap().bytes;
            assert_eq!(bytes, to.get(&tensor.name).unwrap().bytes);
            assert_eq!(tensor.blake3, blake3::hash(bytes).to_hex().as_str());
            assert_eq!(tensor.source_blake3.as_ref(), Some(&tensor.blake3));
        }
        let fields = config(&out);
        assert_eq!(fields["architectures"], json!(["MohLlamaForCausalLM"]));
        assert_eq!(fields["moh_router"], "query-norm");
        assert_eq!(
            (&fields["moh_shared_heads"], &fields["moh_routed_top_k"]),
            (&json!(4), &json!(2))
        );
    }
}

#[test]
fn layers_have_the_counts_that_they_are_given() {
    let counts = |list: [usize; 3]| list.into_iter().collect::<HeadCounts>();
    let (dir, source) = place();
    let shared_heads = || Some(counts([8, 2, 5]).into());
    let moh = |shared_heads, active| {
        TargetAttention::Moh(HeadRequest { router: None, shared_heads, active: Some(active) })
    };
    let attention = moh(shared_heads(), Active::RoutedTopK(counts([0, 4, 2])));
    let out = dir.path().join("lists");
    let receipt =
        go(&ConversionOptions { attention, ..ConversionOptions::new(&source, &out) }).unwrap();
    assert_eq!(receipt.routed_heads, counts([0, 6, 3]));
    assert_eq!(receipt.active_heads, counts([8, 6, 7]));
    let written = serde_json::to_value(&receipt).unwrap();
    assert_eq!(
        (&written["shared_heads"], &written["active_heads"]),
        (&json!([8, 2, 5]), &json!([8, 6, 7]))
    );
    let [before, after] = receipt.attention_flops_per_token;
    assert_eq!(24.0 * after, 21.0 * before);
    let fields = config(&out);
    assert_eq!(
        (&fields["moh_shared_heads"], &fields["moh_routed_top_k"]),
        (&json!([8, 2, 5]), &json!([0, 4, 2]))
    );

    // A share of the heads is kept in every layer. If all layers have the same number, it is written once.
    let attention = moh(shared_heads(), Active::Share(1.0));
    let all = dir.path().join("share");
    go(&ConversionOptions { attention, ..ConversionOptions::new(&source, &all) }).unwrap();
    assert_eq!(config(&all)["moh_routed_top_k"], json!([0, 6, 3]));
    let attention = moh(Some(counts([4, 4, 4]).into()), Active::RoutedTopK(HeadCounts::All(2)));
    let equal = dir.path().join("equal");
    go(&ConversionOptions { attention, ..ConversionOptions::new(&source, &equal) }).unwrap();
    assert_eq!(config(&equal)["moh_shared_heads"], json!(4));
    assert_eq!(config(&equal)["moh_routed_top_k"], json!(2));
}

#[test]
fn a_routed_source_keeps_its_counts() {
    let (dir, source) = place();
    let half = TargetAttention::Moh(HeadRequest {
        active: Some(Active::Share(0.5)),
        ..HeadRequest::default()
    });
    let moh = dir.path().join("moh");
    go(&ConversionOptions { attention: half, ..ConversionOptions::new(&source, &moh) }).unwrap();
    let out = dir.path().join("out");
    go(&ConversionOptions { dtype: Some(DType::BF16), ..ConversionOptions::new(&moh, &out) })
        .unwrap();
    let fields = config(&out);
    assert_eq!((&fields["moh_shared_heads"], &fields["moh_routed_top_k"]), (&json!(2), &json!(2)));
}

/// Two-stage routing starts with zeros, and a dense model has no trace of them.
#[test]
fn the_matrices_of_two_stage_routing_are_added_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path(), DType::BF16, false);
    let to = |router| {
        let router = Some(router);
        TargetAttention::Moh(HeadRequest { router, ..HeadRequest::default() })
    };
    let two_stage = dir.path().join("two-stage");
    let attention = to(RouterKind::TwoStage);
    let options = ConversionOptions { attention, ..ConversionOptions::new(&source, &two_stage) };
    let receipt = verified(&options).publish().unwrap();
    assert_eq!(config(&two_stage)["moh_router"], "two-stage");
    let weights = WeightFiles::open(&two_stage).unwrap();
    weights.check(&ConfigFile::read(&two_stage).unwrap().config).unwrap();
    for (name, rows) in [("weight", 8), ("stages.weight", 2)] {
        let name = format!("model.layers.1.self_attn.router.{name}");
        let tensor = weights.get(&name).unwrap();
        assert_eq!((tensor.dtype, tensor.shape[0]), (DType::BF16, rows));
        assert!(tensor.bytes.iter().all(|&byte| byte == 0), "{name}");
        let written = receipt.tensors.iter().find(|tensor| tensor.name == name).unwrap();
        assert_eq!(written.source_blake3, None);
    }
    // The same router again, and then no router.
    let again = dir.path().join("again");
    go(&ConversionOptions::new(&two_stage, &again)).unwrap();
    assert_eq!(config(&again)["moh_router"], "two-stage");
    let dense = dir.path().join("dense");
    let attention = TargetAttention::Dense;
    go(&ConversionOptions { attention, ..ConversionOptions::new(&two_stage, &dense) }).unwrap();
    let (before, after) = (WeightFiles::open(&source).unwrap(), WeightFiles::open(&dense).unwrap());
    assert!(before.names().eq(after.names()));
    // Other learned matrices must be fitted.
    let attention = to(RouterKind::Linear);
    let out = dir.path().join("linear");
    let linear = ConversionOptions { attention, ..ConversionOptions::new(&source, &out) };
    assert_refused(go(&linear), "give a text, --calibration");
    assert!(!out.exists());
}

#[test]
fn back_to_dense_gives_the_source() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path(), DType::F32, true);
    let (moh, dense) = (dir.path().join("moh"), dir.path().join("dense"));
    go(&ConversionOptions::new(&source, &moh)).unwrap();
    let options = ConversionOptions {
        attention: TargetAttention::Dense,
        max_shard_bytes: 8_000,
        ..ConversionOptions::new(&moh, &dense)
    };
    go(&options).unwrap();
    for entry in fs::read_dir(&source).unwrap() {
        let name = entry.unwrap().file_name();
        assert_eq!(
            fs::read(source.join(&name)).unwrap(),
            fs::read(dense.join(&name)).unwrap(),
            "{name:?}"
        );
    }
}

#[test]
fn the_element_type_changes_on_request() {
    let (dir, source) = place();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let out = dir.path().join(dtype.torch_name());
        let receipt =
            go(&ConversionOptions { dtype: Some(dtype), ..ConversionOptions::new(&source, &out) })
                .unwrap();
        let unchanged = if dtype == DType::F32 { receipt.tensors.len() } else { 0 };
        assert_eq!(receipt.num_unchanged(), unchanged);
        assert_eq!(config(&out)["torch_dtype"], dtype.torch_name());
        let (from, to) = (WeightFiles::open(&source).unwrap(), WeightFiles::open(&out).unwrap());
        for name in from.names() {
            let (a, b) = (values(&from, name), values(&to, name));
            let smallest = 2f32.powi(-25); // half of f16's
            let tolerance = 1.0 / 256.0; // half a unit in bf16's last place
            assert!(
                a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= (a.abs() * tolerance).max(smallest)),
                "{name}"
            );
        }
    }
}

/// Overwrites one f32 of a tensor in a source of one or more files.
fn poke(source: &Path, name: &str, element: usize, value: f32) {
    let (path, offset) = {
        let files = WeightFiles::open(source).unwrap();
        let path = files.file_of(name).to_path_buf();
        let bytes = fs::read(&path).unwrap();
        let tensor = files.get(name).unwrap().bytes;
        let offset = bytes.windows(tensor.len()).position(|part| part == tensor).unwrap();
        (path, offset + 4 * element)
    };
    let mut bytes = fs::read(&path).unwrap();
    bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(path, bytes).unwrap();
}

#[test]
fn weights_that_are_not_finite_are_named_and_nothing_is_left() {
    let (dir, source) = place();
    let name = "model.layers.1.mlp.up_proj.weight";
    poke(&source, name, 7, f32::NAN);
    let refused = go(&ConversionOptions::new(&source, dir.path().join("out")));
    assert_refused(refused, &format!("{name} has a value that is not finite, at element 7"));
    poke(&source, name, 7, 1e6);
    let options = ConversionOptions {
        dtype: Some(DType::F16),
        ..ConversionOptions::new(&source, dir.path().join("out"))
    };
    assert_refused(go(&options), "float16 cannot hold, at element 7");
    poke(&source, name, 7, 1.0);
    poke(&source, EMBEDDING, 3, f32::INFINITY);
    let options = ConversionOptions { pad_vocab_to: Some(64), dtype: None, ..options };
    assert_refused(go(&options), "model.embed_tokens.weight has a value that is not finite");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn an_interruption_leaves_nothing() {
    let (dir, source) = place();
    let options = ConversionOptions::new(&source, dir.path().join("out"));
    let mut pieces = 0;
    let error = convert(&options, &mut |_, _| {
        pieces += 1;
        if pieces == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap_err();
    assert!(matches!(error, Error::Interrupted));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_conversion_that_fails_verification_replaces_nothing() {
    let (dir, source) = place();
    let out = dir.path().join("out");
    go(&ConversionOptions { dtype: Some(DType::F16), ..ConversionOptions::new(&source, &out) })
        .unwrap();
    let before = fs::read(out.join("model.safetensors")).unwrap();
    for (dtype, expected) in [(DType::F32, "float32"), (DType::BF16, "bfloat16")] {
        let options = ConversionOptions {
            force: true,
            dtype: Some(dtype),
            ..ConversionOptions::new(&source, &out)
        };
        let conversion = verified(&options);
        let weights = conversion.pending.path().join("model.safetensors");
        let mut bytes = fs::read(&weights).unwrap();
        // The most significant byte of the last weight.
        *bytes.last_mut().unwrap() ^= 2;
        fs::write(weights, bytes).unwrap();
        let expected = format!("more than rounding to {expected} explains");
        assert_refused(conversion.verify(OpenDevice::Cpu), &expected);
        drop(conversion);
        assert_eq!(fs::read(out.join("model.safetensors")).unwrap(), before);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}

#[test]
fn verification_measures_against_the_source_in_its_own_type() {
    let (dir, source) = place();
    let out = dir.path().join("out");
    let options =
        ConversionOptions { dtype: Some(DType::BF16), ..ConversionOptions::new(&source, &out) };
    let conversion = convert(&options, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let found = conversion.verify(OpenDevice::Cpu).unwrap();
    conversion.publish().unwrap();
    let (from, to) = (WeightFiles::open(&source).unwrap(), WeightFiles::open(&out).unwrap());
    let mut largest = 0f64;
    for name in from.names() {
        let (a, b) = (values(&from, name), values(&to, name));
        let differences = a.iter().zip(&b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
        largest = differences.fold(largest, f64::max);
    }
    let rounding = found.rounding.unwrap();
    assert_eq!((rounding.dtype, rounding.largest_difference), (DType::BF16, largest));
    assert!(found.largest_difference > 0.0);
    assert_eq!(found.unexplained_difference, 0.0);
}

#[test]
fn a_tied_source_with_a_head_of_its_own_is_written_untied() {
    let (dir, source) = place();
    let text = fs::read_to_string(source.join("config.json")).unwrap();
    let tied = text.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    assert_ne!(text, tied);
    fs::write(source.join("config.json"), tied).unwrap();
    let out = dir.path().join("out");
    let receipt = verified(&ConversionOptions::new(&source, &out)).publish().unwrap();
    assert!(
        receipt.warning.unwrap().contains("lm_head.weight differs from model.embed_tokens.weight")
    );
    assert_eq!(config(&out)["tie_word_embeddings"], false);
    let (from, to) = (WeightFiles::open(&source).unwrap(), WeightFiles::open(&out).unwrap());
    assert_eq!(from.get(OUTPUT_HEAD).unwrap().bytes, to.get(OUTPUT_HEAD).unwrap().bytes);
}

#[test]
fn the_source_is_never_replaced() {
    let (dir, source) = place();
    for out in [source.clone(), dir.path().to_path_buf()] {
        let options = ConversionOptions { force: true, ..ConversionOptions::new(&source, out) };
        assert_refused(go(&options), "holds the source model");
    }
}

#[test]
fn padding_adds_mean_rows_to_both_ends() {
    let dir = tempfile::tempdir().unwrap();
    for tied in [false, true] {
        let dir = dir.path().join(tied.to_string());
        let source = model(&dir, DType::F32, tied);
        let out = dir.join("out");
        let options =
            ConversionOptions { pad_vocab_to: Some(16), ..ConversionOptions::new(&source, &out) };
        let receipt = go(&options).unwrap();
        assert_eq!(receipt.vocab_size, [37, 48]);
        assert_eq!(config(&out)["vocab_size"], 48);
        let (from, to) = (WeightFiles::open(&source).unwrap(), WeightFiles::open(&out).unwrap());
        to.check(&ConfigFile::read(&out).unwrap().config).unwrap();
        for name in [EMBEDDING, OUTPUT_HEAD].into_iter().take(if tied { 1 } else { 2 }) {
            let old = from.get(name).unwrap().bytes;
            assert_eq!(&to.get(name).unwrap().bytes[..old.len()], old);
            let (rows, grown) = (values(&from, name), values(&to, name));
            for row in grown[37 * 24..].chunks_exact(24) {
                for (column, value) in row.iter().enumerate() {
                    let sum: f64 =
                        rows.iter().skip(column).step_by(24).map(|v| f64::from(*v)).sum();
                    assert_eq!(*value, (sum / 37.0) as f32);
                }
            }
        }
        let changed = receipt.tensors.iter().filter(|tensor| !tensor.unchanged).count();
        assert_eq!(changed, if tied { 1 } else { 2 });
    }
}

#[test]
fn counts_that_do_not_fit_are_refused() {
    let counts = |list: &[usize]| match *list {
        [count] => HeadCounts::All(count),
        _ => list.iter().copied().collect(),
    };
    let moh = |shared: &[usize], active: Option<Active>| {
        let shared_heads = (!shared.is_empty()).then(|| counts(shared).into());
        TargetAttention::Moh(HeadRequest { router: None, shared_heads, active })
    };
    let share = |share: f64| Some(Active::Share(share));
    let top_k = |list: &[usize]| Some(Active::RoutedTopK(counts(list)));
    let dir = tempfile::tempdir().unwrap();
    let model = ConfigFile::read(&model(dir.path(), DType::F32, false)).unwrap().config;
    for (attention, expected) in [
        (moh(&[], share(1.5)), "--active 1.5: must be a share of the heads"),
        (moh(&[], share(f64::NAN)), "--active NaN: must be a share"),
        (moh(&[], share(0.0)), "--active 0 of 8 heads leaves no head active"),
        (moh(&[], share(0.95)), "all 8 heads: use a smaller share, or --active 1"),
        (moh(&[4], share(0.25)), "is 2, fewer than the 4 shared heads"),
        (moh(&[4], share(0.5)), "all of them shared heads"),
        (moh(&[4], share(0.5)), "or --routed-top-k 0 for no active routed head"),
        (moh(&[7], share(1.0)), "leaves one routed head"),
        (moh(&[6], None), "shared_heads = 6: the default share of 0.75 of 8 heads is 6"),
        (moh(&[9], None), "shared_heads = 9: the model has 8 heads"),
        (moh(&[9], top_k(&[0])), "shared_heads = 9: the model has 8 heads"),
        (moh(&[], top_k(&[5])), "routed_top_k = 5: must be at most the 4 routed heads"),
        (moh(&[4], top_k(&[usize::MAX])), "must be at most the 4 routed heads"),
        (moh(&[0], top_k(&[0])), "no head would be active"),
        (moh(&[8, 4], top_k(&[0])), "shared_heads has 2 entries"),
        (moh(&[8, 9, 8], None), "shared_heads of layer 1 = 9: the model has 8 heads"),
        (moh(&[8, 2, 4], top_k(&[0, 7, 0])), "routed_top_k of layer 1 = 7: must"),
    ] {
        assert_refused(attention.configure(&model), expected);
    }
    let moh = moh(&[], top_k(&[3])).configure(&model).unwrap().unwrap();
    assert_eq!((moh.shared_heads, moh.routed_top_k), (4.into(), 3.into()));
    assert_eq!(TargetAttention::Dense.configure(&model).unwrap(), None);
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn the_fixtures_convert() {
    for name in ["stories260K", "stories260K-sharded-bf16", "tiny-h8kv2"] {
        let dir = tempfile::tempdir().unwrap();
        let (source, out) = (fixtures().join(name), dir.path().join("out"));
        let receipt = go(&ConversionOptions::new(&source, &out)).unwrap();
        assert_eq!(receipt.num_unchanged(), receipt.tensors.len());
        for entry in fs::read_dir(&source).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if !name.contains("safetensors") && name != "config.json" {
                assert_eq!(
                    fs::read(source.join(&name)).unwrap(),
                    fs::read(out.join(&name)).unwrap()
                );
            }
        }
    }
}
