//! Variants of a recipe in one command: shared stages, interruptions, additions and changes.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{PROGRAM, ended_by, moh_train, newest_checkpoint, prepared, results, started};
use moh_testkit::programs::{VOCABULARY, exits, names, program, read_json, success, write_tokens};

const HALF: &str = "half:stage.moh.moh={ shared_heads = 2, routed_top_k = 2 }";
const FAST: &str = "fast:stage.moh.learning_rate.max=1e-2,stage.moh.moh.routed_top_k=1";
/// Differs from the recipe from its first step on.
const SEED: &str = "seed:run.seed=5";
const SHORT: [&str; 2] = ["stage.adapt.tokens=1920", "stage.moh.tokens=1920"];

fn compare(dir: &Path, variants: &[&str], overrides: &[&str]) -> Command {
    let mut command = moh_train(dir, &[&["run.dir=compared"], overrides].concat());
    for variant in variants {
        command.args(["--variant", variant]);
    }
    command
}

/// Trains a variant by itself, without sharing.
fn alone(dir: &Path, name: &str, overrides: &[&str]) {
    success(&mut moh_train(dir, &[&[&format!("run.dir={name}") as &str], overrides].concat()));
}

fn record(dir: &Path) -> Value {
    read_json(&dir.join("compared/comparison.json"))
}

#[test]
fn variants_end_as_they_would_alone_and_a_later_one_joins_them() {
    let dir = prepared();
    let dir = dir.path();
    let half = HALF.strip_prefix("half:").unwrap();
    alone(dir, "whole", &SHORT);
    alone(dir, "half", &[&SHORT[..], &[half]].concat());
    let text = success(&mut compare(dir, &["base", HALF], &SHORT));
    let compared = dir.join("compared");
    for (name, whole) in [("base", "whole"), ("half", "half")] {
        assert!(results(&compared.join(name)) == results(&dir.join(whole)), "{name}");
    }
    assert_eq!(names(&compared), [".lock", "base", "comparison.json", "half", "shared-adapt"]);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let evaluations = &record(dir)["variants"][1]["results"]["evaluations"];
    let loss = |index: usize| format!("{:.4}", evaluations[index]["loss"].as_f64().unwrap());
    assert_eq!(rows[0][..6], ["loss", "loaded", "adapt", "moh,", "untuned", "moh"]);
    assert_eq!(rows[2][..5], ["half", &loss(0), &loss(1), &loss(2), &loss(3)]);
    assert!(text.contains("\nhalf: stage.moh.moh.shared_heads = 2\n"), "{text}");
    let words = shlex::split(text.lines().last().unwrap()).unwrap();
    let report = Path::new(PROGRAM).with_file_name(&words[0]);
    success(program(report.to_str().unwrap(), dir).args(&words[1..]));
    assert!(fs::read_to_string(compared.join("report.html")).unwrap().contains("<h1>2 runs</h1>"));
    let shared = &record(dir)["shared"];
    assert_eq!(*shared, json!([{"name": "shared-adapt", "stages": ["adapt"]}]));

    // The shared stages are trained once, and finished variants are not trained again.
    let export = compared.join("half/export/model.safetensors");
    let before = fs::metadata(&export).unwrap().ino();
    let (_, shown) = exits(&mut compare(dir, &["base", HALF, SEED, FAST], &SHORT), 0);
    // By the variant with another seed.
    assert_eq!(shown.matches("adapt 1/60: ").count(), 1, "{shown}");
    assert!(shown.contains("variant seed: shares no stage, since it changes run.seed"), "{shown}");
    assert!(shown.contains("variant fast: continues shared-adapt after adapt"), "{shown}");
    assert_eq!(fs::metadata(&export).unwrap().ino(), before);
    // The lines of the shared stages are the variant's own.
    let [whole, fast, seed] = [dir.join("whole"), compared.join("fast"), compared.join("seed")]
        .map(|run| results(&run).metrics);
    assert_eq!(fast[..30], whole[..30]);
    assert_ne!(fast[31]["loss"], whole[31]["loss"]);
    assert_ne!(seed[0]["loss"], whole[0]["loss"]);
}

#[test]
fn an_interrupted_comparison_continues_with_the_same_bits() {
    let dir = prepared();
    let dir = dir.path();
    alone(dir, "whole", &[]);
    alone(dir, "half", &["stage.moh.moh={ shared_heads = 2, routed_top_k = 2 }"]);
    let variants = ["base", HALF];
    // In the shared stages, at their end, and in both variants.
    for (lines, microseconds) in [(12, 800), (70, 100), (14, 2_000), (40, 500), (30, 1_000)] {
        let (mut child, _reader) = started(&mut compare(dir, &variants, &[]), lines);
        std::thread::sleep(std::time::Duration::from_micros(microseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let (code, rest) = ended_by("TERM", started(&mut compare(dir, &variants, &[]), 6));
    assert!(code == Some(75) && rest.trim_end().ends_with("to continue"), "{code:?} {rest}");
    success(&mut compare(dir, &variants, &[]));
    let compared = dir.join("compared");
    for (name, whole) in [("base", "whole"), ("half", "half")] {
        assert!(results(&compared.join(name)) == results(&dir.join(whole)), "{name}");
    }
    assert_eq!(names(&compared), [".lock", "base", "comparison.json", "half", "shared-adapt"]);
    // Hard links: the checkpoint of the shared stages costs its bytes once.
    let step = newest_checkpoint(&compared.join("shared-adapt"));
    assert_eq!(step, 60);
}

#[test]
fn a_changed_comparison_is_refused_before_anything_is_trained() {
    let dir = prepared();
    let dir = dir.path();
    success(&mut compare(dir, &["base", HALF], &SHORT));
    let before = fs::read_to_string(dir.join("compared/comparison.json")).unwrap();
    let refused = |variants: &[&str], overrides: &[&str]| {
        let mut command = compare(dir, variants, &[&SHORT[..], overrides].concat());
        let (_, text) = exits(&mut command, 1);
        assert!(!text.contains("variant base: "), "{text}");
        let now = fs::read_to_string(dir.join("compared/comparison.json")).unwrap();
        assert_eq!(before, now);
        text
    };
    let third = "half:stage.moh.moh={ shared_heads = 2, routed_top_k = 1 }";
    let text = refused(&["base", third], &[]);
    assert!(
        text.contains("compared/half/recipe.toml: the recipe differs from the run's"),
        "{text}"
    );
    assert!(text.contains("  stage.moh.moh.routed_top_k: was 2, now 1"), "{text}");
    let text = refused(&["base", HALF], &["run.seed=2"]);
    assert!(text.contains("  run.seed: was 1, now 2"), "{text}");
    let text = refused(&["base", HALF], &["stage.adapt.tokens=2560"]);
    assert!(text.contains("  stage.adapt.tokens: was 1920, now 2560"), "{text}");
    let text = refused(&["base"], &[]);
    assert!(text.contains("compared/half: is a variant of this comparison"), "{text}");

    // Keys that change no weight may change, and the last stage may grow, in all variants.
    let longer = [SHORT[0], "stage.moh.tokens=2560", "log.every_steps=3"];
    success(&mut compare(dir, &["base", HALF], &longer));
    assert_eq!(record(dir)["variants"][1]["results"]["steps"], 70);
    // Without the run of the shared stages, which no variant needs now.
    fs::remove_dir_all(dir.join("compared/shared-adapt")).unwrap();
    success(&mut compare(dir, &["base", HALF], &longer));
    assert!(!dir.join("compared/shared-adapt").exists());
}

#[test]
fn a_comparison_is_not_continued_with_another_model_or_other_data() {
    let dir = prepared();
    let dir = dir.path();
    success(&mut compare(dir, &["base", HALF], &SHORT));
    write_tokens(&dir.join("other-text"), VOCABULARY, 2000, 3);
    fs::create_dir(dir.join("other-model")).unwrap();
    let mut weights = fs::read(dir.join("source/model.safetensors")).unwrap();
    let last = weights.len() - 4;
    weights[last..].fill(0);
    fs::write(dir.join("other-model/model.safetensors"), weights).unwrap();
    fs::copy(dir.join("source/config.json"), dir.join("other-model/config.json")).unwrap();
    let recipe = || fs::read_to_string(dir.join("compared/base/recipe.toml")).unwrap();
    let before = recipe();
    for (key, value) in [("data.sources.0.path", "other-text"), ("model.from", "other-model")] {
        let change = format!("{key}={value}");
        let overrides = [&SHORT[..], &[&change]].concat();
        let (_, text) = exits(&mut compare(dir, &[SEED, "base", HALF], &overrides), 1);
        let key = key.trim_end_matches(".path");
        assert!(
            text.contains(&format!("{key} is not the file that the run was started")),
            "{text}"
        );
        assert!(recipe() == before && !dir.join("compared/seed").exists(), "{text}");
    }
}

#[test]
fn the_plan_of_a_comparison_counts_shared_stages_once() {
    let dir = prepared();
    let dir = dir.path();
    let text = success(compare(dir, &["base", HALF], &[]).arg("--plan"));
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let counts = |row: usize, from: usize| rows[row][from..from + 2].join(" ");
    assert_eq!(rows[1][..4], ["shared-adapt", "adapt", "60", "3,840"]);
    assert_eq!(rows[3][..4], ["half", "moh", "60", "3,840"]);
    assert_eq!([counts(4, 2), counts(5, 2)], ["180 11,520", "240 15,360"]);
    assert!(!dir.join("compared").exists());
}
