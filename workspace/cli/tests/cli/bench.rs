//! `moh-bench` as a process, at tiny sizes: the contents of its JSON.

use std::path::Path;
use std::process::Command;

use moh_testkit::options::take_negative_numbers;
use moh_testkit::programs::{exits, failure, program, repository, success, workplace};
use serde_json::Value;

fn moh_bench(dir: &Path, arguments: &str) -> Command {
    let mut command = program(env!("CARGO_BIN_EXE_moh-bench"), dir);
    command.args(arguments.split_whitespace());
    command
}

fn json(dir: &Path, arguments: &str) -> Value {
    let text = success(&mut moh_bench(dir, &format!("{arguments} --json")));
    let value: Value = serde_json::from_str(&text).unwrap();
    for limit in
        ["f32_matmul_flops_per_second", "bf16_matmul_flops_per_second", "copy_bytes_per_second"]
    {
        positive(&value["machine"][limit]);
    }
    positive(&value["machine"]["threads"]);
    value
}

fn positive(value: &Value) -> f64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("{value}: not a number"));
    assert!(number > 0.0 && number.is_finite(), "{number}");
    number
}

#[test]
fn a_step_of_a_bare_configuration_is_measured() {
    let dir = workplace();
    for options in ["", "--dtype bf16", "--active 0.75 --shared-heads 2", "--layers 1"] {
        let arguments =
            format!("step --config source --batch 2 --length 9 --steps 3 --warmup 1 {options}");
        let found = json(dir.path(), &arguments);
        let (median, best) = (&found["tokens_per_second"]["median"], &found["seconds"]["best"]);
        positive(median);
        positive(&found["share_of_f32_matmul"]);
        positive(&found["share_of_bf16_matmul"]);
        positive(&found["flops_per_second"]["best"]);
        assert_eq!(found["steps"], 3);
        assert_eq!(found["step"]["tokens"], 18.0);
        assert!(positive(best) <= positive(&found["seconds"]["median"]));
        // The loss of random weights is about the loss of 37 equally likely tokens.
        let loss = positive(&found["loss"]["first"]);
        assert!((loss - 37f64.ln()).abs() < 0.2, "{loss}");
        assert_ne!(found["loss"]["last"], found["loss"]["first"]);
        if cfg!(target_os = "linux") {
            let memory = &found["memory"];
            assert!(positive(&memory["peak_bytes"]) >= positive(&memory["before_bytes"]));
        }
        let active = if options.starts_with("--active") { 6 } else { 8 };
        assert_eq!(found["model"]["active_heads"], active, "{options}");
        assert_eq!(found["model"]["layers"], if options == "--layers 1" { 1 } else { 2 });
        let dtype = if options.contains("bf16") { "bf16" } else { "f32" };
        assert_eq!(found["step"]["dtype"], dtype);
    }
}

#[test]
fn generation_of_several_sequences_is_measured() {
    let dir = workplace();
    for options in ["", "--dtype bf16 --active 0.5 --router group", "--layers 1 --dense"] {
        let arguments = "generation --config source --batch 1,3 --context 5,90 --tokens 3";
        let found = json(dir.path(), &format!("{arguments} {options}"));
        let rows = found["measurements"].as_array().unwrap();
        let sizes =
            rows.iter().map(|row| [&row["batch"], &row["context"]].map(|n| n.as_u64().unwrap()));
        assert!(sizes.eq([[1, 5], [3, 5], [1, 90], [3, 90]]), "{rows:?}");
        for row in rows {
            positive(&row["prompt_tokens_per_second"]);
            let passes = positive(&row["pass_seconds"]["median"]);
            let rate = positive(&row["tokens_per_second"]["median"]);
            assert!((rate * passes / row["batch"].as_f64().unwrap() - 1.0).abs() < 1e-9);
        }
        let model = found["model"].as_str().unwrap();
        assert_eq!(model.ends_with("dense"), !options.contains("group"), "{model}");
    }
    let mut command = moh_bench(dir.path(), "generation --config source --batch 99999999999");
    let message = failure(dir.path(), &mut command, 2);
    assert!(
        message.starts_with("99999999999 sequences of 289 tokens: must be at most"),
        "{message}"
    );
}

#[test]
fn a_step_of_a_recipe_is_that_of_its_stage() {
    let recipe = "step --recipe recipes/quickstart.toml --layers 1 --steps 1 --warmup 0 \
                  --set stage.moh.micro_batch=1 --set stage.moh.batch_tokens=512";
    let found = json(&repository(), &format!("{recipe} --stage moh"));
    assert_eq!(found["model"]["active_heads"], 6);
    assert_eq!(found["step"]["tokens"], 512.0);
    assert_eq!(found["step"]["micro_batches"], 2);
    assert_eq!(found["loss"]["first"], found["loss"]["last"]);
    let found = json(&repository(), &format!("{recipe} --stage moh --dense"));
    assert_eq!(found["model"]["active_heads"], 8);
}

#[test]
fn attention_is_held_against_dense_attention() {
    let dir = workplace();
    let shape = "--heads 8 --kv-heads 2 --head-dim 8 --length 33 --batch 2 --seconds 0";
    for dtype in ["f32", "bf16"] {
        let found = json(dir.path(), &format!("attention {shape} --dtype {dtype}"));
        let cases = found["cases"].as_array().unwrap();
        let heads: Vec<_> =
            cases.iter().map(|case| (&case["shared_heads"], &case["routed_top_k"])).collect();
        assert_eq!(
            heads[1..],
            [(&4.into(), &4.into()), (&4.into(), &2.into()), (&2.into(), &2.into())]
        );
        assert_eq!(
            (&cases[0]["attention"], heads[0]),
            (&"dense".into(), (&Value::Null, &Value::Null))
        );
        assert_eq!(cases[0]["both"]["ratio_to_dense"], 1.0);
        for case in cases {
            for pass in ["forward", "backward", "both"] {
                positive(&case[pass]["ratio_to_dense"]);
                positive(&case[pass]["flops_per_second"]);
                positive(&case[pass]["seconds"]["median"]);
            }
        }
    }
    let found = json(dir.path(), &format!("attention {shape} --active 0.75 --shared-heads 2"));
    assert_eq!(found["cases"][1]["routed_top_k"], 4);
    let table = success(&mut moh_bench(dir.path(), &format!("attention {shape}")));
    assert!(table.contains("2 shared + 2 routed"), "{table}");
}

#[test]
fn operators_are_held_against_the_machine() {
    let dir = workplace();
    let found = json(dir.path(), "operators rms_norm --seconds 0");
    let operators = found["operators"].as_array().unwrap();
    assert_eq!(operators.len(), 4, "forward and backward, f32 and bf16");
    for operator in operators {
        assert_eq!(operator["unit"], "bytes");
        positive(&operator["per_second"]);
        positive(&operator["share_of_limit"]);
    }
    let table = success(&mut moh_bench(dir.path(), "operators rms_norm --seconds 0 --dtype f32"));
    assert!(table.contains("rms_norm_backward") && table.contains("GB/s"), "{table}");
    assert!(!table.contains("linear"), "{table}");
}

#[test]
fn a_machine_is_named_with_its_limits() {
    let dir = workplace();
    let found = json(dir.path(), "machine");
    let name = found["processor"].as_str().unwrap();
    let mut converted = moh_bench(dir.path(), "machine --json");
    let converted = success(converted.env("MOH_BF16", "f32"));
    assert!(converted.contains("\"bf16_path\": \"f32\""), "{converted}");
    let line = success(&mut moh_bench(dir.path(), "machine"));
    assert!(line.starts_with(&format!("{name}: the CPU, ")), "{line}");
    assert!(line.contains(", f32 matmul ") && line.trim_end().ends_with(" GB/s"), "{line}");
    let mut unknown = moh_bench(dir.path(), "machine");
    let message = failure(dir.path(), unknown.env("MOH_BF16", "fast"), 1);
    assert!(
        message.starts_with("--device cpu: the CPU: ") && message.contains("MOH_BF16 = \"fast\""),
        "{message}"
    );
}

#[test]
fn what_makes_no_sense_is_refused_in_a_sentence() {
    let dir = workplace();
    let refused =
        |arguments: &str, code| failure(dir.path(), &mut moh_bench(dir.path(), arguments), code);
    for (arguments, message) in [
        (
            "step --config source --batch 0",
            "0 sequences of 512 tokens: must be 1 to 268435456 tokens in all",
        ),
        (
            "step --config source --active 0.3 --shared-heads 4",
            "--active 0.3 of 8 heads is 2, fewer than the 4 shared heads: use a larger share or fewer \
             --shared-heads",
        ),
        ("attention --length 0", "--batch 1 --length 0: must be 1 to 16777216 tokens in all"),
        (
            "attention --shared-heads 1,2",
            "--shared-heads: 2 counts for 3 fractions of --active: give as many, or one",
        ),
        ("attention --active 2", "--active 2: must be a share of the heads, 0 to 1"),
        ("operators nothing", "nothing: no operator's name contains it"),
    ] {
        assert_eq!(refused(arguments, 2), message);
    }
    let message = refused("step --config nowhere", 1);
    assert!(message.starts_with("nowhere: "), "{message}");
    let message = refused("attention --heads 7", 1);
    assert!(message.contains("7 query heads do not divide into 8 key/value heads"), "{message}");
}

#[test]
fn the_help_of_every_command_has_an_example() {
    let dir = workplace();
    for command in
        ["--help", "step --help", "attention --help", "operators --help", "machine --help"]
    {
        let text = success(&mut moh_bench(dir.path(), command));
        assert!(text.contains("Example") && text.contains("\n  moh-bench "), "{text}");
    }
    for wrong in
        ["", "step", "step --config a --recipe b", "attention --kv-heads 0", "machine --size 9"]
    {
        exits(&mut moh_bench(dir.path(), wrong), 2);
    }
}

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = tempfile::tempdir().unwrap();
    let options = take_negative_numbers(env!("CARGO_BIN_EXE_moh-bench"), &[], dir.path());
    assert!(options >= 15, "{options}");
    let (_, text) = exits(&mut moh_bench(dir.path(), "attention --shared-heads -1,2"), 2);
    assert!(text.contains("a whole number of at least 0"), "{text}");
}
