//! `moh-convert` as a user runs it: its outputs, and one sentence for every bad input.

use std::fs;
use std::path::Path;
use std::process::Command;

use moh_hf::{ConfigFile, write_random_model};
use moh_kernels::DType;
use moh_testkit::programs::{assert_has, exits, names, read_json, workplace};
use serde_json::{Value, json};

use crate::{PROGRAM, converted, failure, moh_convert};

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = workplace();
    assert!(moh_testkit::options::take_negative_numbers(PROGRAM, &[], dir.path()) >= 12);
    for (option, value, code, expected) in [
        ("--active", "-0.5", 1, "--active -0.5: must be a share of the heads, 0 to 1"),
        ("--shared-heads", "-1,2", 2, "expected an integer of at least 0, or one for each layer"),
    ] {
        let mut command = moh_convert(dir.path(), &["--from", "source", option, value]);
        let (_, text) = exits(&mut command, code);
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_model_is_converted_beside_its_receipt() {
    let dir = workplace();
    let arguments = ["--from", "source", "--max-shard-size", "9KB", "--receipt", "receipt.json"];
    let (stdout, stderr) = exits(&mut moh_convert(dir.path(), &arguments), 0);
    assert!(
        stderr.starts_with("warning: the model is not usable before it is tuned: "),
        "{stderr}"
    );
    let expected = "\
./source-MoH
  heads            4 shared + 2 of 4 routed = 6 of 8 active
  parameters       11,496
  attention FLOPs  8.320e3 -> 6.240e3 per token at length 64 (75%)
  model FLOPs      93% at length 64
  tensors          21 of 21 unchanged, bit by bit (BLAKE3)
  verified         1,776 logits with all heads on are equal to the source's
";
    assert!(stdout.starts_with(expected), "{stdout}");
    let not_compared =
        "candle           not compared: head_dim is not hidden_size / num_attention_heads";
    assert!(stdout.contains(not_compared), "{stdout}");
    let last = stdout.lines().last().unwrap();
    assert!(last.starts_with("  written          45,984 bytes in 6 files, "), "{last}");
    assert_eq!(names(dir.path()), ["receipt.json", "source", "source-MoH"]);
    let receipt = read_json(&dir.path().join("receipt.json"));
    assert_eq!(receipt["tensors"].as_array().unwrap().len(), 21);
    assert_eq!(receipt["tensors"][0]["unchanged"], true);
    let config = ConfigFile::read(&dir.path().join("source-MoH")).unwrap().config;
    assert_eq!(config.moh.unwrap().routed_top_k, 2.into());
}

#[test]
fn another_implementation_agrees_with_the_output() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    });
    for (model_type, rope_scaling, tied, dtype) in [
        ("llama", &llama3, false, "f32"),
        ("llama", &llama3, true, "bf16"),
        ("qwen3", &Value::Null, true, "bf16"),
        ("qwen3", &Value::Null, false, "f32"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let head_dim = if model_type == "qwen3" { json!(16) } else { Value::Null };
        let fields = json!({
            "model_type": model_type, "vocab_size": 37, "hidden_size": 24, "head_dim": head_dim,
            "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "tie_word_embeddings": tied, "max_position_embeddings": 64,
            "initializer_range": 0.3, "rope_scaling": rope_scaling,
        });
        let file = ConfigFile::from_value(fields, Path::new("config.json")).unwrap();
        let source = dir.path().join("source");
        write_random_model(&source, &file, DType::F32, u64::MAX, 1).unwrap();
        let arguments = ["--from", "source", "--dtype", dtype, "--pad-vocab-to", "8", "--verify"];
        let stdout = converted(dir.path(), &arguments);
        assert_has(&stdout, &["candle           its logits of the last token are within"]);
        assert!(!stdout.contains("0e0") && !stdout.contains(" 0 of "), "{stdout}");
        if dtype == "bf16" {
            let parts = [
                "converted to bf16 (BLAKE3)",
                "  verified         weights in bf16 are within ",
                "of the source's, and equal to those of its weights rounded",
            ];
            assert_has(&stdout, &parts);
        }
    }
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_is_refused_by_a_build_without() {
    let dir = workplace();
    let message = failure(dir.path(), &["--from", "source", "--device", "cuda:1"]);
    let expected =
        "--device cuda:1: this build supports the CPU only: build it with --features cuda";
    assert_eq!(message, expected);
}

#[test]
fn the_other_options_reach_the_output() {
    let dir = workplace();
    let line = "--from source --shared-heads 2 --routed-top-k 3 --dtype bf16 --pad-vocab-to 64 --out deep/er/out";
    converted(dir.path(), &line.split(' ').collect::<Vec<_>>());
    let file = ConfigFile::read(&dir.path().join("deep/er/out")).unwrap();
    let moh = file.config.moh.unwrap();
    assert_eq!((moh.shared_heads, moh.routed_top_k), (2.into(), 3.into()));
    assert_eq!(file.config.vocab_size, 64);
    assert_eq!(file.fields["torch_dtype"], "bfloat16");
    converted(dir.path(), &["--from", "deep/er/out", "--attention", "dense"]);
    let dense = ConfigFile::read(&dir.path().join("out-Dense")).unwrap();
    assert_eq!(dense.config.moh, None);
}

#[test]
fn counts_that_differ_by_layer_are_converted_and_shown() {
    let dir = workplace();
    let heads = ["--shared-heads", "8,2", "--routed-top-k", "0,3"];
    let stdout = converted(dir.path(), &[&["--from", "source", "--verify"], &heads[..]].concat());
    let line = "  heads            2-8 shared + 0-3 of 0-6 routed = 5-8 of 8 active, by layer\n";
    assert!(stdout.contains(line), "{stdout}");
    let config = ConfigFile::read(&dir.path().join("source-MoH")).unwrap().config;
    assert_eq!(config.active_heads(), [8, 5].into_iter().collect());
}

#[test]
fn a_share_that_no_count_meets_says_what_it_became() {
    let dir = workplace();
    let lines = |active: &str| {
        let arguments = ["--from", "source", "--active", active, "--out", active];
        let stdout = converted(dir.path(), &arguments);
        stdout.lines().skip(1).take(2).map(|line| line.trim().to_string()).collect::<Vec<_>>()
    };
    let [heads, became] = lines("0.8").try_into().unwrap();
    assert_eq!(heads, "heads            4 shared + 2 of 4 routed = 6 of 8 active");
    assert_eq!(became, "--active 0.8 of 8 heads: 6 of 8, 0.75");
    let [heads, next] = lines("0.5").try_into().unwrap();
    assert_eq!(heads, "heads            2 shared + 2 of 6 routed = 4 of 8 active");
    assert!(next.starts_with("parameters"), "{next}");
}

#[test]
fn help_shows_an_example_and_usage_errors_exit_with_2() {
    let dir = tempfile::tempdir().unwrap();
    let text = converted(dir.path(), &["--help"]);
    let example = "moh-convert --from recipes/quickstart --active 0.75 --out quickstart-MoH";
    assert!(text.contains(example), "{text}");
    // The example as printed, except the output directory.
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let out = dir.path().join("quickstart-MoH");
    let arguments = ["--from", "recipes/quickstart", "--active", "0.75", "--out"];
    exits(moh_convert(root, &arguments).arg(&out), 0);
    assert_eq!(ConfigFile::read(&out).unwrap().config.active_heads(), 6.into());
    for arguments in [
        &[][..],
        &["--from"],
        &["--from", "x", "--active", "0.5", "--routed-top-k", "2"],
        &["--from", "x", "--attention", "dense", "--active", "0.5"],
        &["--from", "x", "--max-shard-size", "5 elephants"],
        &["--from", "x", "--shared-heads", "-1"],
        &["--from", "x", "--routed-top-k", "2,"],
        &["--from", "x", "--dtype", "f8"],
        &["--from", "x", "--frm", "y"],
    ] {
        exits(&mut moh_convert(dir.path(), arguments), 2);
    }
}

#[test]
fn sources_that_are_no_model_are_refused() {
    let dir = workplace();
    let from = |source: &str| failure(dir.path(), &["--from", source]);
    let message = failure(dir.path(), &["--from", "source", "--revision", "v2"]);
    let expected = "source: is a directory: revision v2 was given, but only hub ids have revisions";
    assert!(message.contains(expected), "{message}");
    assert!(from("org/name").contains("HF_HUB_OFFLINE"));
    fs::copy(dir.path().join("source/config.json"), dir.path().join("config.json")).unwrap();
    assert!(from(".").contains("holds neither model.safetensors nor"));
}

#[test]
fn a_receipt_is_checked_before_the_conversion() {
    let dir = workplace();
    let with = |receipt| ["--from", "source", "--out", "out", "--receipt", receipt];
    let message = failure(dir.path(), &with("source/config.json/receipt.json"));
    assert!(message.starts_with("--receipt source/config.json/receipt.json: "), "{message}");
    assert!(failure(dir.path(), &with("source")).contains("is a directory, name a file"));
    fs::write(dir.path().join("mine.json"), "mine").unwrap();
    let message = failure(dir.path(), &with("mine.json"));
    assert!(message.contains("exists: choose another file, or --force to replace it"), "{message}");
    assert_eq!(fs::read_to_string(dir.path().join("mine.json")).unwrap(), "mine");
    converted(dir.path(), &[&with("mine.json")[..], &["--force"]].concat());
    assert!(fs::read_to_string(dir.path().join("mine.json")).unwrap().starts_with('{'));

    // The receipt's directories are created with it.
    let with = |out| ["--from", "source", "--out", out, "--receipt", "new/d/receipt.json"];
    let message = failure(dir.path(), &with("source"));
    assert!(message.contains("holds the source model"), "{message}");
    converted(dir.path(), &with("other"));
    let receipt = fs::read_to_string(dir.path().join("new/d/receipt.json")).unwrap();
    assert!(receipt.starts_with('{'), "{receipt}");
}

#[test]
fn element_types_have_two_names() {
    let dir = workplace();
    for (name, torch_name) in [("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16")] {
        for dtype in [name, torch_name] {
            let arguments = ["--from", "source", "--dtype", dtype, "--out", dtype, "--no-verify"];
            converted(dir.path(), &arguments);
            let file = ConfigFile::read(&dir.path().join(dtype)).unwrap();
            assert_eq!(file.fields["torch_dtype"], torch_name);
        }
    }
}

/// A limit on the size of files acts like a full disk: `write` fails in the middle of a tensor.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_nothing_behind() {
    let dir = workplace();
    // 16 blocks are 8 or 16 KB, depending on the shell. The weights have 46 KB.
    let script = format!("ulimit -f 16; exec '{PROGRAM}' --from source --out out");
    let mut shell = Command::new("sh");
    let (_, stderr) = exits(shell.arg("-c").arg(script).current_dir(dir.path()), 1);
    assert!(stderr.contains("model.safetensors: File too large"), "{stderr}");
    assert_eq!(names(dir.path()), ["source"]);
}

/// The names of a directory's files with a card: its code, its licence and the card.
const CARD_FILES: [&str; 5] = [
    "LICENSE",
    "README.md",
    "USE_POLICY.md",
    "configuration_moh_llama.py",
    "modeling_moh_llama.py",
];

#[test]
fn a_mixture_of_head_model_comes_with_its_code_a_card_and_the_terms_of_its_source() {
    let dir = workplace();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("source/README.md"), "---\nlicense: llama3\n---\n# Mine\n").unwrap();
    fs::write(at("source/LICENSE"), "the terms").unwrap();
    fs::write(at("source/USE_POLICY.md"), "the policy").unwrap();
    let convert = |arguments: &[&str]| converted(dir.path(), arguments);
    let read = |name: &str| fs::read_to_string(at(name)).unwrap();

    convert(&["--from", "source", "--out", "moh"]);
    let card = read("moh/README.md");
    let begins = "---\nlicense: llama3\nlibrary_name: transformers\n";
    assert!(card.starts_with(begins), "{card}");
    let said = [
        "# source with Mixture-of-Head attention",
        "trained nothing",
        "`LICENSE`, `USE_POLICY.md`",
    ];
    assert_has(&card, &said);
    assert_eq!(read("moh/LICENSE"), "the terms");
    // Again in the same place, and then from its own output.
    convert(&["--from", "source", "--out", "moh", "--force"]);
    assert_eq!(read("moh/README.md"), card);
    convert(&["--from", "moh", "--out", "again", "--shared-heads", "2"]);
    assert_eq!(names(&at("again")), names(&at("moh")));
    let again = read("again/README.md");
    assert!(again.starts_with(begins) && again.contains("The base model is `moh`, a"), "{again}");
    assert_eq!(again.matches("trained nothing").count(), 1);
    // A dense model has no such files.
    convert(&["--from", "moh", "--out", "dense", "--attention", "dense"]);
    let without: Vec<String> =
        names(&at("moh")).into_iter().filter(|name| !CARD_FILES.contains(&&**name)).collect();
    assert_eq!(names(&at("dense")), without);
    assert!(!read("dense/config.json").contains("auto_map"));
    // An edited card is replaced with its directory.
    fs::write(at("moh/README.md"), card.replace("# source", "# My model")).unwrap();
    assert!(failure(dir.path(), &["--from", "source", "--out", "moh"]).contains("is not empty"));
    convert(&["--from", "source", "--out", "moh", "--force"]);
    assert_eq!(read("moh/README.md"), card);
}

#[test]
fn a_card_names_the_base_model_and_the_licence_of_the_readme_or_the_options() {
    let dir = workplace();
    let at = |name: &str| dir.path().join(name);
    let read = |name: &str| fs::read_to_string(at(name)).unwrap();
    let convert = |from: &str, out: &str, more: &[&str]| {
        let arguments = [&["--from", from, "--out", out, "--no-verify"], more].concat();
        converted(dir.path(), &arguments);
        read(&format!("{out}/README.md"))
    };
    let readme =
        "---\nlicense: llama3.2\nbase_model: meta-llama/Llama-3.2-1B # mine\n---\n# Mine\n";
    fs::write(at("source/README.md"), readme).unwrap();
    let begins = "---\nbase_model: meta-llama/Llama-3.2-1B\nlicense: llama3.2\nlibrary_name: ";
    let card = convert("source", "moh", &[]);
    assert!(card.starts_with(begins), "{card}");
    assert!(card.contains("Llama-3.2-1B). This model was made from `source`.\n"), "{card}");
    let card = convert("moh", "again", &[]);
    assert!(card.starts_with(begins), "{card}");
    assert!(card.contains("Llama-3.2-1B). This model was made from `moh`.\n"), "{card}");
    let named = ["--base-model", "acme/One", "--base-model", "acme/Two", "--license", "mit"];
    let card = convert("moh", "named", &named);
    let begins = "---\nbase_model:\n- acme/One\n- acme/Two\nlicense: mit\nlibrary_name: ";
    assert!(card.starts_with(begins), "{card}");
    assert!(convert("named", "from-named", &[]).starts_with(begins));
    for refused in [["--base-model", "/mnt/x"], ["--license", "a b"]] {
        exits(moh_convert(dir.path(), &["--from", "source"]).args(refused), 2);
    }
}
