//! `moh-train --plan`.

use std::fs;
use std::process::Command;

use super::{PROGRAM, moh_train, prepared};
use moh_testkit::programs::{
    VOCABULARY, assert_has, failure, program, repository, success, write_tokens,
};

#[test]
fn the_plan_of_the_papers_run_needs_nothing_but_the_repository() {
    let text = success(&mut cluster_plan(&["--device-tflops", "600"]));
    let time = "Time on one device that achieves 600 TFLOP/s, assumed\n";
    assert_has(&text, &["8,030,261,248", time]);
    assert!(!repository().join("runs/moh-llama3-8b").exists());
}

#[test]
fn a_missing_shape_names_its_key_and_from_where_its_path_is_meant() {
    let dir = prepared();
    let plan = |shape: &str| {
        let mut command = moh_train(dir.path(), &[&format!("model.config={shape}")]);
        failure(dir.path(), command.arg("--plan"), 1)
    };
    let here = dir.path().canonicalize().unwrap();
    let missing = plan("shapes/config.json");
    let expected = "recipe.toml: model.config: shapes/config.json: No such file or directory";
    assert!(missing.starts_with(expected), "{missing}");
    let from = format!("a relative path is one from the current directory, {}", here.display());
    assert!(missing.ends_with(&from), "{missing}");
    // If the file exists, the error does not name the current directory.
    let other = plan("recipe.toml");
    assert!(other.starts_with("recipe.toml: model.config: recipe.toml: "), "{other}");
    assert!(!other.contains("current directory"), "{other}");
}

#[test]
fn a_plan_shows_the_epochs_of_each_source() {
    let dir = prepared();
    write_tokens(&dir.path().join("more"), VOCABULARY, 16_001, 2);
    let sources = "data.sources=[{path = \"text\", weight = 1}, {path = \"more\", weight = 3}]";
    let plan = |overrides: &[&str]| success(moh_train(dir.path(), overrides).arg("--plan"));
    // 4,000 sequences: 1,000 of the 124 of one file and 3,000 of the 1,000 of the other.
    let long = ["stage.adapt.tokens=32000", "stage.moh.tokens=32000"];
    let text = plan(&[&[sources], &long[..]].concat());
    let epochs = ["8.06 epochs", "3.00 epochs", "16,000 of 2,000", "48,000 of 16,001"];
    assert_has(&text, &epochs);
    assert_eq!(text.matches("warning: ").count(), 2, "{text}");
    // Each window is read once.
    let once = plan(&["data.sources=[{path = \"more\"}]", "stage.moh.tokens=12160"]);
    assert!(once.contains("1.00 epochs") && !once.contains("warning"), "{once}");
    let absent = plan(&["data.sources=[{path = \"text\"}, {path = \"none\"}]"]);
    assert!(absent.contains("epochs: not known, not all files of data.sources are on"), "{absent}");
}

/// Returns `moh-train --plan` of the paper's run with more arguments.
fn cluster_plan(arguments: &[&str]) -> Command {
    let mut command = program(PROGRAM, &repository());
    command.args(["--recipe", "recipes/moh-llama3-8b.toml", "--plan"]).args(arguments);
    command
}

const H100: &str = "recipes/hardware/h100-sxm.toml";

#[test]
fn the_plan_of_many_ranks_has_their_memory_traffic_and_time() {
    let text = success(&mut cluster_plan(&["--ranks", "64"]));
    let parts = ["Layout of 64 ranks", "2 x 32 x 1", "1 x 8 x 8", "Sent by one rank in a step"];
    assert_has(&text, &parts);
    assert!(!text.contains("Predicted time") && !text.contains("one process"), "{text}");
    let text = success(&mut cluster_plan(&["--ranks", "64", "--hardware", H100]));
    let parts = [
        "Predicted time on H100 SXM 80 GB",
        "pipeline bubble",
        "tokens/s",
        "stage, without its checkpoints",
        "one checkpoint: not known; set node.filesystem_write_gb_per_s and node.hash_gb_per_s",
    ];
    assert_has(&text, &parts);
    // Each time names the basis of its rates, and the rates follow.
    let ends = |start: &str, end: &str| {
        let mut lines = text.lines().map(str::trim);
        assert!(
            lines.any(|line| line.starts_with(start) && line.ends_with(end)),
            "{start}\n{text}"
        );
    };
    for time in ["compute", "tokens/s", "all stages", "data ranks' exchange, as far as exposed"] {
        ends(time, "  assumed");
    }
    ends("matrix products, bf16", "675 TFLOP/s  assumed");
    let profile = fs::read_to_string(repository().join(H100)).unwrap();
    let known = "ranks = 8\nfilesystem_write_gb_per_s = { value = 2, basis = \"measured\" }\n\
                 hash_gb_per_s = { value = 4, basis = \"published\" }";
    let dir = prepared();
    let path = dir.path().join("known.toml");
    fs::write(&path, profile.replace("ranks = 8", known)).unwrap();
    let text = success(&mut cluster_plan(&["--ranks", "64", "--hardware", path.to_str().unwrap()]));
    assert!(text.contains("stage, with its checkpoints"), "{text}");
    // 66.4 GB by 8 nodes at 2 GB/s, and hashed by 64 ranks at 4.
    let line = text.lines().find(|line| line.contains("hashing and writing one")).unwrap();
    assert!(line.contains("4.4 seconds  published"), "{line}");
    let long = ["--set", "stage.adapt.micro_batch=8", "--ranks", "64", "--hardware", H100];
    let text = success(&mut cluster_plan(&long));
    assert!(text.contains("stage adapt DOES NOT FIT: "), "{text}");
}

#[test]
fn suggested_layouts_can_be_planned() {
    let text = success(&mut cluster_plan(&["--ranks", "64", "--hardware", H100, "--suggest"]));
    let first = |stage: &str| {
        let lines = text.lines().skip_while(|line| !line.starts_with(&format!("Stage {stage}: ")));
        let mut lines = lines.filter(|line| line.contains("--set"));
        lines.next().unwrap().split_once(". ").unwrap().1.to_string()
    };
    let (adapt, moh) = (first("adapt"), first("moh"));
    let overrides = adapt.split(' ').chain(moh.split(' '));
    let arguments: Vec<&str> =
        ["--ranks", "64", "--hardware", H100].into_iter().chain(overrides).collect();
    let planned = success(&mut cluster_plan(&arguments));
    assert!(!planned.contains("DOES NOT FIT"), "{planned}");
    let text = success(&mut cluster_plan(&["--ranks", "1", "--hardware", H100, "--suggest"]));
    assert!(text.contains("Stage adapt: 0 of ") && text.contains("the smallest needs "), "{text}");
}

#[test]
fn a_plan_of_too_few_ranks_is_refused() {
    let message = failure(&repository(), &mut cluster_plan(&["--ranks", "1"]), 1);
    assert!(message.ends_with("use --ranks 2, or --suggest for layouts of 1 rank"), "{message}");
}

#[test]
fn a_plan_of_a_hub_id_needs_its_configuration_alone() {
    let dir = prepared();
    let cache = dir.path().join("cache");
    let plan = || {
        let mut command = moh_train(dir.path(), &["model.from=org/tiny"]);
        command.args(["--plan", "--device-tflops", "1"]).env("HF_HUB_CACHE", &cache);
        command
    };
    let message = failure(dir.path(), &mut plan(), 1);
    assert!(message.contains("recipe.toml: model.config: name a config.json on this"), "{message}");
    assert!(message.contains("is not in the hub's cache"), "{message}");
    assert!(message.ends_with("moh-convert --from org/tiny --download"), "{message}");
    let (model, commit) = (cache.join("models--org--tiny"), "0123456789abcdef");
    let snapshot = model.join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), commit).unwrap();
    fs::copy(dir.path().join("source/config.json"), snapshot.join("config.json")).unwrap();
    let measured = success(moh_train(dir.path(), &[]).arg("--plan"));
    assert!(measured.contains("Time on this processor if steps reach the rate"), "{measured}");
    let whole = success(moh_train(dir.path(), &[]).args(["--plan", "--device-tflops", "1"]));
    assert_eq!(success(&mut plan()), whole);
}
