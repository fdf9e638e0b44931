//! `moh-convert --calibration` as a user runs it.

use std::fs;
use std::path::{Path, PathBuf};

use moh_calibrate::CalibrationTokens;
use moh_data::{TokenFileInfo, TokenFileWriter, Windows};
use moh_hf::ConfigFile;
use moh_testkit::programs::{assert_has, exits, read_json};
use serde_json::{Value, json};

use crate::moh_convert;
use crate::training::{loss, windows};

fn quickstart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart")
}

/// Converts the quickstart's model to `out`, expecting this exit code. Returns the program's output.
#[track_caller]
fn convert(dir: &Path, arguments: &[&str], code: i32) -> (String, String) {
    let from = quickstart();
    let mut command = moh_convert(dir, &["--from", from.to_str().unwrap(), "--out", "out"]);
    exits(command.args(arguments), code)
}

/// Converts with the arguments `words` and `tokens` calibration tokens of the voyage, and writes a receipt. Returns
/// the program's output.
#[track_caller]
fn calibrated(dir: &Path, words: &str, tokens: &str) -> String {
    let text = quickstart().join("voyage");
    let mut arguments: Vec<&str> = words.split_whitespace().collect();
    arguments.extend(["--receipt", "receipt.json", "--calibration", text.to_str().unwrap()]);
    arguments.extend(["--calibration-tokens", tokens]);
    convert(dir, &arguments, 0).0
}

/// Returns the held-out windows of `length` among `tokens` calibration tokens of the voyage, from a file.
fn held_out(dir: &Path, tokens: usize, length: usize) -> Windows {
    let all = windows(&quickstart().join("voyage"), length).spread((tokens / length) as u64);
    let mut ids = vec![0; tokens];
    for (number, window) in (0..all.len()).zip(ids.chunks_exact_mut(length)) {
        all.read(number, window).unwrap();
    }
    let config = ConfigFile::read(&quickstart()).unwrap().config;
    let held_out = CalibrationTokens::new(ids, length, 4096, &config).unwrap().held_out();
    let mut file = TokenFileWriter::replace(&dir.join("held-out"), config.vocab_size).unwrap();
    file.push_document(&held_out).unwrap();
    file.finish(TokenFileInfo::default()).unwrap();
    windows(&dir.join("held-out"), length)
}

/// Compares the receipt's loss with the written model's loss over the held-out tokens of the voyage.
#[track_caller]
fn assert_loss_is_measured(dir: &Path, receipt: &Value) {
    let calibration = &receipt["calibration"];
    let tokens = calibration["tokens"].as_u64().unwrap() as usize;
    // There are at least nine windows.
    let length = 1 << (tokens / 9).ilog2();
    let windows = held_out(dir, tokens, length);
    assert_eq!(calibration["held_out_tokens"], windows.len() * length as u64);
    let loss = loss(&dir.join("out"), &windows);
    let measured = calibration["loss"].as_f64().unwrap();
    assert!((measured - loss).abs() < 1e-5, "{measured} {loss}");
}

/// Returns the message of a conversion that fails with this exit code and writes nothing.
fn refused(arguments: &[&str], code: i32) -> String {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("short.txt"), "A fisherman sailed out.").unwrap();
    fs::write(dir.path().join("bad.jsonl"), "{\"text\": \"a\"}\n{\"title\": \"b\"}\n").unwrap();
    let (_, stderr) = convert(dir.path(), arguments, code);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "{stderr}");
    stderr
}

#[test]
fn measured_heads_and_projections_lose_less() {
    let dir = tempfile::tempdir().unwrap();
    let stdout =
        calibrated(dir.path(), "--router query-norm --routed-top-k 2 --shared-heads 2", "8192");
    let parts = [
        "  measured on      8,192 tokens: held-out loss ",
        "tensors          50 of 56 unchanged, bit by bit, 6 refitted",
        "logits with all heads on are ",
    ];
    assert_has(&stdout, &parts);
    let receipt = read_json(&dir.path().join("receipt.json"));
    let calibration = &receipt["calibration"];
    assert_loss_is_measured(dir.path(), &receipt);
    assert_eq!((&calibration["tokens"], &calibration["refit"]), (&json!(8192), &json!(true)));
    let layers = calibration["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 6);
    for layer in layers {
        assert_eq!(layer["routed_top_k"], 2);
        // On tokens that no fit used.
        assert!(layer["error"].as_f64() < layer["error_before"].as_f64(), "{layer}");
    }
    let config = read_json(&dir.path().join("out/config.json"));
    let ids: Vec<&Value> = layers.iter().map(|layer| &layer["shared_heads"]).collect();
    assert_eq!(config["moh_shared_head_ids"], json!(ids));
    assert_eq!(config.get("moh_shared_heads"), None);
    for tensor in receipt["tensors"].as_array().unwrap() {
        let is_projection = tensor["name"].as_str().unwrap().ends_with("o_proj.weight");
        assert_eq!(tensor["refitted"] == true, is_projection, "{tensor}");
        assert_eq!(tensor["unchanged"], !is_projection, "{tensor}");
    }
    let card = fs::read_to_string(dir.path().join("out/README.md")).unwrap();
    assert_has(
        &card,
        &["refitted the output projections", "8,192 tokens", "which nothing was fitted to"],
    );

    // A model that is converted back to dense is another model.
    let arguments = ["--from", "out", "--attention", "dense", "--out", "dense"];
    let (_, stderr) = exits(&mut moh_convert(dir.path(), &arguments), 0);
    assert!(stderr.contains("is another model than"), "{stderr}");
    assert_eq!(read_json(&dir.path().join("dense/config.json")).get("moh_output_refitted"), None);
    let card = fs::read_to_string(dir.path().join("dense/README.md")).unwrap();
    let said =
        ["with all heads active it is not the dense model", "made every head serve every token"];
    assert_has(&card, &said);
}

#[test]
fn several_texts_have_losses_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let texts = ["voyage=2", "../../README.md"];
    let texts = texts.map(|name| quickstart().join(name).display().to_string());
    let sizes = ["--calibration-tokens", "16384", "--calibration-length", "128"];
    let mut arguments = vec!["--active", "0.75", "--receipt", "receipt.json"];
    arguments.extend(sizes);
    arguments.extend(texts.iter().flat_map(|text| ["--calibration", text]));
    let (stdout, _) = convert(dir.path(), &arguments, 0);
    let receipt = &read_json(&dir.path().join("receipt.json"))["calibration"];
    let texts = receipt["texts"].as_array().unwrap();
    let loss = |of: &Value, key: &str| of[key].as_f64().unwrap();
    for key in ["loss", "loss_dense"] {
        let (voyage, other) = (loss(&texts[0], key), loss(&texts[1], key));
        // The model was trained on stories.
        assert!(voyage < other - 1.0, "{receipt}");
        let share = (other - loss(receipt, key)) / (other - voyage);
        assert!((share - 2.0 / 3.0).abs() < 0.05, "{receipt}");
    }
    assert_has(&stdout, &["voyage: ", "README.md: "]);
    let card = fs::read_to_string(dir.path().join("out/README.md")).unwrap();
    assert_has(&card, &["voyage` and `", "README.md`: "]);
}

/// Seeds decide the windows' tokens. A conversion with the kept file of windows is the same.
#[test]
fn a_model_samples_its_own_text() {
    let [first, again] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let sizes = ["--calibration-tokens", "4096", "--calibration-length", "64", "--active", "0.75"];
    let convert =
        |dir: &Path, text| convert(dir, &[&sizes[..], &["--calibration", text]].concat(), 0);
    let (_, stderr) = convert(first.path(), "self");
    assert!(stderr.contains("--calibration out-own-text reads it again"), "{stderr}");
    let read = |dir: &Path, file: &str| fs::read(dir.join(file)).unwrap();
    let kept = windows(&first.path().join("out-own-text"), 64);
    assert_eq!(kept.len(), 64);
    let mut all = [[0; 64]; 64];
    all.iter_mut().zip(0..).for_each(|(ids, number)| kept.read(number, ids).unwrap());
    let starts: std::collections::BTreeSet<&[u32]> = all.iter().map(|ids| &ids[..4]).collect();
    assert!(starts.len() > 32, "{starts:?}");
    for ending in ["bin", "idx"] {
        let name = format!("out-own-text.{ending}");
        fs::write(again.path().join(&name), read(first.path(), &name)).unwrap();
    }
    convert(again.path(), "out-own-text");
    let weights = "out/model.safetensors";
    assert_eq!(read(first.path(), weights), read(again.path(), weights));
}

#[test]
fn the_given_heads_and_weights_can_stay() {
    let dir = tempfile::tempdir().unwrap();
    let stdout = calibrated(dir.path(), "--router query-norm --shared 0,5,6,7 --refit off", "4096");
    let heads = "heads            4 shared + 2 of 4 routed = 6 of 8 active\n";
    assert_has(&stdout, &[heads, "tensors          56 of 56 unchanged"]);
    let config = read_json(&dir.path().join("out/config.json"));
    assert_eq!(config["moh_shared_head_ids"], json!(vec![[0, 5, 6, 7]; 6]));
    assert_eq!(config.get("moh_output_refitted"), None);
}

#[test]
fn heads_may_be_named_without_a_measurement() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--shared", "0,1;1,2;0,1;0,1;0,1;7", "--routed-top-k", "3"];
    convert(dir.path(), &arguments, 0);
    let config = read_json(&dir.path().join("out/config.json"));
    assert_eq!(config["moh_shared_head_ids"], json!([[0, 1], [1, 2], [0, 1], [0, 1], [0, 1], [7]]));
}

#[test]
fn matrices_of_a_router_are_added_as_zeros() {
    let dir = tempfile::tempdir().unwrap();
    let (stdout, _) = convert(dir.path(), &["--router", "two-stage"], 0);
    assert_has(&stdout, &["56 of 68 unchanged, bit by bit, 12 of routers added, zeros"]);
}

/// The written rows route as in the measurement: the loss on its tokens is the same.
#[test]
fn learned_routers_are_fitted() {
    for (given, router, tensors) in [
        // The default.
        ("", "linear", "50 of 62 unchanged, bit by bit, 6 refitted, 6 of routers fitted"),
        (
            "--router two-stage",
            "two-stage",
            "50 of 68 unchanged, bit by bit, 6 refitted, 6 of routers fitted, 6 of routers added, zeros",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let stdout = calibrated(dir.path(), &format!("--active 0.5 {given}"), "4096");
        assert_has(&stdout, &[tensors, "logits with all heads on are "]);
        let receipt = read_json(&dir.path().join("receipt.json"));
        assert_loss_is_measured(dir.path(), &receipt);
        for layer in receipt["calibration"]["layers"].as_array().unwrap() {
            let explained = layer["router_explained"].as_f64().unwrap();
            assert!(explained > 0.0 && explained < 1.0, "{layer}");
        }
        let written = receipt["tensors"].as_array().unwrap().iter();
        let matrices: Vec<&Value> = written
            .filter(|tensor| tensor["name"].as_str().unwrap().ends_with(".self_attn.router.weight"))
            .collect();
        assert_eq!(matrices.len(), 6);
        for tensor in matrices {
            assert_eq!(
                (&tensor["refitted"], &tensor["source_dtype"]),
                (&json!(true), &Value::Null)
            );
        }
        let config = read_json(&dir.path().join("out/config.json"));
        assert_eq!(config["moh_router"], router);
    }
}

#[test]
fn bad_calibrations_are_refused_before_anything_is_written() {
    let voyage = quickstart().join("voyage");
    let voyage = voyage.to_str().unwrap();
    for (line, code, expected) in [
        ("--shared calibrated", 2, "--shared calibrated needs a text to measure heads on"),
        ("--refit on", 2, "--refit on needs a text to measure heads on"),
        ("--shared 0;1", 1, "shared_head_ids has 2 entries, and the model 6 layers"),
        ("--shared 0,9", 1, "shared_head_ids of layer 0 has head 9: the heads are 0 to 7"),
        ("--shared best", 2, "expected first, calibrated, or heads such as 0,5;1,2"),
        ("--calibration none", 1, "--calibration none: "),
        ("--calibration short.txt", 1, "12 of 14 calibration tokens are fitted to: a fit of 128"),
        ("--calibration tokens.bin", 1, "name it without .bin and .idx"),
        ("--shared 0,5 --shared-heads 4", 2, "gives their numbers too"),
        ("--calibration bad.jsonl", 1, "line 2: `text` is missing or not a string"),
        ("--calibration short.txt=0", 2, "expected a weight above 0 after the last ="),
        ("--calibration VOYAGE --calibration-tokens 0", 2, "--calibration-tokens"),
        ("--calibration VOYAGE --calibration-length 9999", 1, "windows of 9999 tokens"),
        ("--calibration VOYAGE --attention dense", 2, "--routed-top-k or --calibration"),
        ("--calibration-tokens 99", 2, "--calibration"),
        ("--router linear", 1, "fitted to a text, as zeros or random ones would select heads that"),
    ] {
        let of = |word| if word == "VOYAGE" { voyage } else { word };
        let message = refused(&line.split(' ').map(of).collect::<Vec<_>>(), code);
        assert!(message.contains(expected), "{line}: {message}");
    }
}
