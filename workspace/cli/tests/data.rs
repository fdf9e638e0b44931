//! `moh-data` as a process: its output, its files and its exit codes.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-data");

fn moh_data(dir: &Path, arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::new(PROGRAM);
    command.current_dir(dir).args(arguments).assert()
}

fn stdout(done: &assert_cmd::assert::Assert) -> String {
    String::from_utf8(done.get_output().stdout.clone()).unwrap()
}

fn stderr(done: &assert_cmd::assert::Assert) -> String {
    String::from_utf8(done.get_output().stderr.clone()).unwrap()
}

/// A directory with 50 stories, a tokenizer and a token file.
fn prepared() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let run = |line: &str| moh_data(dir.path(), &line.split(' ').collect::<Vec<_>>()).success();
    run("stories --seed 1 --count 50 --out s.jsonl");
    run("tokenizer --vocab-size 400 --out tok s.jsonl");
    run("prepare --tokenizer tok --out p s.jsonl");
    dir
}

#[test]
fn stories_become_a_token_file() {
    let dir = prepared();
    let mut names: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["p.bin", "p.idx", "p.json", "s.jsonl", "tok"]);
    let done = moh_data(dir.path(), &["info", "p"]).success();
    let text = stdout(&done);
    let tokens = fs::metadata(dir.path().join("p.bin")).unwrap().len() / 2;
    assert!(
        text.starts_with(&format!("documents  50\ntokens     {tokens}\nlongest    ")),
        "{text}"
    );
    assert!(text.contains("\ndtype      u16\n"), "{text}");
    assert!(text.contains("\nvocabulary 400\n"), "{text}");
    assert!(text.ends_with("source     s.jsonl\n"), "{text}");
    assert_eq!(stderr(&done), "");
    fs::remove_file(dir.path().join("p.json")).unwrap();
    let text = stdout(&moh_data(dir.path(), &["info", "p"]).success());
    assert!(text.ends_with("tokenizer  not recorded\n"), "{text}");
}

#[test]
fn outputs_are_kept_unless_forced() {
    let dir = prepared();
    let cases: [&[&str]; 3] = [
        &["stories", "--count", "1", "--out", "s.jsonl"],
        &["tokenizer", "--vocab-size", "300", "--out", "tok", "s.jsonl"],
        &["prepare", "--tokenizer", "tok", "--out", "p", "s.jsonl"],
    ];
    for case in cases {
        let text = stderr(&moh_data(dir.path(), case).code(1));
        assert!(text.starts_with("error: ") && text.contains("already exists"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        moh_data(dir.path(), &[case, &["--force"]].concat()).success();
    }
}

#[test]
fn errors_are_one_sentence_and_name_the_file() {
    let dir = prepared();
    fs::write(dir.path().join("bad.jsonl"), "{\"body\": \"a\"}\n").unwrap();
    let prepare = ["prepare", "--tokenizer", "tok", "--out", "q"];
    let cases: [(Vec<&str>, &str); 5] = [
        ([&prepare[..], &["bad.jsonl"]].concat(), "error: bad.jsonl:1: no field \"text\""),
        ([&prepare[..], &["none.txt"]].concat(), "error: none.txt: cannot read: No such file"),
        (vec!["info", "none"], "error: none.bin: cannot read: No such file"),
        (vec!["info", "p.idxx"], "error: p.idxx.bin: cannot read"),
        (vec!["tokenizer", "--vocab-size", "9", "--out", "t", "s.jsonl"], "error: vocab-size = 9"),
    ];
    for (arguments, start) in cases {
        let done = moh_data(dir.path(), &arguments).code(1);
        let text = stderr(&done);
        assert!(text.starts_with(start) && text.lines().count() == 1, "{text}");
        assert_eq!(stdout(&done), "");
    }
    moh_data(dir.path(), &[&prepare[..], &["--field", "body", "bad.jsonl"]].concat()).success();
}

#[test]
fn wrong_usage_exits_with_two() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [&[&str]; 5] = [
        &[],
        &["prepare"],
        &["stories", "--count", "0", "--out", "a"],
        &["stories", "--count", "1", "--setting", "moon", "--out", "a"],
        &["unknown"],
    ];
    for case in cases {
        moh_data(dir.path(), case).code(2);
    }
    moh_data(dir.path(), &["--version"]).success();
}

#[test]
fn examples_in_the_help_work_when_pasted() {
    for help in [
        &["--help"][..],
        &["prepare", "--help"],
        &["stories", "--help"],
        &["tokenizer", "--help"],
        &["info", "--help"],
    ] {
        let dir = tempfile::tempdir().unwrap();
        let text = stdout(&moh_data(dir.path(), help).success());
        let lines = text.lines().filter_map(|line| line.trim().strip_prefix("moh-data "));
        let examples: Vec<_> = lines.collect();
        assert!(!examples.is_empty(), "{text}");
        for example in examples {
            moh_data(dir.path(), &example.split(' ').collect::<Vec<_>>()).success();
        }
    }
}

#[test]
fn the_settings_differ_and_repeat() {
    let dir = tempfile::tempdir().unwrap();
    let read = |setting: &str, name: &str| {
        let arguments = ["stories", "--count", "5", "--setting", setting, "--out", name];
        moh_data(dir.path(), &arguments).success();
        fs::read(dir.path().join(name)).unwrap()
    };
    assert_eq!(read("village", "a"), read("village", "b"));
    assert_ne!(read("village", "c"), read("voyage", "d"));
}

#[cfg(unix)]
#[test]
fn a_reader_that_goes_away_is_no_error() {
    let dir = prepared();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = std::process::Command::new(PROGRAM)
        .args(["info", "p"])
        .current_dir(dir.path())
        .stdout(writer)
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}
