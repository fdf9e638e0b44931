//! A tiny model in a temporary directory, and programs that run there, without the user's settings.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use moh_hf::weight_files::WEIGHTS_FILE;
use moh_hf::{ConfigFile, write_random_model};
use moh_kernels::DType;
use serde_json::{Value, json};

/// Vocabulary of the model of [`write_source`].
pub const VOCABULARY: usize = 37;

/// A directory with a tiny random Llama of 8 heads in `source`.
pub fn workplace() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_source(&dir.path().join("source"), u64::MAX);
    dir
}

/// Writes that Llama.
pub fn write_source(path: &Path, max_shard_bytes: u64) {
    let fields = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY,
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 64,
    });
    let file = ConfigFile::from_value(fields, Path::new("config.json")).unwrap();
    write_random_model(path, &file, DType::F32, max_shard_bytes, 1).unwrap();
}

/// Changes fields of `source/config.json`.
pub fn edit_config(dir: &Path, edit: impl FnOnce(&mut Value)) {
    edit_json(&dir.join("source/config.json"), edit);
}

/// Changes a file of JSON.
pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut json = read_json(path);
    edit(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Rewrites the weight file of `source` with other tensors; values are f32.
pub fn edit_weights(dir: &Path, edit: impl FnOnce(&mut Vec<(String, Vec<usize>, Vec<u8>)>)) {
    let path = dir.join("source").join(WEIGHTS_FILE);
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> = file
        .iter()
        .map(|(name, view)| (name.to_string(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    edit(&mut tensors);
    let views = tensors.iter().map(|(name, shape, data)| {
        let dtype = safetensors::Dtype::F32;
        (name, safetensors::tensor::TensorView::new(dtype, shape.clone(), data).unwrap())
    });
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A program in a directory, without the user's hub settings and without any hub.
pub fn program(path: &str, dir: &Path) -> Command {
    let mut command = Command::new(path);
    isolate(&mut command, dir);
    command
}

/// Isolates a command; see [`program`].
pub fn isolate(command: &mut Command, dir: &Path) {
    command.current_dir(dir);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("HF_") || name.ends_with("_PROXY")) {
            command.env_remove(name);
        }
    }
    command.env("HF_HOME", dir.join("hf")).env("HF_HUB_OFFLINE", "1").env("no_proxy", "127.0.0.1");
}

/// Names in a directory, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The root of the repository, in which the examples of the help run.
pub fn repository() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().unwrap()
}
