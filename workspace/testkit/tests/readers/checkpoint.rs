//! A checkpoint's manifest, the part of a rank, and its files of tensors. Hashes are updated after a
//! mutation, so that the readers read the mutated bytes.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use moh_checkpoint::{RunDirectory, StoredCheckpoint};
use moh_data::{TokenFileInfo, TokenFileWriter};
use moh_recipe::Recipe;
use moh_step::TensorKind;
use moh_testkit::programs::{copy_all, read_json};
use moh_testkit::trained_run::run;
use serde_json::json;
use tempfile::TempDir;

use crate::{outcome, target};

const STEP: u64 = 2;

/// A directory with a run of two steps.
static RUN: LazyLock<TempDir> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = TokenFileWriter::create(&dir.path().join("text"), 32).unwrap();
    for document in 0..40u32 {
        writer.push_document(&[document % 32; 9]).unwrap();
    }
    writer.finish(TokenFileInfo::default()).unwrap();
    let text = format!(
        r#"
run = {{ dir = "{dir}/run", seed = 1, device = "cpu", dtype = "bf16" }}
data = {{ sequence_length = 8, sources = [{{ path = "{dir}/text" }}] }}
[model.new]
vocab_size = 32
hidden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = 2
[[stage]]
name = "only"
attention = "dense"
tokens = 16
batch_tokens = 8
micro_batch = 1
learning_rate = {{ max = 1e-2, min = 1e-3, warmup_steps = 1 }}
"#,
        dir = dir.path().display()
    );
    run(&mut Recipe::parse(&text, Path::new("recipe.toml"), &[]).unwrap(), None);
    dir
});

/// Returns a copy of the run's checkpoint, in its own run directory.
fn copy() -> (TempDir, RunDirectory) {
    let dir = tempfile::tempdir().unwrap();
    let (from, run) = (RunDirectory::new(RUN.path().join("run")), RunDirectory::new(dir.path()));
    copy_all(&from.checkpoint(STEP), &run.checkpoint(STEP));
    (dir, run)
}

fn write_manifest(run: &RunDirectory, text: &[u8]) {
    fs::write(run.checkpoint(STEP).join("manifest.json"), text).unwrap();
    let hash = format!("{}  manifest.json\n", blake3::hash(text));
    fs::write(run.checkpoint(STEP).join("manifest.json.b3"), hash).unwrap();
}

fn read(run: &RunDirectory) -> Result<(), String> {
    let stored = StoredCheckpoint::of_step(run, STEP).map_err(|error| error.to_string())?;
    let mut values = [0f32; 32 * 8];
    let name = "model.embed_tokens.weight";
    let read = stored.read_f32(TensorKind::Weight, name, &mut values);
    outcome(read.and_then(|()| stored.verify()))
}

/// MiB of parsed JSON, and of a tensor of the small model.
const MEMORY: usize = 32;

#[test]
fn a_mutated_manifest_is_read_or_refused() {
    let (_dir, run) = copy();
    let seed = fs::read(run.checkpoint(STEP).join("manifest.json")).unwrap();
    target("manifest", &[seed], MEMORY).run(|input| {
        write_manifest(&run, input);
        read(&run)
    });
}

#[test]
fn a_mutated_part_is_read_or_refused() {
    let (_dir, run) = copy();
    let (manifest, part) =
        (run.checkpoint(STEP).join("manifest.json"), run.checkpoint(STEP).join("tensors.json"));
    let manifest = read_json(&manifest);
    target("part", &[fs::read(&part).unwrap()], MEMORY).run(|input| {
        fs::write(&part, input).unwrap();
        let mut manifest = manifest.clone();
        manifest["parts"][0]["blake3"] = json!(blake3::hash(input).to_hex().as_str());
        write_manifest(&run, manifest.to_string().as_bytes());
        read(&run)
    });
}

#[test]
fn mutated_tensors_of_a_checkpoint_are_refused() {
    let (_dir, run) = copy();
    let weights = run.checkpoint(STEP).join("weights.safetensors");
    target("checkpoint-weights", &[fs::read(&weights).unwrap()], MEMORY).run(|input| {
        fs::write(&weights, input).unwrap();
        read(&run)
    });
}
