//! The output of a run, and replays of its steps.

use std::fs;
use std::path::Path;

use moh_recipe::Recipe;
use serde_json::Value;

use super::{PROGRAM, moh_train, prepared};
use moh_testkit::programs::{
    assert_has, edit_json, exits, failure, program, success, trainable, two_stages,
};

#[test]
fn lines_count_the_steps_of_all_stages() {
    let dir = prepared();
    let overrides = ["stage.adapt.tokens=128", "stage.moh.tokens=192"];
    let (_, text) = exits(&mut moh_train(dir.path(), &overrides), 0);
    let steps = text.lines().filter_map(|line| line.split_once(": loss").map(|(step, _)| step));
    let steps: Vec<&str> = steps.filter(|step| !step.starts_with("validation")).collect();
    assert_eq!(steps, ["adapt 1/5", "adapt 2/5", "moh 3/5", "moh 4/5", "moh 5/5"], "{text}");
}

#[test]
fn lines_name_data_stages_and_evaluations() {
    let dir = prepared();
    let (table, text) = exits(&mut moh_train(dir.path(), &[]), 0);
    // 480 sequences of 16 tokens. The file has 124 sequences.
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("data text: 3.87 epochs, 7,680 tokens of 2,000"));
    let warning = "warning: text is read 3.87 times: add data, or lower the stages' tokens or the \
                   source's weight";
    assert_eq!(lines.next(), Some(warning));
    assert!(lines.next().unwrap().starts_with("validation before training: loss "), "{text}");
    assert_eq!(lines.next(), Some("stage adapt: dense attention, 8 heads, 60 steps"));
    assert!(lines.next().unwrap().contains(", gradient norm "), "{text}");
    let parts = [
        "validation after stage adapt: loss ",
        "validation after conversion, 6 of 8 heads: loss ",
        "stage moh: Mixture-of-Head, 6 of 8 heads, 60 steps\n",
        "validation after stage moh: loss ",
        "checkpoint of step 7 complete after ",
        "checkpoint of step 120 complete after ",
    ];
    assert_has(&text, &parts);
    // moh-eval reads 2000 / 16 windows, the run 2 micro-batches of 2.
    let note = "\nmoh-eval reads all 125 windows; the table's losses are of the first 4\n";
    assert!(table.ends_with(note), "{table}");
    assert!(table.contains("bits per byte"), "{table}");
}

/// Returns the commands that a run prints at its end, as words.
fn next_commands(table: &str) -> Vec<Vec<String>> {
    let commands = table.split_once("\nTry next:\n").unwrap().1;
    let commands = commands.lines().take_while(|line| line.starts_with("  "));
    commands.map(|line| shlex::split(line).unwrap()).collect()
}

#[test]
fn the_commands_to_try_next_hold_as_they_are_and_compare_like_with_like() {
    let dir = prepared();
    let short = ["stage.adapt.tokens=128", "stage.moh.tokens=64"];
    let other = ["run.seed=5", "stage.moh.learning_rate.max=1e-3", "run.dir=my runs/a b"];
    let table = success(&mut moh_train(dir.path(), &[&short[..], &other[..]].concat()));
    let commands = next_commands(&table);
    let run = |words: &[String]| {
        // The programs are in one directory.
        let path = Path::new(PROGRAM).with_file_name(&words[0]);
        success(program(path.to_str().unwrap(), dir.path()).args(&words[1..]))
    };
    for words in &commands {
        run(words);
    }
    let half = commands.iter().find(|words| words[0] == "moh-train").unwrap();
    assert!(half.contains(&"run.dir=my runs/a b-half".to_owned()), "{half:?}");
    let recipe = |run: &str| {
        let path = dir.path().join("my runs").join(run);
        Recipe::load(&path.join("recipe.toml"), &[]).unwrap()
    };
    let (whole, mut halved) = (recipe("a b"), recipe("a b-half"));
    assert_eq!((whole.run.seed, whole.stages[1].learning_rate.max), (5, 1e-3));
    let moh = halved.stages[1].moh.clone().unwrap();
    assert_eq!((moh.shared_heads, moh.routed_top_k), (Some(2.into()), Some(2.into())));
    halved.stages[1].moh = whole.stages[1].moh.clone();
    halved.run.dir = whole.run.dir.clone();
    assert_eq!(halved, whole);
    // A run of half of its heads is not compared with itself.
    let again = run(half);
    assert!(next_commands(&again).iter().all(|words| words[0] != "moh-train"), "{again}");
}

#[test]
fn a_text_without_end_of_text_is_warned_of() {
    let dir = prepared();
    let warning = |change: &dyn Fn(&mut Value)| {
        edit_json(&dir.path().join("text.json"), change);
        let _ = fs::remove_dir_all(dir.path().join("run"));
        let short = ["stage.adapt.tokens=128", "stage.moh.tokens=64"];
        let (_, text) = exits(&mut moh_train(dir.path(), &short), 0);
        text.lines().filter(|line| line.starts_with("warning: text: ")).count()
    };
    // Without a record of the token, with a record of no token, and with a token.
    assert_eq!(warning(&|_| {}), 0);
    assert_eq!(warning(&|json| json["eos_token"] = Value::Null), 1);
    assert_eq!(warning(&|json| json["eos_token"] = "e".into()), 0);
}

#[test]
fn validation_on_the_text_of_training_is_warned_of() {
    let dir = prepared();
    // The content counts, not the path.
    for ending in [".bin", ".idx"] {
        fs::copy(dir.path().join(format!("text{ending}")), dir.path().join(format!("b{ending}")))
            .unwrap();
    }
    let warnings = |validation: &str| {
        let _ = fs::remove_dir_all(dir.path().join("run"));
        let validation = format!("data.validation.path={validation}");
        let short = ["stage.adapt.tokens=128", "stage.moh.tokens=64", &validation];
        let (_, text) = exits(&mut moh_train(dir.path(), &short), 0);
        let found = text.lines().filter(|line| line.starts_with("warning: data.validation: "));
        found.map(str::to_owned).collect::<Vec<_>>()
    };
    let expected = "warning: data.validation: b is the text of data.sources.0, on which the run trains: its \
                    loss does not say how the model does on other text";
    assert_eq!(warnings("b"), [expected]);
    assert!(warnings("held-out").is_empty());
}

#[test]
fn a_run_without_validation_has_no_table() {
    let stages = two_stages([64, 64], 64);
    let dir = trainable(&stages.replace("warmup_steps = 2", "warmup_steps = 1"));
    let (printed, told) = exits(&mut moh_train(dir.path(), &[]), 0);
    assert!(printed.starts_with("model    run/export\n"), "{printed}");
    assert!(told.contains("stage adapt: dense attention, 8 heads, 1 step\n"), "{told}");
    // A finished run says so again.
    assert!(success(&mut moh_train(dir.path(), &[])).contains("\nmodel    run/export\n"));
}

#[test]
fn a_step_is_replayed_from_the_run_directory_alone() {
    let dir = prepared();
    let overrides = ["stage.adapt.tokens=640", "stage.moh.tokens=640"];
    success(&mut moh_train(dir.path(), &overrides));
    let line = fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    let line: Value = serde_json::from_str(line.lines().nth(15).unwrap()).unwrap();
    let text = success(program(PROGRAM, dir.path()).args(["replay", "run", "--step", "16"]));
    assert!(
        text.starts_with("step 16, step 6 of stage moh, from the checkpoint of step 14\n"),
        "{text}"
    );
    let loss = format!("loss {:.4}, balance ", line["loss"].as_f64().unwrap());
    assert!(text.lines().nth(1).unwrap().starts_with(&loss), "{text}");
    assert!(text.contains("\napplied\n") && text.contains("model.layers.0.mlp.up_proj.weight"));
    let mut late = program(PROGRAM, dir.path());
    let error = failure(dir.path(), late.args(["replay", "run", "--step", "21"]), 1);
    assert_eq!(error, "run: has no step 21: use 1 to 20");
}
