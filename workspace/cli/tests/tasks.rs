//! `moh-eval tasks` as a process: scores, its files, and one sentence per invalid input.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use support::{
    edit_config, edit_weights, failure, names, program, repository, success, uniform, workplace,
    write_moh, write_tokenizer,
};

mod support;

fn moh_eval(dir: &Path, line: &str) -> Command {
    let mut command = program(env!("CARGO_BIN_EXE_moh-eval"), dir);
    command.args(line.split(' '));
    command
}

const CHOICES: &str = r#"{"context": "w9 w8", "choices": ["w1 w2", "w3"], "answer": 1}
{"context": "w7", "choices": ["w4", "w5", "w6"], "answer": 2}
"#;
const CLOZES: &str = r#"{"context": "w9", "answer": "w0 w0"}
{"context": "w9", "answer": "w5"}
"#;

/// A directory with the model `source`, all of whose logits are 0, a tokenizer of words, and task files.
fn prepared() -> tempfile::TempDir {
    let dir = uniform();
    write_tokenizer(&dir.path().join("source"), "w0");
    fs::write(dir.path().join("choices.jsonl"), CHOICES).unwrap();
    fs::write(dir.path().join("clozes.jsonl"), CLOZES).unwrap();
    dir
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_uniform_model_has_the_scores_of_its_ties() {
    let dir = prepared();
    let line = "tasks --model source choices.jsonl clozes.jsonl";
    // Each token has ln 37. The shorter choice is more likely, but less so by character; of equal choices the
    // first is predicted, and of equal tokens w0. Both answers: 37 ** 1.5, 37 by word, 37 ** (3 / 7) by byte.
    let expected = "\
task     metric               value    stderr
choices  acc                 0.5000    0.5000
         acc_norm            0.0000    0.0000
         acc_bytes           0.0000    0.0000
         (2 examples)
clozes   acc                 0.5000    0.5000
         perplexity        225.0622  406.3406
         word_perplexity    37.0000         -
         byte_perplexity     4.6999         -
         (2 examples)
";
    assert_eq!(success(&mut moh_eval(dir.path(), line)), expected);
    let found = success(&mut moh_eval(dir.path(), &format!("{line} --json --limit 1")));
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!((&found["model"], &found["dtype"]), (&json!("source"), &json!("f32")));
    let expected = json!({
        "task": "choices", "kind": "multiple_choice", "examples": 1, "acc": 1.0, "acc_stderr": null,
        "acc_norm": 0.0, "acc_norm_stderr": null, "acc_bytes": 0.0, "acc_bytes_stderr": null,
    });
    assert_eq!(found["tasks"][0], expected);
    assert_eq!(found["tasks"][1]["kind"], "cloze");
    assert_eq!(found["tasks"][1]["acc"], 1.0);
}

#[test]
fn each_example_has_a_line() {
    let dir = prepared();
    let line = "tasks --model source choices.jsonl clozes.jsonl --out lines.jsonl";
    success(&mut moh_eval(dir.path(), line));
    let found = lines(&dir.path().join("lines.jsonl"));
    assert_eq!(found.len(), 4);
    let sums: Vec<f64> = serde_json::from_value(found[0]["log_likelihoods"].clone()).unwrap();
    for (sum, tokens) in sums.iter().zip([2.0, 1.0]) {
        assert!((sum + tokens * 37f64.ln()).abs() < 1e-6, "{sum}");
    }
    let place = |line: &Value| (line["file"].clone(), line["line"].clone());
    assert_eq!(place(&found[1]), (json!("choices.jsonl"), json!(2)));
    assert_eq!(place(&found[2]), (json!("clozes.jsonl"), json!(1)));
    let predictions = ["predicted", "predicted_norm", "predicted_bytes", "answer"];
    assert_eq!(predictions.map(|key| found[0][key].as_u64().unwrap()), [1, 0, 0, 1]);
    assert_eq!(predictions.map(|key| found[1][key].as_u64().unwrap()), [0, 0, 0, 2]);
    let right: Vec<bool> = found.iter().map(|line| line["right"].as_bool().unwrap()).collect();
    assert_eq!(right, [true, false, true, false]);

    let message = failure(dir.path(), &mut moh_eval(dir.path(), line), 1);
    let expected = "lines.jsonl: already exists: choose another name, or replace it with --force";
    assert_eq!(message, expected);
    success(&mut moh_eval(dir.path(), &format!("{line} --force --limit 1")));
    assert_eq!(lines(&dir.path().join("lines.jsonl")).len(), 2);
    success(&mut moh_eval(dir.path(), "tasks --model source choices.jsonl --out new/lines.jsonl"));
    assert_eq!(lines(&dir.path().join("new/lines.jsonl")).len(), 2);
}

#[test]
fn a_long_context_keeps_its_end() {
    let dir = workplace();
    let root = dir.path();
    write_tokenizer(&root.join("source"), "w0");
    write_moh(&root.join("source"), &root.join("moh"), 4, 2);
    let sums = |model: &str, context: &str, options: &str| {
        let example = json!({"context": context, "choices": ["w1", "w2 w3"], "answer": 0});
        fs::write(root.join("task.jsonl"), example.to_string()).unwrap();
        let line = format!("tasks task.jsonl --model {model} --out out --force{options}");
        success(&mut moh_eval(root, &line));
        let found = lines(&root.join("out"))[0]["log_likelihoods"].clone();
        serde_json::from_value::<Vec<f64>>(found).unwrap()
    };
    let long = "w4 ".repeat(100) + "w5 w6 w7";
    let (cut, short) = (sums("moh", &long, " --max-length 3"), sums("moh", "w5 w6 w7", ""));
    // Three tokens are read: of the first choice the three before it.
    let is_close = |a: f64, b: f64| (a - b).abs() < 1e-5;
    assert!(is_close(cut[0], short[0]) && !is_close(cut[1], short[1]), "{cut:?} {short:?}");
    // The model's 64 positions limit what it reads.
    let whole = "w4 ".repeat(61) + "w5 w6 w7";
    assert!(is_close(sums("moh", &long, "")[0], sums("moh", &whole, "")[0]));
    assert!(!is_close(sums("source", "w5 w6 w7", "")[0], short[0]));
    let bf16 = sums("moh", "w5 w6 w7", " --dtype bf16");
    assert!((bf16[0] - short[0]).abs() < 0.2, "{bf16:?} {short:?}");
}

#[test]
fn invalid_tasks_are_refused_and_leave_nothing() {
    let dir = prepared();
    let root = dir.path();
    fs::write(root.join("task.jsonl"), "").unwrap();
    for (text, expected) in [
        ("", "task.jsonl: contains no examples"),
        ("{", "task.jsonl:1: broken JSON at column"),
        (
            r#"{"context": "w1", "choices": ["w2", "w3"], "answer": 2}"#,
            "task.jsonl:1: answer = 2: must be the index of the right choice, 0 to 1",
        ),
        (
            r#"{"context": "w1", "choices": ["w2", ""], "answer": 0}"#,
            "task.jsonl:1: choices[1]: is empty",
        ),
        (
            "{\"context\": \"w1\", \"answer\": \"w2\"}\n{\"context\": \"w1\", \"answer\": \" \"}",
            "task.jsonl:2: choice 0 adds no token to the context",
        ),
        (
            r#"{"context": "", "answer": "w2"}"#,
            "task.jsonl:1: choice 0 has an empty context, and the tokenizer names no token",
        ),
        (
            &json!({"context": "w1", "answer": "w2 ".repeat(65)}).to_string(),
            "task.jsonl:1: choice 0 has 65 tokens, the model reads at most 64: shorten it",
        ),
    ] {
        fs::write(root.join("task.jsonl"), text).unwrap();
        let line = "tasks --model source task.jsonl --out out";
        let message = failure(root, &mut moh_eval(root, line), 1);
        assert!(message.starts_with(expected), "{message}");
    }
    for (line, code, expected) in [
        ("tasks --model source none.jsonl", 1, "none.jsonl: No such file"),
        ("tasks --model ./none choices.jsonl", 1, "./none: no such directory"),
        ("tasks --model source choices.jsonl --limit 0", 2, "--limit 0: must be at least 1"),
        ("tasks --model source choices.jsonl --max-length 65", 2, "--max-length 65: must be 1 to"),
        ("tasks --model source choices.jsonl --max-length 0", 2, "--max-length 0: must be 1 to"),
    ] {
        let message = failure(root, &mut moh_eval(root, line), code);
        assert!(message.starts_with(expected), "{message}");
    }
    for line in ["tasks --model source", "tasks --model source choices.jsonl --force"] {
        assert_eq!(moh_eval(root, line).output().unwrap().status.code(), Some(2));
    }
    fs::remove_file(root.join("source/tokenizer.json")).unwrap();
    let message = failure(root, &mut moh_eval(root, "tasks --model source choices.jsonl"), 1);
    assert!(message.starts_with("source: contains no tokenizer.json"), "{message}");
}

#[test]
fn damaged_weights_are_an_error_of_the_line() {
    let dir = prepared();
    let root = dir.path();
    edit_weights(root, |tensors| {
        for (name, _, bytes) in tensors {
            if name == "model.norm.weight" {
                bytes
                    .chunks_mut(4)
                    .for_each(|value| value.copy_from_slice(&f32::MAX.to_le_bytes()));
            } else if name == "lm_head.weight" {
                bytes.chunks_mut(4).for_each(|value| value.copy_from_slice(&1e30f32.to_le_bytes()));
            }
        }
    });
    let line = "tasks --model source clozes.jsonl --out out";
    let message = failure(root, &mut moh_eval(root, line), 1);
    assert!(message.starts_with("clozes.jsonl:1: the model gives the log-likelihood"), "{message}");
    assert!(!names(root).contains(&"out".to_owned()));
}

#[test]
fn an_empty_context_is_the_token_that_begins_texts() {
    let dir = workplace();
    let root = dir.path();
    write_tokenizer(&root.join("source"), "w0");
    edit_config(root, |config| config["bos_token_id"] = 3.into());
    let sum = |context: &str| {
        let example = json!({"context": context, "answer": "w1 w2"});
        fs::write(root.join("task.jsonl"), example.to_string()).unwrap();
        success(&mut moh_eval(root, "tasks task.jsonl --model source --out out --force"));
        lines(&root.join("out"))[0]["log_likelihood"].clone()
    };
    assert_eq!(sum(""), sum("w3"));
    assert!(sum("") != sum("w4"));
}

#[test]
fn the_quickstarts_model_has_the_scores_of_the_harness() {
    let dir = tempfile::tempdir().unwrap();
    let root = repository();
    let mut command = moh_eval(dir.path(), "tasks --json");
    command.arg("--model").arg(root.join("recipes/quickstart"));
    for task in ["village-choice", "village-cloze"] {
        command.arg(root.join(format!("tools/eval/tasks/{task}.jsonl")));
    }
    let found: Value = serde_json::from_str(&success(&mut command)).unwrap();
    let value = |task: usize, metric: &str| found["tasks"][task][metric].as_f64().unwrap();
    // lm-evaluation-harness 0.4.13 by tools/eval/check, 40 examples each.
    for metric in ["acc", "acc_norm", "acc_bytes"] {
        assert!((value(0, metric) - 0.95).abs() < 1e-12, "{found}");
    }
    assert!((value(1, "acc") - 0.375).abs() < 1e-12, "{found}");
    assert!((value(1, "perplexity") - 5.3379).abs() < 1e-3, "{found}");
}
