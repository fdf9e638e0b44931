//! `moh-eval` as a process: its output and files, and one sentence per invalid input.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::fs;
use std::path::Path;
use std::process::Command;

use moh_model::HeadCounts;
use safetensors::{Dtype, SafeTensors};
use support::{
    VOCABULARY, edit_config, edit_weights, failure, fixtures, program, success, workplace,
    write_moh, write_tokenizer, write_tokens,
};

mod support;

fn moh_eval(dir: &Path, line: &str) -> Command {
    let mut command = program(env!("CARGO_BIN_EXE_moh-eval"), dir);
    command.args(line.split(' '));
    command
}

/// A value that `moh-eval loss` prints, by name.
fn printed(text: &str, name: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line[name.len()..].trim().parse().unwrap()
}

/// A model in `source` whose logits are all 0.
fn uniform() -> tempfile::TempDir {
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

#[test]
fn a_uniform_model_has_the_loss_of_its_vocabulary() {
    let dir = uniform();
    write_tokens(&dir.path().join("text"), VOCABULARY, 333, 1);
    let line = "loss --model source --data text --sequence-length 10";
    let text = success(&mut moh_eval(dir.path(), line));
    // 33 windows of 9 targets; ln 37 = 3.610918.
    let expected = "loss           3.610918\nperplexity     37.0000\n\
                    bits per byte  - (the model has no tokenizer)\ntokens         297\n";
    assert_eq!(text, expected);
    // The model's context, 64 tokens, if no length is given.
    let text = success(&mut moh_eval(dir.path(), "loss --model source --data text"));
    assert!(text.ends_with("tokens         315\n"), "{text}");
    let text = success(&mut moh_eval(dir.path(), &format!("{line} --dtype bf16")));
    assert!((printed(&text, "loss") - 37f64.ln()).abs() < 1e-6, "{text}");
}

#[test]
fn bits_per_byte_count_the_bytes_of_the_targets() {
    let dir = uniform();
    write_tokenizer(&dir.path().join("source"), "w0");
    write_tokens(&dir.path().join("text"), 10, 50, 1);
    let line = "loss --model source --data text --sequence-length 10";
    let text = success(&mut moh_eval(dir.path(), line));
    // 9 words of 2 bytes with 8 spaces between them.
    let expected = 37f64.log2() * 9.0 / 26.0;
    assert!((printed(&text, "bits per byte") - expected).abs() < 1e-6, "{text}");
}

#[test]
fn the_routing_of_each_layer_is_printed_on_request() {
    let dir = workplace();
    write_tokens(&dir.path().join("text"), VOCABULARY, 333, 1);
    write_moh(&dir.path().join("source"), &dir.path().join("moh"), 4, 2);
    let loss = |line: &str| success(&mut moh_eval(dir.path(), line));
    let line = "loss --model moh --data text --sequence-length 10";
    let (plain, text) = (loss(line), loss(&format!("{line} --heads")));
    let routing = text.strip_prefix(plain.as_str()).unwrap();
    let layers: Vec<&str> = routing.split("\nlayer ").skip(1).collect();
    assert_eq!(layers.len(), 2, "{text}");
    for layer in layers {
        let (head, loads) = layer.split_once("  heads 4-7 ").unwrap();
        assert!(head.contains("nats of at most 1.3863, loads "), "{head}");
        let loads = loads.split_whitespace().map(|load| load.trim_end_matches('%'));
        let sum: f64 = loads.map(|load| load.parse::<f64>().unwrap()).sum();
        // Each token selects 2 of the 4 routed heads.
        assert!((sum - 200.0).abs() < 0.3, "{layer}");
    }
    let text = loss("loss --model source --data text --sequence-length 10 --heads");
    assert!(text.ends_with("\n\nno layer routes: the model is dense\n"), "{text}");
}

#[test]
fn logits_are_written_with_the_heads_that_were_selected() {
    let dir = workplace();
    fs::write(dir.path().join("ids.json"), "[[1, 2, 3, 4, 5], [36, 0, 7, 7, 7]]").unwrap();
    write_moh(&dir.path().join("source"), &dir.path().join("moh"), 4, 2);
    let logits = |model: &str| {
        let line = format!("logits --model {model} --ids ids.json --out {model}.logits");
        let text = success(&mut moh_eval(dir.path(), &line));
        assert_eq!(text, format!("{model}.logits: logits of 2 x 5 tokens\n"));
        fs::read(dir.path().join(format!("{model}.logits"))).unwrap()
    };
    let (dense, moh) = (logits("source"), logits("moh"));
    let (dense, moh) = (SafeTensors::deserialize(&dense), SafeTensors::deserialize(&moh));
    let (dense, moh) = (dense.unwrap(), moh.unwrap());
    assert_eq!(dense.names(), ["logits"]);
    let mut names = moh.names();
    names.sort_unstable();
    assert_eq!(names, ["logits", "routed_mask"]);
    for file in [&dense, &moh] {
        let logits = file.tensor("logits").unwrap();
        assert_eq!((logits.dtype(), logits.shape()), (Dtype::F32, &[2, 5, VOCABULARY][..]));
    }
    assert!(dense.tensor("logits").unwrap().data() != moh.tensor("logits").unwrap().data());
    let mask = moh.tensor("routed_mask").unwrap();
    assert_eq!((mask.dtype(), mask.shape()), (Dtype::U8, &[2, 2, 5, 4][..]));
    for row in mask.data().chunks(4) {
        assert!(row.iter().all(|&bit| bit <= 1) && row.iter().sum::<u8>() == 2, "{row:?}");
    }
}

#[test]
fn layers_with_other_heads_have_tables_of_their_own() {
    let dir = workplace();
    fs::write(dir.path().join("ids.json"), "[[0, 5, 6, 7], [0, 8, 9, 10]]").unwrap();
    let counts = |counts: [usize; 2]| HeadCounts::from_iter(counts);
    for (name, shared, top_k, expected) in [
        ("a", [8, 2], [0, 3], &[("routed_mask.1", 6, 3)][..]),
        ("b", [5, 2], [1, 3], &[("routed_mask.0", 3, 1), ("routed_mask.1", 6, 3)]),
    ] {
        write_moh(
            &dir.path().join("source"),
            &dir.path().join(name),
            counts(shared),
            counts(top_k),
        );
        let line = format!("logits --model {name} --ids ids.json --out {name}.logits");
        success(&mut moh_eval(dir.path(), &line));
        let bytes = fs::read(dir.path().join(format!("{name}.logits"))).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(tensors.names().len(), 1 + expected.len());
        for &(table, routed, chosen) in expected {
            let mask = tensors.tensor(table).unwrap();
            assert_eq!((mask.dtype(), mask.shape()), (Dtype::U8, &[2, 4, routed][..]), "{table}");
            for row in mask.data().chunks(routed) {
                assert!(row.iter().all(|&bit| bit <= 1) && row.iter().sum::<u8>() == chosen);
            }
        }
    }
}

#[test]
fn ids_that_do_not_fit_are_refused() {
    let dir = workplace();
    for (text, expected) in [
        ("{", "ids.json: not a list of lists of token ids"),
        ("[1, 2]", "ids.json: not a list of lists of token ids"),
        ("[[-1]]", "ids.json: not a list of lists of token ids"),
        ("[]", "ids.json: contains no ids"),
        ("[[], []]", "ids.json: contains no ids"),
        ("[[1, 2], [3]]", "ids.json: list 1 has 1 ids, but list 0 has 2"),
        ("[[1, 37]]", "37"),
        (&format!("[{:?}]", [1; 65]), "ids.json: 65 ids exceed the model's 64 positions"),
    ] {
        fs::write(dir.path().join("ids.json"), text).unwrap();
        let line = "logits --model source --ids ids.json --out out";
        let message = failure(dir.path(), &mut moh_eval(dir.path(), line), 1);
        assert!(message.contains(expected), "{message}");
    }
    fs::write(dir.path().join("ids.json"), "[[1]]").unwrap();
    for (ids, out, expected) in
        [("none", "out", "none: No such file"), ("ids.json", "no/out", "no/out: No such file")]
    {
        let line = format!("logits --model source --ids {ids} --out {out}");
        let message = failure(dir.path(), &mut moh_eval(dir.path(), &line), 1);
        assert!(message.starts_with(expected), "{message}");
    }
    fs::write(dir.path().join("out"), "theirs").unwrap();
    let line = "logits --model source --ids ids.json --out out";
    let message = failure(dir.path(), &mut moh_eval(dir.path(), line), 1);
    assert_eq!(message, "out: already exists: choose another name, or replace it with --force");
    assert_eq!(fs::read(dir.path().join("out")).unwrap(), b"theirs");
    success(&mut moh_eval(dir.path(), &format!("{line} --force")));
}

#[test]
fn a_context_length_beyond_the_text_is_refused_before_it_takes_memory() {
    let dir = workplace();
    write_tokens(&dir.path().join("text"), VOCABULARY, 100, 1);
    edit_config(dir.path(), |config| config["max_position_embeddings"] = (1u64 << 40).into());
    let line = "loss --model source --data text";
    let message = failure(dir.path(), &mut moh_eval(dir.path(), line), 1);
    assert!(message.starts_with("text: has 100 tokens, one window needs "), "{message}");
}

#[test]
fn runs_and_checkpoints_are_told_from_models() {
    let dir = workplace();
    let root = dir.path();
    write_tokens(&root.join("text"), VOCABULARY, 100, 1);
    let told = |model: &str| {
        let line = format!("loss --model {model} --data text --sequence-length 10");
        failure(root, &mut moh_eval(root, &line), 1)
    };
    fs::create_dir_all(root.join("run/checkpoints/step-7")).unwrap();
    fs::write(root.join("run/recipe.toml"), "").unwrap();
    for name in ["manifest.json", "manifest.json.b3"] {
        fs::write(root.join("run/checkpoints/step-7").join(name), "").unwrap();
    }
    assert!(told("run").starts_with("run: is a run that has not finished, "));
    let checkpoint = told("run/checkpoints/step-7");
    assert!(checkpoint.starts_with("run/checkpoints/step-7: is a checkpoint, "), "{checkpoint}");
    fs::rename(root.join("source"), root.join("run/export")).unwrap();
    assert_eq!(told("run"), "run: is a run, name its model: run/export");
    success(&mut moh_eval(root, "loss --model run/export --data text --sequence-length 10"));
}

#[test]
fn token_files_and_models_that_do_not_fit_are_refused() {
    let dir = workplace();
    let root = dir.path();
    write_tokens(&root.join("text"), VOCABULARY, 100, 1);
    write_tokens(&root.join("short"), VOCABULARY, 9, 1);
    write_tokens(&root.join("wide"), VOCABULARY + 9, 100, 1);
    for (arguments, expected) in [
        ("--model source --data none", "none.bin: cannot read: No such file"),
        ("--model source --data short", "short: has 9 tokens, one window needs 10"),
        ("--model source --data wide", "wide.bin: token "),
        ("--model ./none --data text", "./none: no such directory"),
    ] {
        let line = format!("loss {arguments} --sequence-length 10");
        let message = failure(root, &mut moh_eval(root, &line), 1);
        assert!(message.starts_with(expected), "{message}");
    }
    for length in ["0", "1", "65"] {
        let line = format!("loss --model source --data text --sequence-length {length}");
        let message = failure(root, &mut moh_eval(root, &line), 2);
        assert!(message.contains("must be 2 to 64, the model's context length"), "{message}");
    }
    let line = "loss --model source --data text --sequence-length many";
    assert_eq!(moh_eval(root, line).output().unwrap().status.code(), Some(2));

    write_tokenizer(&root.join("source"), "w0");
    write_tokenizer(&root.join("other"), "w1");
    fs::write(root.join("words.txt"), "w1 w2 w3 ".repeat(40)).unwrap();
    let prepare = "prepare --no-append-eos --tokenizer other --out theirs words.txt";
    success(program(env!("CARGO_BIN_EXE_moh-data"), root).args(prepare.split(' ')));
    let line = "loss --model source --data theirs --sequence-length 10";
    let message = failure(root, &mut moh_eval(root, line), 1);
    assert!(message.starts_with("theirs.json: prepared with another tokenizer"), "{message}");
    fs::write(root.join("source/tokenizer.json"), b"{\xff}").unwrap();
    let line = "loss --model source --data text --sequence-length 10";
    let message = failure(root, &mut moh_eval(root, line), 1);
    assert!(message.starts_with("source/tokenizer.json: not a valid tokenizer"), "{message}");
}

#[test]
fn each_help_has_an_example() {
    let dir = tempfile::tempdir().unwrap();
    for line in ["--help", "loss --help", "logits --help", "tasks --help"] {
        let text = success(&mut moh_eval(dir.path(), line));
        assert!(text.contains("Example") && text.contains("\n  moh-eval "), "{text}");
    }
    assert_eq!(moh_eval(dir.path(), "none").output().unwrap().status.code(), Some(2));
}

#[test]
fn the_validation_stories_have_their_known_loss() {
    let Some(fixtures) = fixtures() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (model, stories) =
        (fixtures.join("stories260K"), fixtures.join("data/stories-valid.jsonl"));
    let mut prepare = program(env!("CARGO_BIN_EXE_moh-data"), dir.path());
    // The known loss is that of stories without an end-of-text token.
    prepare
        .args(["prepare", "--no-append-eos", "--out", "valid", "--tokenizer"])
        .arg(&model)
        .arg(stories);
    success(&mut prepare);
    let mut command = moh_eval(dir.path(), "loss --data valid --sequence-length 256");
    let text = success(command.arg("--model").arg(model));
    // shared/fixtures/README.md: windows of 256 tokens with 255 targets each.
    assert!((printed(&text, "loss") - 1.2202).abs() < 0.001, "{text}");
}
