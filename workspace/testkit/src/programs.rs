//! Code that the tests of the programs share: tiny models, token files, and commands without the user's
//! settings.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use moh_data::{TokenFileInfo, TokenFileWriter};
use moh_hf::weight_files::WEIGHTS_FILE;
use moh_hf::{ConfigFile, write_random_model};
use moh_kernels::DType;
use moh_model::{HeadCounts, MohConfig, RouterKind, SharedHeadSets};
use serde_json::{Value, json};

/// Vocabulary of the model of [`write_source`].
pub const VOCABULARY: usize = 37;

/// Returns a directory with a tiny random Llama of 8 heads in `source`.
pub fn workplace() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_source(&dir.path().join("source"), u64::MAX);
    dir
}

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

pub fn edit_config(dir: &Path, edit: impl FnOnce(&mut Value)) {
    edit_json(&dir.join("source/config.json"), edit);
}

pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut json = read_json(path);
    edit(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Rewrites the weight file of `source` with other tensors, which have f32 values.
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

/// Returns a program in a directory, without the user's hub settings and without a hub.
pub fn program(path: &str, dir: &Path) -> Command {
    let mut command = Command::new(path);
    isolate(&mut command, dir);
    command
}

/// Isolates a command. See [`program`].
pub fn isolate(command: &mut Command, dir: &Path) {
    command.current_dir(dir);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("HF_") || name.ends_with("_PROXY")) {
            command.env_remove(name);
        }
    }
    command.env("HF_HOME", dir.join("hf")).env("HF_HUB_OFFLINE", "1").env("no_proxy", "127.0.0.1");
}

/// Returns the names in a directory, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Copies a directory that does not change during the copy.
pub fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy_all(&path, &target),
            false => drop(fs::copy(&path, target).unwrap()),
        }
    }
}

/// Flips a bit of the byte at a position, which may depend on the file's length.
pub fn flip(path: &Path, position: impl Fn(usize) -> usize) {
    let mut bytes = fs::read(path).unwrap();
    let position = position(bytes.len());
    bytes[position] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Returns the root of the repository, where the examples of the help run.
pub fn repository() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().unwrap()
}

/// The start of a recipe that trains the model of [`write_source`] on the tokens of [`trainable`].
/// The rest of `[data]` and the stages follow.
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

/// Returns a dense and a Mixture-of-Head stage of a recipe, with these numbers of tokens, and `batch_tokens` per step.
pub fn two_stages([adapt, moh]: [u64; 2], batch_tokens: u64) -> String {
    format!(
        r#"
[[stage]]
name = "adapt"
attention = "dense"
tokens = {adapt}
batch_tokens = {batch_tokens}
micro_batch = 2
learning_rate = {{ max = 1e-2, min = 1e-3, warmup_steps = 2 }}

[[stage]]
name = "moh"
attention = "moh"
moh = {{ shared_heads = 4, routed_top_k = 2 }}
tokens = {moh}
batch_tokens = {batch_tokens}
micro_batch = 2
learning_rate = {{ max = 5e-3, min = 1e-3, warmup_steps = 1 }}
"#
    )
}

/// Returns a directory with this model, the token files `text` and `held-out`, and a recipe of the head and `rest`.
pub fn trainable(rest: &str) -> tempfile::TempDir {
    let dir = workplace();
    write_tokens(&dir.path().join("text"), VOCABULARY, 2000, 1);
    write_tokens(&dir.path().join("held-out"), VOCABULARY, 2000, 2);
    fs::write(dir.path().join("recipe.toml"), format!("{RECIPE_HEAD}{rest}")).unwrap();
    dir
}

/// Returns a directory with a model in `source` that has only zeros as logits.
pub fn uniform() -> tempfile::TempDir {
    let dir = workplace();
    edit_weights(dir.path(), |tensors| {
        for (name, _, bytes) in tensors {
            if name == "lm_head.weight" {
                bytes.fill(0);
            }
        }
    });
    dir
}

/// Writes a token file with a single document. Ids are below `vocabulary` and derived from a seed.
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
    writer.finish(TokenFileInfo::default()).unwrap();
}

/// Writes the model in `source` as a model with heads that tokens select.
pub fn write_moh(
    source: &Path,
    out: &Path,
    shared_heads: impl Into<SharedHeadSets>,
    routed_top_k: impl Into<HeadCounts>,
) {
    let file = ConfigFile::read(source).unwrap();
    let moh = Some(MohConfig {
        router: RouterKind::QueryNorm,
        shared_heads: shared_heads.into(),
        routed_top_k: routed_top_k.into(),
    });
    copy_all(source, out);
    let fields = file.to_json(&moh_model::ModelConfig { moh, ..file.config.clone() }, None);
    fs::write(out.join("config.json"), Value::Object(fields).to_string()).unwrap();
}

/// Returns the standard error of a command, without `error: `: a single line. Checks that the command fails with
/// `code`, prints nothing else and leaves the names in `dir` unchanged.
#[track_caller]
pub fn failure(dir: &Path, command: &mut Command, code: i32) -> String {
    let before = names(dir);
    let (printed, text) = exits(command, code);
    assert_eq!(printed, "", "{text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    assert_eq!(names(dir), before, "{text}");
    text.strip_prefix("error: ").unwrap().trim_end().to_owned()
}

#[track_caller]
pub fn success(command: &mut Command) -> String {
    exits(command, 0).0
}

/// Returns the standard output and the standard error of a command, which must end with this code.
#[track_caller]
pub fn exits(command: &mut Command, code: i32) -> (String, String) {
    let output = command.output().unwrap();
    let (printed, text) = (stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(code), "{printed}{text}");
    (printed, text)
}

/// Fails if a text lacks one of these parts.
#[track_caller]
pub fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Returns the fixtures next to the repository. `MOH_FIXTURES` names the fixtures of `tools/fixtures` instead.
pub fn fixtures() -> PathBuf {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/fixtures");
    std::env::var_os("MOH_FIXTURES").map_or_else(|| beside.into(), PathBuf::from)
}

/// Returns a figure of the created [`fixtures`], or, without such figures, the figure of stories260K.
pub fn figure(name: &str, of_stories: f64) -> f64 {
    let made = fixtures().join("figures.json");
    if made.exists() { read_json(&made)[name].as_f64().unwrap() } else { of_stories }
}

/// Words of the tokenizer of [`write_tokenizer`]: `w0` to `w29`, fewer than [`VOCABULARY`].
pub const WORDS: usize = 30;

/// Writes a tokenizer with the word `wn` as token n. Different `unknown` words make different
/// tokenizers.
pub fn write_tokenizer(dir: &Path, unknown: &str) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("tokenizer.json"), word_tokenizer(WORDS, unknown)).unwrap();
}

/// Returns the file of such a tokenizer with `words` words.
pub fn word_tokenizer(words: usize, unknown: &str) -> String {
    let words: serde_json::Map<String, Value> =
        (0..words).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": unknown},
    });
    tokenizer.to_string()
}
