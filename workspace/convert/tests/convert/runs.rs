//! `moh-convert` on runs of `moh-train`: the model of any checkpoint equals the run's own export.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use moh_hf::{ConfigFile, WeightFiles};
use moh_kernels::{DType, ElementType};
use moh_testkit::programs::{flip, read_json};
use moh_testkit::trained_run::{prepared, train};

use crate::{converted, failure};

/// Returns the files of a model directory.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    entries.map(|path| (name(&path), fs::read(path).unwrap())).collect()
}

#[test]
fn the_model_of_a_checkpoint_is_the_runs_own_export() {
    for dtype in [ElementType::F32, ElementType::BF16] {
        let dir = prepared();
        let place = dir.path();
        // The end of the first stage is the end of a run without the second stage.
        train(place, 1, |recipe| recipe.run.dtype = dtype);
        fs::rename(place.join("run"), place.join("first")).unwrap();
        train(place, 2, |recipe| recipe.run.dtype = dtype);
        // The origin of the run is not needed.
        fs::rename(place.join("source"), place.join("gone")).unwrap();
        converted(place, &["--from", "run", "--to", "end"]);
        let expected = files(&place.join("run/export"));
        assert_eq!(expected.len(), 8, "{:?}", expected.keys());
        let card = String::from_utf8(expected["README.md"].clone()).unwrap();
        for line in [
            "The base model is `source`, a model in a local directory.",
            "`moh-train` trained it on 192 tokens in 6 steps, on sequences of 16 tokens:",
            "| adapt | dense | `text` | 128 | 32 | 1e-2 to 1e-3 |",
            "| moh | Mixture-of-Head | `text` | 64 | 32 | 5e-3 to 1e-3 |",
        ] {
            assert!(card.contains(&format!("\n{line}\n")), "{line}\n{card}");
        }
        assert!(files(&place.join("end")) == expected, "{dtype:?}");
        let printed = converted(place, &["--from", "run@4", "--to", "middle"]);
        assert!(printed.contains("8 shared + 0 of 0 routed = 8 of 8 active"), "{printed}");
        assert!(files(&place.join("middle")) == files(&place.join("first/export")), "{dtype:?}");
        assert!(files(&place.join("middle")) != expected);
    }
}

#[test]
fn options_apply_to_the_model_of_a_checkpoint() {
    let dir = prepared();
    let place = dir.path();
    train(place, 2, |recipe| recipe.run.dtype = ElementType::BF16);
    let config = |name: &str| ConfigFile::read(&place.join(name)).unwrap();
    converted(
        place,
        &["--from", "run@6", "--attention", "dense", "--dtype", "f32", "--out", "dense"],
    );
    assert!(config("dense").config.moh.is_none());
    assert_eq!(config("dense").fields["torch_dtype"], DType::F32.torch_name());
    // The model of a checkpoint equals its export, whatever type stores the model.
    const EMBEDDING: &str = "model.embed_tokens.weight";
    let embedding = |dir: &str| {
        let files = WeightFiles::open(&place.join(dir)).unwrap();
        let mut values = vec![0f32; files.get(EMBEDDING).unwrap().shape.iter().product()];
        files.read_f32(EMBEDDING, &mut values).unwrap();
        values
    };
    assert!(embedding("dense") == embedding("run/export"));
    converted(place, &["--from", "run@2", "--active", "0.5", "--pad-vocab-to", "16"]);
    let moh = config("run@2-MoH").config;
    assert_eq!(moh.active_heads(), 4.into());
    assert_eq!(moh.vocab_size, 48);
    converted(place, &["--from", "run@5"]);
    assert_eq!(config("run@5-MoH").config.active_heads(), 6.into());
    let receipt = ["--from", "run@1", "--receipt", "receipt.json"];
    converted(place, &receipt);
    let receipt = read_json(&place.join("receipt.json"));
    assert_eq!(receipt["source"], "run/checkpoints/step-1");
    assert_eq!(receipt["tensors"][0]["source_dtype"], "bf16");
    assert_eq!(receipt["tensors"][0]["unchanged"], true);
}

#[test]
fn a_damaged_or_missing_checkpoint_leaves_no_model() {
    let dir = prepared();
    let place = dir.path();
    train(place, 1, |_| {});
    flip(&place.join("run/checkpoints/step-3/weights.safetensors"), |length| length - 1);
    let error = failure(place, &["--from", "run@3"]);
    assert!(error.contains("does not match its hash"), "{error}");
    // Sizes that were never stored are rejected before memory is allocated.
    let manifest = place.join("run/checkpoints/step-1/manifest.json");
    let mut json = read_json(&manifest);
    json["config"]["num_hidden_layers"] = 10_000.into();
    json["config"]["intermediate_size"] = (1 << 24).into();
    let text = json.to_string();
    fs::write(&manifest, &text).unwrap();
    let hash = blake3::hash(text.as_bytes());
    fs::write(manifest.with_extension("json.b3"), format!("{hash}  manifest.json\n")).unwrap();
    for (arguments, expected) in [
        ("run@1", "the configuration asks for"),
        ("run@9", "no checkpoint of step 9: name one of 1, 2, 3, 4"),
        ("run@2 --revision main", "only hub ids have a --revision"),
        ("run@2 --verify", "are compared with their hashes"),
    ] {
        let arguments: Vec<_> = ["--from"].into_iter().chain(arguments.split(' ')).collect();
        let error = failure(place, &arguments);
        assert!(error.contains(expected), "{error}");
    }
    // Without a step, an unfinished run's newest good checkpoint.
    for name in ["summary.json", "checkpoints/step-4/manifest.json"] {
        fs::remove_file(place.join("run").join(name)).unwrap();
    }
    converted(place, &["--from", "run", "--out", "newest"]);
    converted(place, &["--from", "run@2", "--out", "second"]);
    assert!(files(&place.join("newest")) == files(&place.join("second")));
}

#[test]
fn a_run_from_a_run_says_how_it_was_trained_and_keeps_the_terms() {
    let dir = prepared();
    let place = dir.path();
    fs::write(place.join("source/LICENSE"), "the terms").unwrap();
    train(place, 1, |_| {});
    fs::remove_dir_all(place.join("source")).unwrap();
    train(place, 2, |recipe| {
        recipe.run.dir = place.join("second");
        recipe.model.from = Some(place.join("run@2").display().to_string());
    });
    let export = files(&place.join("second/export"));
    assert_eq!(export["LICENSE"], b"the terms");
    let card = String::from_utf8(export["README.md"].clone()).unwrap();
    for (part, count) in [
        ("The base model is `run_2`, a model in a local directory.", 1),
        ("on 192 tokens in 6 steps", 1),
        ("| adapt | dense |", 1),
        ("That of the base model: `LICENSE`.", 1),
    ] {
        assert_eq!(card.matches(part).count(), count, "{part}\n{card}");
    }
}
