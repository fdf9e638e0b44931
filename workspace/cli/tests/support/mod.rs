//! What the tests of the programs share: tiny models, token files, and commands away from the
//! user's own settings.

#![allow(dead_code)] // Each test program uses a part of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use moh_data::{Provenance, TokenFileWriter};
use moh_hf::weight_files::WEIGHTS_FILE;
use moh_hf::{ConfigFile, Dtype, write_random_model};
use serde_json::{Value, json};

pub mod job;

/// The beginning of a recipe that trains the model of [`write_source`] on [`trainable`]'s tokens; the
/// rest of `[data]` and the stages follow.
pub const RECIPE_HEAD: &str = r#"
[run]
dir = "run"
seed = 1
device = "cpu"
dtype = "f32"

[model]
from = "source"

[data]
sequence_length = 16
sources = [{ path = "text" }]
"#;

/// A directory with that model, a token file, and a recipe of the head and `rest`.
pub fn trainable(rest: &str) -> tempfile::TempDir {
    let dir = workplace();
    write_tokens(&dir.path().join("text"), VOCABULARY, 2000, 1);
    fs::write(dir.path().join("recipe.toml"), format!("{RECIPE_HEAD}{rest}")).unwrap();
    dir
}

/// Ids of the model of [`write_source`].
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
    write_random_model(path, &file, Dtype::F32, max_shard_bytes, 1).unwrap();
}

/// Changes fields of `source/config.json`.
pub fn edit_config(dir: &Path, edit: impl FnOnce(&mut Value)) {
    let path = dir.join("source/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

/// Rewrites the one weight file of `source` with other tensors; values are f32.
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

/// A token file of one document: ids under `vocabulary` that follow from a seed.
pub fn write_tokens(prefix: &Path, vocabulary: usize, count: usize, seed: u64) {
    let mut state = seed;
    let ids: Vec<u32> = (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 33) % vocabulary as u64) as u32
        })
        .collect();
    let mut writer = TokenFileWriter::replace(prefix, vocabulary).unwrap();
    writer.push_document(&ids).unwrap();
    writer.finish(Provenance::default()).unwrap();
}

/// A program in a directory, away from the user's own hub settings and from any hub.
pub fn program(path: &str, dir: &Path) -> Command {
    let mut command = Command::new(path);
    isolate(&mut command, dir);
    command
}

/// See [`program`].
pub fn isolate(command: &mut Command, dir: &Path) {
    command.current_dir(dir);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("HF_") || name.ends_with("_PROXY")) {
            command.env_remove(name);
        }
    }
    command.env("HF_HOME", dir.join("hf")).env("HF_HUB_OFFLINE", "1").env("no_proxy", "127.0.0.1");
}

/// The standard error of a command that fails with `code`, prints nothing else and leaves the
/// names in `dir` as they are: one line, without `error: `.
pub fn failure(dir: &Path, command: &mut Command, code: i32) -> String {
    let before = names(dir);
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert_eq!(stdout(&output), "", "{text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    assert_eq!(names(dir), before, "{text}");
    text.strip_prefix("error: ").unwrap().trim_end().to_owned()
}

/// Standard output of a command that succeeds.
pub fn success(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Names in a directory, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The root of the repository, where the examples of the help work.
pub fn repository() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().unwrap()
}

/// The fixtures that are not part of the repository; says that a test is skipped without them.
pub fn fixtures() -> Option<PathBuf> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/fixtures"));
    if !path.is_dir() {
        println!("skipped: no fixtures in {}", path.display());
        return None;
    }
    Some(path.to_owned())
}

/// Words of the tokenizer of [`write_tokenizer`]: `w0` to `w29`, fewer than [`VOCABULARY`].
pub const WORDS: usize = 30;

/// Writes a tokenizer whose token n is the word `wn`; `unknown` makes different ones.
pub fn write_tokenizer(dir: &Path, unknown: &str) {
    let words: serde_json::Map<String, Value> =
        (0..WORDS).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": unknown},
    });
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}
