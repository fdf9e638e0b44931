//! A run of a tiny model, trained by the library, for the tests of programs that read runs.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use moh_comm::World;
use moh_data::{Provenance, TokenFileWriter};
use moh_kernels::open_device::OpenDevice;
use moh_recipe::Recipe;
use moh_train::RunOptions;
use serde_json::{Value, json};

use crate::programs::{VOCABULARY, workplace};

/// Four dense steps and two with some of the heads, and a checkpoint after each.
pub const RECIPE: &str = r#"
[run]
dir = "DIR/run"
seed = 1
device = "cpu"
dtype = "DTYPE"

[model]
from = "DIR/source"

[data]
sequence_length = 16
sources = [{ path = "DIR/text" }]

[checkpoint]
every_steps = 1
keep = 9

[[stage]]
name = "adapt"
attention = "dense"
tokens = 128
batch_tokens = 32
micro_batch = 2
learning_rate = { max = 1e-2, min = 1e-3, warmup_steps = 2 }
"#;

/// The second stage of the run.
pub const SECOND_STAGE: &str = r#"
[[stage]]
name = "moh"
attention = "moh"
moh = { shared_heads = 4, routed_top_k = 2 }
tokens = 64
batch_tokens = 32
micro_batch = 2
learning_rate = { max = 5e-3, min = 1e-3, warmup_steps = 1 }
"#;

/// A directory with a model, its tokenizer and a text.
pub fn prepared() -> tempfile::TempDir {
    let dir = workplace();
    let words: serde_json::Map<String, Value> =
        (0..VOCABULARY).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    });
    let source = dir.path().join("source");
    fs::write(source.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(source.join("generation_config.json"), "{\"eos_token_id\": 3}").unwrap();
    fs::write(source.join("chat_template.jinja"), "{{ messages }}").unwrap();
    let ids: Vec<u32> = (0..2000u32).map(|n| (n * n + n / 7) % VOCABULARY as u32).collect();
    let mut writer = TokenFileWriter::replace(&dir.path().join("text"), VOCABULARY).unwrap();
    writer.push_document(&ids).unwrap();
    writer.finish(Provenance::default()).unwrap();
    dir
}

/// Runs the recipe to its end.
pub fn train(dir: &Path, text: &str, dtype: &str) {
    let text = text.replace("DIR", dir.to_str().unwrap()).replace("DTYPE", dtype);
    let path = Path::new("recipe.toml");
    let mut recipe = Recipe::parse(&text, path, &[]).unwrap();
    let (stop, world) = (AtomicBool::new(false), World::single());
    let from = dir.join("source");
    let (device, options) = (OpenDevice::Cpu, RunOptions::new(&stop));
    moh_train::run(&mut recipe, path, Some(&from), device, &world, options, &mut |_| {}).unwrap();
}
