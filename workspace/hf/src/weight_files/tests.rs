use super::*;
use crate::config_file::{ConfigFile, tests::small_llama};
use serde_json::json;
use std::collections::BTreeMap;

type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn config(tied: bool) -> ModelConfig {
    small_llama(tied).config
}

fn tensors(config: &ModelConfig) -> Tensors {
    tensor_shapes(config)
        .into_iter()
        .enumerate()
        .map(|(index, (name, shape))| {
            let elements = shape.iter().product::<usize>();
            let bytes = (0..elements)
                .flat_map(|element| (index as f32 + element as f32 / 64.0).to_le_bytes())
                .collect();
            (name, (shape, bytes))
        })
        .collect()
}

fn safetensors_file(tensors: &Tensors) -> Vec<u8> {
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        let dtype = safetensors::Dtype::F32;
        (name, safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

fn single(tensors: &Tensors) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(WEIGHTS_FILE), safetensors_file(tensors)).unwrap();
    dir
}

/// Writes two shards and an index, which `edit` may damage.
fn sharded(tensors: &Tensors, edit: impl Fn(&mut Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let half = tensors.len() / 2;
    let mut index = json!({"metadata": {"total_size": 0}, "weight_map": {}});
    for (part, name) in ["model-1.safetensors", "model-2.safetensors"].into_iter().enumerate() {
        let stored: Tensors = tensors
            .iter()
            .enumerate()
            .filter(|(position, _)| (*position >= half) == (part == 1))
            .map(|(_, (key, value))| (key.clone(), value.clone()))
            .collect();
        stored.keys().for_each(|key| index["weight_map"][key] = json!(name));
        std::fs::write(dir.path().join(name), safetensors_file(&stored)).unwrap();
    }
    edit(&mut index);
    std::fs::write(dir.path().join(INDEX_FILE), index.to_string()).unwrap();
    dir
}

fn open_error(dir: &tempfile::TempDir) -> String {
    let message = WeightFiles::open(dir.path()).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

fn check_error(tensors: &Tensors, config: &ModelConfig) -> String {
    let dir = single(tensors);
    WeightFiles::open(dir.path()).unwrap().check(config).unwrap_err().to_string()
}

#[test]
fn one_file_and_shards_give_the_same_tensors() {
    let config = config(false);
    let tensors = tensors(&config);
    for dir in [single(&tensors), sharded(&tensors, |_| ())] {
        let files = WeightFiles::open(dir.path()).unwrap();
        files.check(&config).unwrap();
        assert_eq!(files.names().count(), tensors.len());
        for (name, (shape, bytes)) in &tensors {
            let tensor = files.get(name).unwrap();
            assert_eq!(
                (tensor.dtype, tensor.shape, tensor.bytes),
                (DType::F32, &shape[..], &bytes[..])
            );
            files.prefetch(name, 0..bytes.len());
            files.prefetch(name, 1..usize::MAX);
            files.release(name, 0..bytes.len());
            files.release(name, bytes.len()..usize::MAX / 2);
            let mut values = vec![0.0; bytes.len() / 4];
            files.read_f32(name, &mut values).unwrap();
            assert_eq!(values[0].to_le_bytes(), bytes[..4]);
        }
    }
}

#[test]
fn the_sample_is_that_of_the_tensors_and_not_of_their_files() {
    let mut tensors = tensors(&config(false));
    tensors.insert("large".to_owned(), (vec![5000], vec![0; 20_000]));
    let sample = |dir: tempfile::TempDir| WeightFiles::open(dir.path()).unwrap().sample();
    let before = sample(single(&tensors));
    assert_eq!(sample(sharded(&tensors, |_| ())), before);
    let changed = |edit: &dyn Fn(&mut Tensors)| {
        let mut tensors = tensors.clone();
        edit(&mut tensors);
        sample(single(&tensors)) != before
    };
    assert!(changed(&|tensors| tensors.get_mut("large").unwrap().1[19_990] = 1));
    assert!(changed(&|tensors| tensors.get_mut(EMBEDDING).unwrap().1[1] ^= 1));
    assert!(changed(&|tensors| tensors.get_mut("large").unwrap().0 = vec![50, 100]));
}

#[test]
fn a_directory_without_weights_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert!(open_error(&dir).ends_with(&format!("holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")));
    for (file, expected) in [
        ("weights.npz", "holds weights of another framework, weights.npz: start from"),
        ("pytorch_model.bin", "holds PyTorch weights, which must be saved as safetensors first"),
        ("model.fp16.safetensors", "holds weights of another name, model.fp16.safetensors: rename"),
        ("model-00001-of-00002.safetensors", "holds shards without model.safetensors.index.json"),
        ("model.gguf", "holds weights of llama.cpp"),
        ("__0_0.distcp", "holds a distributed checkpoint of PyTorch"),
        ("zero_to_fp32.py", "holds a checkpoint of DeepSpeed: run its zero_to_fp32.py"),
        ("consolidated.00.pth", "holds Meta's own format"),
        ("snapshots", "is a repository of the hub's cache: name a directory in /"),
        ("checkpoint-50", "holds checkpoints, not a model: name one of them, such as /"),
        ("adapter_config.json", "holds an adapter of PEFT, not a model: merge"),
    ] {
        std::fs::write(dir.path().join(file), b"x").unwrap();
        assert!(open_error(&dir).contains(expected), "{}", open_error(&dir));
        let message = ConfigFile::read(dir.path()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let whole = single(&tensors(&config(false)));
    std::fs::write(whole.path().join("adapter_config.json"), b"x").unwrap();
    assert!(open_error(&whole).contains("has adapter_config.json beside a model"));
    let message = WeightFiles::open(&dir.path().join("none")).unwrap_err().to_string();
    assert!(message.ends_with("is not a directory"), "{message}");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = safetensors_file(&tensors(&config(false)));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(WEIGHTS_FILE);
    for length in (0..200).chain((200..bytes.len()).step_by(97)).chain([bytes.len() - 1]) {
        std::fs::write(&path, &bytes[..length]).unwrap();
        assert!(open_error(&dir).contains("cut short"), "{length}: {}", open_error(&dir));
    }
}

#[test]
fn corrupt_headers_are_refused() {
    let bytes = safetensors_file(&tensors(&config(false)));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(WEIGHTS_FILE);
    let header = |text: &str, data: usize| {
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text.as_bytes());
        file.extend(std::iter::repeat_n(0, data));
        file
    };
    let long = [&bytes[..], &[0]].concat();
    let huge = [&u64::MAX.to_le_bytes()[..], &bytes[8..]].concat();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 99\n";
    for (file, expected) in [
        (pointer.to_vec(), ": is a pointer of Git LFS: fetch the file itself, with `git lfs pull`"),
        (long, "do not end at its"),
        (huge, "length is absurd"),
        (header("{\"a\": 1}", 0), "corrupt safetensors header"),
        (header("not json", 0), "corrupt safetensors header"),
        (header(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4), "corrupt"),
        (header(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, 8), "corrupt"),
        (
            header(
                r#"{"a":{"dtype":"F32","shape":[9223372036854775807,9],"data_offsets":[0,4]}}"#,
                4,
            ),
            "corrupt",
        ),
    ] {
        std::fs::write(&path, file).unwrap();
        assert!(open_error(&dir).contains(expected), "{}", open_error(&dir));
    }
}

#[test]
fn an_index_that_does_not_fit_is_refused() {
    let tensors = tensors(&config(false));
    for (edit, expected) in [
        (
            json!({"weight_map": {"a": "model-9.safetensors"}}),
            "model-9.safetensors, which is missing",
        ),
        (json!({"weight_map": {"a": "model-1.safetensors"}}), "places a in model-1.safetensors"),
        (json!({"weight_map": {"a": "../model-1.safetensors"}}), "must be a file of the directory"),
        (json!({"weight_map": {"a": "/etc/passwd"}}), "must be a file of the directory"),
        (json!({"weight_map": {"a": "..\\x"}}), "must be a file of the directory"),
        (json!({"weight_map": {"a": "."}}), "must be a file of the directory"),
        (json!({"weight_map": {"a": ""}}), "must be a file of the directory"),
        (json!({"weight_map": {"a": 3}}), "weight_map.a: expected a file name"),
        (json!({"weight_map": {}}), "weight_map is empty"),
        (json!({"weight_map": []}), "weight_map is missing or not an object"),
        (json!([]), "weight_map is missing or not an object"),
    ] {
        let dir = sharded(&tensors, |index| *index = edit.clone());
        assert!(open_error(&dir).contains(expected), "{}", open_error(&dir));
    }
    let dir = sharded(&tensors, |_| ());
    std::fs::write(dir.path().join(INDEX_FILE), "{").unwrap();
    assert!(open_error(&dir).contains("not valid JSON"));
    std::fs::write(dir.path().join(INDEX_FILE), "{\"metadata\": {\"loss\": NaN}}").unwrap();
    assert!(open_error(&dir).ends_with("write null in their place"), "{}", open_error(&dir));
}

#[test]
fn a_tensor_of_two_shards_has_one_value() {
    let tensors = tensors(&config(false));
    let add = |index: &mut Value| index["weight_map"]["other"] = json!("model-9.safetensors");
    let dir = sharded(&tensors, add);
    let copy = |change: u8| {
        let mut embedding = tensors[EMBEDDING].clone();
        embedding.1[1] ^= change;
        let copied = [EMBEDDING, "other"].map(|name| (name.to_owned(), embedding.clone()));
        let bytes = safetensors_file(&copied.into());
        std::fs::write(dir.path().join("model-9.safetensors"), bytes).unwrap();
    };
    copy(0);
    WeightFiles::open(dir.path()).unwrap();
    copy(1);
    let message = open_error(&dir);
    assert!(message.contains("model.embed_tokens.weight has other values than in "), "{message}");
}

#[test]
fn a_head_alone_is_the_embedding_of_a_tied_model() {
    let mut tensors = tensors(&config(true));
    let embedding = tensors.remove(EMBEDDING).unwrap();
    tensors.insert(OUTPUT_HEAD.to_owned(), embedding);
    let dir = single(&tensors);
    let write = |tied: bool| {
        let fields = serde_json::to_vec(&small_llama(tied).fields).unwrap();
        std::fs::write(dir.path().join("config.json"), fields).unwrap();
        crate::StoredModel::open(dir.path())
    };
    let model = write(true).unwrap();
    let mut values = vec![0.0; 24];
    model.weights.read_f32(EMBEDDING, &mut values).unwrap();
    assert!(values[1] == values[0] + 1.0 / 64.0 && model.file.config.tie_word_embeddings);
    let message = write(false).unwrap_err().to_string();
    assert!(message.ends_with("model.embed_tokens.weight is missing"), "{message}");
    let mut headless = self::tensors(&config(false));
    headless.remove(OUTPUT_HEAD);
    let message = check_error(&headless, &config(false));
    assert!(message.contains("lm_head.weight is missing: set tie_word_embeddings"), "{message}");
}

#[test]
fn a_cut_shard_is_named() {
    let dir = sharded(&tensors(&config(false)), |_| ());
    let path = dir.path().join("model-2.safetensors");
    let length = std::fs::metadata(&path).unwrap().len();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
    let message = open_error(&dir);
    assert!(message.contains("model-2.safetensors: is cut short"), "{message}");
}

#[test]
fn tensors_must_be_those_of_the_configuration() {
    let config = config(false);
    let complete = tensors(&config);
    let mut missing = complete.clone();
    missing.remove("model.layers.1.mlp.up_proj.weight");
    let message = check_error(&missing, &config);
    assert!(message.ends_with("model.layers.1.mlp.up_proj.weight is missing"), "{message}");
    for (name, expected) in [
        ("model.layers.1.mlp.up_proj.base_layer.weight", "was saved with an adapter of PEFT in it"),
        (
            "_orig_mod.model.layers.1.mlp.up_proj.weight",
            "has names that begin with _orig_mod.: save",
        ),
    ] {
        let mut wrapped = missing.clone();
        wrapped.insert(name.to_owned(), (vec![1], vec![0; 4]));
        let message = check_error(&wrapped, &config);
        assert!(message.contains(expected), "{message}");
    }
    let mut wrong = complete.clone();
    wrong.get_mut("model.norm.weight").unwrap().0 = vec![2, 2];
    let message = check_error(&wrong, &config);
    assert!(message.contains("model.norm.weight has shape [2, 2]: the configuration says [4]"));
    let mut more = complete.clone();
    more.insert("model.layers.2.extra".to_string(), (vec![1], vec![0; 4]));
    let message = check_error(&more, &config);
    assert!(message.contains("unexpected tensor model.layers.2.extra of shape [1]"), "{message}");
}

#[test]
fn a_tied_head_and_old_buffers_are_tolerated() {
    let tied = config(true);
    let mut stored = tensors(&config(false));
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq".to_string();
    stored.insert(name, (vec![1], vec![0; 4]));
    let dir = single(&stored);
    WeightFiles::open(dir.path()).unwrap().check(&tied).unwrap();
    stored.get_mut(OUTPUT_HEAD).unwrap().0 = vec![4, 6];
    assert!(check_error(&stored, &tied).contains("unexpected tensor lm_head.weight"));
}

#[test]
fn values_that_are_not_finite_are_refused_by_name() {
    let mut stored = tensors(&config(false));
    let name = "model.norm.weight";
    stored.get_mut(name).unwrap().1[12..].copy_from_slice(&f32::NAN.to_le_bytes());
    let dir = single(&stored);
    let files = WeightFiles::open(dir.path()).unwrap();
    let message = files.read_f32(name, &mut [0.0; 4]).unwrap_err().to_string();
    assert!(message.ends_with("model.norm.weight has a value that is not finite, at element 3"));
    assert!(files.read_f32(name, &mut [0.0; 5]).is_err());
    assert!(files.get("none").is_err());
}

#[test]
fn other_element_types_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = [0; 8];
    let dtype = safetensors::Dtype::I64;
    let view = safetensors::tensor::TensorView::new(dtype, vec![1], &bytes).unwrap();
    let file = safetensors::serialize([("a", view)], None).unwrap();
    std::fs::write(dir.path().join(WEIGHTS_FILE), file).unwrap();
    let message = WeightFiles::open(dir.path()).unwrap().get("a").unwrap_err().to_string();
    assert!(message.contains("a has type I64: expected F32, F16 or BF16"), "{message}");
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn the_fixtures_weights_are_read() {
    for name in ["stories260K", "stories260K-sharded-bf16", "tiny-h8kv2"] {
        let dir = moh_testkit::programs::fixtures().join(name);
        let config = ConfigFile::read(&dir).unwrap().config;
        let files = WeightFiles::open(&dir).unwrap();
        files.check(&config).unwrap();
        for (name, shape) in tensor_shapes(&config) {
            files.read_f32(&name, &mut vec![0.0; shape.iter().product()]).unwrap();
        }
    }
}

proptest::proptest! {
    #[test]
    fn a_flipped_bit_in_the_header_never_panics(byte in 0usize..2000, bit in 0u8..8) {
        let mut bytes = safetensors_file(&tensors(&config(false)));
        bytes[byte] ^= 1 << bit;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(WEIGHTS_FILE), bytes).unwrap();
        if let Ok(files) = WeightFiles::open(dir.path()) {
            let _ = files.check(&config(false));
            for name in files.names() {
                let _ = files.get(name);
            }
        }
    }
}
