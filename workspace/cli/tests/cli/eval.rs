//! `moh-eval` as a process: its output and files, and a sentence for each invalid input.

use std::fs;
use std::path::Path;
use std::process::Command;

use moh_data::{TokenFileInfo, TokenFileWriter};
use moh_model::HeadCounts;
use moh_report::head_measures::HeadDocument;
use moh_testkit::options::take_negative_numbers;
use moh_testkit::programs::{
    VOCABULARY, edit_config, exits, failure, figure, fixtures, names, program, success, trainable,
    uniform, workplace, write_moh, write_tokenizer, write_tokens,
};
use moh_testkit::texts::prepare_text;
use moh_text::prepare::AppendEos;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-eval");

fn moh_eval(dir: &Path, line: &str) -> Command {
    let mut command = program(PROGRAM, dir);
    command.args(line.split(' '));
    command
}

fn told(dir: &Path, line: &str) -> String {
    success(&mut moh_eval(dir, line))
}

fn json(dir: &Path, line: &str) -> Value {
    serde_json::from_str(&told(dir, &format!("{line} --json"))).unwrap()
}

/// Returns the error sentence of a command that fails.
fn refused(dir: &Path, line: &str, code: i32) -> String {
    failure(dir, &mut moh_eval(dir, line), code)
}

/// Returns a value that `moh-eval loss` prints, by name.
fn printed(text: &str, name: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line[name.len()..].trim().parse().unwrap()
}

#[test]
fn a_uniform_model_has_the_loss_of_its_vocabulary() {
    let dir = uniform();
    write_tokens(&dir.path().join("text"), VOCABULARY, 333, 1);
    let line = "loss --model source --data text --sequence-length 10";
    let text = told(dir.path(), line);
    // 33 windows of 9 targets; ln 37 = 3.610918.
    let expected = "loss           3.610918\nperplexity     37.0000\n\
                    bits per byte  - (the model has no tokenizer)\ntokens         297\n";
    assert_eq!(text, expected);
    // The model's context, 64 tokens, if no length is given.
    let (text, told_beside) =
        exits(&mut moh_eval(dir.path(), "loss --model source --data text"), 0);
    assert!(text.ends_with("tokens         315\n"), "{text}");
    let remark = "windows of 64 tokens, the model's context; --sequence-length changes that\n";
    assert_eq!(told_beside, remark);
    let text = told(dir.path(), &format!("{line} --dtype bf16"));
    assert!((printed(&text, "loss") - 37f64.ln()).abs() < 1e-6, "{text}");
    // Bits per byte count the bytes of targets.
    write_tokenizer(&dir.path().join("source"), "w0");
    write_tokens(&dir.path().join("text"), 10, 50, 1);
    let text = told(dir.path(), line);
    // 9 words of 2 bytes with 8 spaces between them.
    let expected = 37f64.log2() * 9.0 / 26.0;
    assert!((printed(&text, "bits per byte") - expected).abs() < 1e-6, "{text}");
}

#[test]
fn the_routing_of_each_layer_is_printed_on_request() {
    let dir = workplace();
    write_tokens(&dir.path().join("text"), VOCABULARY, 333, 1);
    write_moh(&dir.path().join("source"), &dir.path().join("moh"), 4, 2);
    let loss = |line: &str| told(dir.path(), line);
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
fn what_heads_do_is_printed_by_layer_and_text() {
    let dir = workplace();
    let root = dir.path();
    write_tokens(&root.join("text"), VOCABULARY, 333, 1);
    write_tokens(&root.join("other"), VOCABULARY, 100, 2);
    write_moh(&root.join("source"), &root.join("moh"), 4, 2);
    let heads = |line: &str| told(root, &format!("heads {line}"));
    let line = "moh --data a=text --data other --sequence-length 10";
    let json = json(root, &format!("heads {line}"));
    let texts = serde_json::json!([{"name": "a", "tokens": 330}, {"name": "other", "tokens": 100}]);
    assert_eq!(json["texts"], texts);
    let loss = "loss --model moh --data text --data other --sequence-length 10 --heads";
    let loss = self::json(root, loss);
    for layer in 0..2 {
        let found = &json["layers"][layer];
        for text in 0..2 {
            let routing = &loss["losses"][text]["routing"][layer];
            let entropy = |value: &Value| value.as_f64().unwrap();
            let [ours, theirs] = [&found["gate_entropy"][text], &routing["gate_entropy"]];
            assert!((entropy(ours) - entropy(theirs)).abs() < 1e-5, "{ours} {theirs}");
            for routed in 0..4 {
                assert_eq!(found["heads"][4 + routed]["load"][text], routing["loads"][routed]);
            }
        }
        assert_eq!(found["heads"][0]["load"], serde_json::json!([1.0, 1.0]));
        assert_eq!(found["pattern_similarities"][3][3], 1.0);
    }
    // Read as other programs read such documents.
    std::fs::write(root.join("heads.json"), json.to_string()).unwrap();
    let document = HeadDocument::read(&root.join("heads.json")).unwrap();
    assert_eq!(serde_json::to_value(&document).unwrap(), json);
    let text = heads(line);
    assert!(text.starts_with("load on a (330 tokens), other (100 tokens)\n\nlayer 0: "), "{text}");
    assert!(text.contains("\n  3*  100.0%  100.0%  "), "{text}");
    assert!(text.contains("mean feature rank of 8 routed heads: "), "{text}");
    // The model may be named as in the other commands, and fewer tokens may be measured.
    let fewer = heads("--model moh --data text --sequence-length 10 --tokens 100");
    assert!(fewer.starts_with("load on text (100 tokens)\n"), "{fewer}");
}

#[test]
fn the_heads_of_each_token_of_a_sentence_are_printed() {
    let dir = workplace();
    let root = dir.path();
    write_moh(&root.join("source"), &root.join("moh"), 4, 2);
    let sentence = |model: &str, more: &[&str]| {
        let mut command = moh_eval(root, &format!("heads {model} --sentence"));
        command.arg("w1 w2 w1").args(more);
        command
    };
    let message = failure(root, &mut sentence("moh", &[]), 2);
    assert!(message.starts_with("--sentence: moh has no tokenizer"), "{message}");
    for model in ["moh", "source"] {
        write_tokenizer(&root.join(model), "w0");
    }
    let text = success(&mut sentence("moh", &[]));
    let lines: Vec<&str> = text.lines().skip(1).collect();
    assert_eq!(lines[0], "routed heads that each token selects");
    for (line, token) in lines[2..].iter().zip(["\"w1\"", "\"w2\"", "\"w1\""]) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(words.len() == 5 && words[0] == token, "{text}");
        assert!(words[1..].iter().all(|head| ["4", "5", "6", "7"].contains(head)), "{text}");
    }
    let text = success(&mut sentence("moh", &["--json"]));
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["sentence"]["tokens"][1]["text"], "w2");
    let layer = &json["sentence"]["layers"][1];
    assert_eq!(layer["maps"].as_array().unwrap().len(), 8);
    assert_eq!(layer["maps"][7][2].as_array().unwrap().len(), 3);
    assert_eq!(layer["active"][2].as_array().unwrap().len(), 6);
    let text = success(&mut sentence("source", &[]));
    assert_eq!(text, "\nevery token computes all heads: the model is dense\n");
}

#[test]
fn logits_are_written_with_the_heads_that_were_selected() {
    let dir = workplace();
    fs::write(dir.path().join("ids.json"), "[[1, 2, 3, 4, 5], [36, 0, 7, 7, 7]]").unwrap();
    write_moh(&dir.path().join("source"), &dir.path().join("moh"), 4, 2);
    let logits = |model: &str| {
        let text = told(
            dir.path(),
            &format!("logits --model {model} --ids ids.json --out {model}.logits"),
        );
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
        told(dir.path(), &format!("logits --model {name} --ids ids.json --out {name}.logits"));
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
        let message = refused(dir.path(), "logits --model source --ids ids.json --out out", 1);
        assert!(message.contains(expected), "{message}");
    }
    fs::write(dir.path().join("ids.json"), "[[1]]").unwrap();
    for (ids, out, expected) in
        [("none", "out", "none: No such file"), ("ids.json", "ids.json/out", "ids.json/out: ")]
    {
        let message =
            refused(dir.path(), &format!("logits --model source --ids {ids} --out {out}"), 1);
        assert!(message.starts_with(expected), "{message}");
    }
    fs::write(dir.path().join("out"), "theirs").unwrap();
    let line = "logits --model source --ids ids.json --out out";
    let message = refused(dir.path(), line, 1);
    assert_eq!(message, "out: already exists: choose another name, or replace it with --force");
    assert_eq!(fs::read(dir.path().join("out")).unwrap(), b"theirs");
    told(dir.path(), &format!("{line} --force"));
    told(dir.path(), "logits --model source --ids ids.json --out new/directory/out");
    assert!(dir.path().join("new/directory/out").is_file());
}

#[test]
fn windows_have_at_most_2048_tokens_unless_told_otherwise() {
    let dir = workplace();
    write_tokens(&dir.path().join("text"), VOCABULARY, 100, 1);
    write_tokens(&dir.path().join("long"), VOCABULARY, 5000, 1);
    edit_config(dir.path(), |config| config["max_position_embeddings"] = (1u64 << 40).into());
    let (text, told) = exits(&mut moh_eval(dir.path(), "loss --model source --data long"), 0);
    assert!(text.ends_with("tokens         4094\n"), "{text}");
    let remark =
        "windows of 2048 tokens, of the model's context of 1099511627776; --sequence-length";
    assert!(told.starts_with(remark), "{told}");
    // A window longer than the text is rejected before memory is allocated.
    for (option, needed) in [("", "2048"), (" --sequence-length 1099511627776", "1099511627776")] {
        let message = refused(dir.path(), &format!("loss --model source --data text{option}"), 1);
        let expected = format!(
            "text: has 100 tokens, one window needs {needed}: add text, or lower --sequence-length"
        );
        assert_eq!(message, expected);
    }
}

#[test]
fn models_and_files_are_compared_in_one_table() {
    let dir = workplace();
    write_tokens(&dir.path().join("text"), VOCABULARY, 333, 1);
    write_tokens(&dir.path().join("other"), VOCABULARY, 100, 2);
    write_moh(&dir.path().join("source"), &dir.path().join("moh"), 4, 2);
    let loss = |line: &str| told(dir.path(), &format!("loss {line}"));
    let all = "--model source --model moh --data text --data other --sequence-length 10";
    let table = loss(all);
    let rows: Vec<Vec<&str>> =
        table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 5, "{table}");
    let json = json(dir.path(), &format!("loss {all} --heads"));
    assert_eq!((&json["dtype"], &json["sequence_length"]), (&"f32".into(), &10.into()));
    let pairs = [("source", "text"), ("source", "other"), ("moh", "text"), ("moh", "other")];
    for (place, (model, data)) in pairs.into_iter().enumerate() {
        let alone = loss(&format!("--model {model} --data {data} --sequence-length 10"));
        let row = &rows[place + 1];
        assert_eq!(row[..2], [model, data]);
        assert_eq!(row[2].parse::<f64>().unwrap(), printed(&alone, "loss"), "{table}{alone}");
        assert_eq!(row[3].parse::<f64>().unwrap(), printed(&alone, "perplexity"));
        assert_eq!(row[5].parse::<f64>().unwrap(), printed(&alone, "tokens"));
        let found = &json["losses"][place];
        assert_eq!((&found["model"], &found["data"]), (&model.into(), &data.into()));
        let rounded = format!("{:.6}", found["loss"].as_f64().unwrap());
        assert_eq!(rounded.parse::<f64>().unwrap(), printed(&alone, "loss"));
        assert!(found["bits_per_byte"].is_null());
        let layers = found["routing"].as_array().unwrap();
        assert_eq!(layers.len(), if model == "moh" { 2 } else { 0 });
        for layer in layers {
            assert_eq!(layer["loads"].as_array().unwrap().len(), 4, "{layer}");
        }
    }
    let message = refused(dir.path(), &format!("loss {all} --revision main"), 2);
    assert!(message.starts_with("--revision: "), "{message}");
}

#[test]
fn a_limit_takes_windows_spread_over_the_file() {
    let dir = workplace();
    write_tokens(&dir.path().join("text"), VOCABULARY, 335, 1);
    // Windows 8 and 24 of 33: in the middle of two halves. A token has two bytes.
    let bytes = fs::read(dir.path().join("text.bin")).unwrap();
    let window = |number: usize| {
        let pairs = bytes[20 * number..20 * (number + 1)].chunks(2);
        pairs.map(|pair| u32::from(pair[0])).collect::<Vec<_>>()
    };
    let mut writer = TokenFileWriter::create(&dir.path().join("two"), VOCABULARY).unwrap();
    writer.push_document(&[window(8), window(24)].concat()).unwrap();
    writer.finish(TokenFileInfo::default()).unwrap();
    let loss = |line: &str| {
        let json = json(dir.path(), &format!("loss --model source --sequence-length 10 {line}"));
        let found = &json["losses"][0];
        (found["windows"].as_u64().unwrap(), found["loss"].as_f64().unwrap().to_bits())
    };
    let (two, all) = (loss("--data two"), loss("--data text"));
    assert_eq!((two.0, all.0), (2, 33));
    assert_eq!(loss("--data text --limit 2"), two);
    assert_eq!(loss("--data text --limit 99"), all);
    exits(&mut moh_eval(dir.path(), "loss --model source --data text --limit 0"), 2);
}

#[test]
fn a_checkpoint_of_a_run_is_evaluated_where_it_is() {
    let rest = "[[stage]]\nname = \"moh\"\nattention = \"moh\"\ntokens = 256\nbatch_tokens = 64\n\
                micro_batch = 2\nlearning_rate = { max = 1e-2, min = 1e-3, warmup_steps = 1 }\n\
                [checkpoint]\nevery_steps = 2\n";
    let dir = trainable(rest);
    // The programs are in the same directory.
    let train = Path::new(PROGRAM).with_file_name("moh-train");
    let mut train = program(train.to_str().unwrap(), dir.path());
    train.args(["--recipe", "recipe.toml", "--set", "run.dtype=bf16"]);
    success(&mut train);
    let before =
        (names(&dir.path().join("run")), names(&dir.path().join("run/checkpoints/step-2")));
    let line = "loss --data text --sequence-length 16";
    let models = "--model run/export --model run@4 --model run --model run@2";
    let json = json(dir.path(), &format!("{line} {models}"));
    let loss = |place: usize| json["losses"][place]["loss"].as_f64().unwrap();
    // Weights are f32 in a checkpoint and bf16 in the export.
    assert_eq!((loss(1), loss(2)), (loss(0), loss(0)));
    assert!(loss(3) != loss(0), "{json}");
    let after = (names(&dir.path().join("run")), names(&dir.path().join("run/checkpoints/step-2")));
    assert_eq!(after, before);
    fs::write(dir.path().join("ids.json"), "[[1, 2, 3]]").unwrap();
    for (model, out) in [("run/export", "a"), ("run@4", "b")] {
        told(dir.path(), &format!("logits --ids ids.json --model {model} --out {out}"));
    }
    let [a, b] = ["a", "b"].map(|name| fs::read(dir.path().join(name)).unwrap());
    assert!(a == b);
    let message = refused(dir.path(), &format!("{line} --model run@3"), 1);
    assert!(message.ends_with("no checkpoint of step 3: name one of 2, 4"), "{message}");
}

#[test]
fn runs_and_checkpoints_are_told_from_models() {
    let dir = workplace();
    let root = dir.path();
    fs::write(root.join("ids.json"), "[[1, 2]]").unwrap();
    let line = |model: &str| format!("logits --model {model} --ids ids.json --out logits");
    let refused = |model: &str| refused(root, &line(model), 1);
    fs::create_dir_all(root.join("run/checkpoints/step-7")).unwrap();
    fs::write(root.join("run/recipe.toml"), "").unwrap();
    for name in ["manifest.json", "manifest.json.b3"] {
        fs::write(root.join("run/checkpoints/step-7").join(name), "").unwrap();
    }
    assert!(refused("run").contains("no checkpoint is good"));
    let checkpoint = refused("run/checkpoints/step-7");
    assert!(checkpoint.starts_with("run/checkpoints/step-7: is a checkpoint, "), "{checkpoint}");
    fs::rename(root.join("source"), root.join("run/export")).unwrap();
    fs::remove_file(root.join("run/recipe.toml")).unwrap();
    assert_eq!(refused("run"), "run: is a run, name its model: run/export");
    told(root, &line("run/export"));
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
        (
            "--model source --data short",
            "short: has 9 tokens, one window needs 10: add text, or lower --sequence-length",
        ),
        ("--model source --data wide", "wide.bin: token "),
        ("--model ./none --data text", "./none: no such directory"),
    ] {
        let message = refused(root, &format!("loss {arguments} --sequence-length 10"), 1);
        assert!(message.starts_with(expected), "{message}");
    }
    for length in ["0", "1", "65"] {
        let message = refused(
            root,
            &format!("loss --model source --data text --sequence-length {length}"),
            2,
        );
        assert!(message.contains("must be 2 to 64, the model's context length"), "{message}");
    }
    exits(&mut moh_eval(root, "loss --model source --data text --sequence-length many"), 2);

    write_tokenizer(&root.join("source"), "w0");
    write_tokenizer(&root.join("other"), "w1");
    fs::write(root.join("words.txt"), "w1 w2 w3 ".repeat(40)).unwrap();
    let (words, theirs) = (root.join("words.txt"), root.join("theirs"));
    prepare_text(&root.join("other"), &words, &theirs, AppendEos::Never);
    let message = refused(root, "loss --model source --data theirs --sequence-length 10", 1);
    assert!(message.starts_with("theirs.json: prepared with another tokenizer"), "{message}");
}

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = tempfile::tempdir().unwrap();
    assert!(take_negative_numbers(PROGRAM, &[], dir.path()) >= 15);
}

#[test]
fn each_help_has_an_example() {
    let dir = tempfile::tempdir().unwrap();
    for line in ["--help", "loss --help", "logits --help", "heads --help"] {
        let text = told(dir.path(), line);
        assert!(text.contains("Example") && text.contains("\n  moh-eval "), "{text}");
    }
    exits(&mut moh_eval(dir.path(), "none"), 2);
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn the_stories_of_the_fixtures_have_their_known_loss() {
    let fixtures = fixtures();
    let dir = tempfile::tempdir().unwrap();
    let (model, stories) =
        (fixtures.join("stories260K"), fixtures.join("data/stories-valid.jsonl"));
    // The known loss is of stories without an end-of-text token.
    prepare_text(&model, &stories, &dir.path().join("valid"), AppendEos::Never);
    let mut command = moh_eval(dir.path(), "loss --data valid --sequence-length 256");
    let text = success(command.arg("--model").arg(model));
    // The windows have 256 tokens with 255 targets each.
    let expected = figure("loss", 1.2202);
    assert!((printed(&text, "loss") - expected).abs() < 0.001, "{text}: not {expected}");
}
