//! One sentence per invalid input, and values that begin with a hyphen.

use std::fs;
use std::path::Path;

use moh_testkit::options::take_negative_numbers;
use moh_testkit::programs::{
    VOCABULARY, exits, failure, program, stderr, success, write_tokenizer, write_tokens,
};
use moh_testkit::texts::prepare_text;
use moh_text::prepare::AppendEos;
use serde_json::Value;

use super::{PROGRAM, moh_train, prepared};

#[test]
fn recipes_that_do_not_fit_are_refused() {
    let dir = prepared();
    for (change, expected) in [
        ("run.seed=abc", "--set: run.seed"),
        ("run.device=cuda", "use --set run.device=cpu"),
        ("stage.adapt.parallel.tensor=2", "1 rank was started: start a multiple of 2"),
        ("model.from=./none", "./none: no such directory"),
        ("model.from=recipe.toml", "recipe.toml: is a file, expected a model directory"),
        ("model.from=org/none", "download it with moh-convert --from org/none --download"),
        (
            "model.tokenizer=larger",
            "moh-convert --from source --attention dense --tokenizer larger",
        ),
    ] {
        let message = failure(dir.path(), &mut moh_train(dir.path(), &[change]), 1);
        assert!(message.contains(expected), "{change}: {message}");
    }
    fs::remove_file(dir.path().join("recipe.toml")).unwrap();
    let message = failure(dir.path(), &mut moh_train(dir.path(), &[]), 1);
    assert!(message.starts_with("recipe.toml: No such file"), "{message}");
}

#[test]
fn wrong_usage_exits_with_two() {
    let dir = prepared();
    for arguments in [&[][..], &["--plan"], &["recipe.toml"], &["--recipe"]] {
        exits(program(PROGRAM, dir.path()).args(arguments), 2);
    }
    for arguments in [
        &["--device-tflops", "9"][..],
        &["--plan", "--device-tflops", "0"],
        &["--ranks", "2"],
        &["--plan", "--ranks", "0"],
        &["--plan", "--hardware", "h.toml"],
        &["--plan", "--ranks", "2", "--suggest"],
        &["--rendezvous-timeout", "0"],
        &["--operation-timeout", "99999999999"],
    ] {
        exits(moh_train(dir.path(), &[]).args(arguments), 2);
    }
    let negative = ["--plan", "--device-tflops", "-5"];
    let message = failure(dir.path(), moh_train(dir.path(), &[]).args(negative), 2);
    assert_eq!(message, "--device-tflops -5: must be above 0");
    let text = success(program(PROGRAM, dir.path()).arg("--help"));
    assert!(text.contains("Example") && text.contains("  moh-train --recipe recipes/"), "{text}");
}

#[test]
fn token_files_that_do_not_fit_are_refused() {
    let dir = prepared();
    let root = dir.path();
    write_tokens(&root.join("short"), VOCABULARY, 16, 1);
    write_tokens(&root.join("cut"), VOCABULARY, 2000, 1);
    let bytes = fs::read(root.join("cut.bin")).unwrap();
    fs::write(root.join("cut.bin"), &bytes[..bytes.len() - 1]).unwrap();
    for (path, expected) in [
        ("none", "none.bin: cannot read: No such file"),
        (
            "short",
            "short: has 16 tokens, one window needs 17: add text, or lower data.sequence_length",
        ),
        ("cut", "cut."),
    ] {
        let source = format!("data.sources=[{{path = \"{path}\"}}]");
        let message = failure(root, &mut moh_train(root, &[&source]), 1);
        assert!(message.starts_with(expected), "{message}");
    }
    let held_out = "data.validation.path=none";
    let message = failure(root, &mut moh_train(root, &[held_out]), 1);
    assert!(message.starts_with("none.bin: cannot read"), "{message}");
}

#[test]
fn a_token_file_of_another_tokenizer_is_refused() {
    let dir = prepared();
    let root = dir.path();
    write_tokenizer(&root.join("source"), "w0");
    write_tokenizer(&root.join("other"), "w1");
    fs::write(root.join("words.txt"), "w1 w2 w3 ".repeat(40)).unwrap();
    let prepare = |tokenizer: &str, out: &str| {
        let (tokenizer, words) = (root.join(tokenizer), root.join("words.txt"));
        prepare_text(&tokenizer, &words, &root.join(out), AppendEos::Never);
    };
    prepare("other", "theirs");
    prepare("source", "ours");
    let message = failure(root, &mut moh_train(root, &["data.validation.path=theirs"]), 1);
    let command = "moh-data accept --tokenizer source/tokenizer.json theirs";
    assert!(message.ends_with(command), "{message}");
    // The words that the text has are the same in both.
    let data = Path::new(PROGRAM).with_file_name("moh-data");
    let mut accept = program(data.to_str().unwrap(), root);
    success(accept.args(["accept", "--tokenizer", "source/tokenizer.json", "theirs"]));
    let text = stderr(&moh_train(root, &["data.validation.path=theirs"]).output().unwrap());
    assert!(text.contains("warning: source/tokenizer.json: is not the one that the"), "{text}");
    fs::remove_dir_all(root.join("run")).unwrap();
    // With the tokenizer, losses have bits per byte, and the export has the tokenizer.
    let ours = ["data.sources=[{path = \"ours\"}]", "data.validation.path=ours"];
    let text = success(&mut moh_train(root, &ours));
    assert!(text.contains("moh-generate --model run/export"), "{text}");
    let same = |name: &str| fs::read(root.join(name).join("tokenizer.json")).unwrap();
    assert!(same("source") == same("run/export"));
    let metrics = fs::read_to_string(root.join("run/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    // Windows of 16 words have 15 targets: 15 words of 2 bytes and 14 spaces between them.
    let expected = last["validation_loss"].as_f64().unwrap() * 15.0 / 44.0 / 2f64.ln();
    assert!((last["validation_bits_per_byte"].as_f64().unwrap() - expected).abs() < 1e-12);
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_shell_with_a_launchers_variables_is_told_which_ones() {
    let dir = prepared();
    let mut command = moh_train(dir.path(), &[]);
    command.envs([
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_JOB_ID", "7"),
        ("SLURM_JOB_NODELIST", "node1"),
    ]);
    let message = failure(dir.path(), &mut command, 1);
    let expected = "SLURM_PROCID and SLURM_NTASKS say that this is one of 4 processes, but this program \
         was built without MPI: build it with --features mpi, or unset these variables to start one \
         process";
    assert_eq!(message, expected);
}

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = tempfile::tempdir().unwrap();
    let options = take_negative_numbers(PROGRAM, &[], dir.path());
    assert!(options >= 15, "{options}");
}

#[test]
fn an_error_names_the_values_that_an_option_takes() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, expected) in [
        (&["--resume-step", "-1"][..], "a whole number of at least 1"),
        (&["--rendezvous-timeout", "-1"], "a whole number from 1 to 2592000"),
        (&["--plan", "--ranks", "0"], "'--ranks <N>': must be a whole number of at least 1"),
        (&["--trace", "last"], "\"last\": expected steps, as in 3,10-12"),
        (&["--time-limit", "-1h"], "expected a time such as 90m"),
        (&["checkpoints", "run", "prune", "--keep", "-1"], "a whole number of at least 1"),
    ] {
        let (_, text) = exits(program(PROGRAM, dir.path()).args(arguments), 2);
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
}
