//! Preparation: from files of text to a token file.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::fs;
use std::path::{Path, PathBuf};

use moh_data::{
    Error, Prepare, TextTokenizer, TokenFile, TrainTokenizer, prepare, train_tokenizer,
};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/fixtures");

fn tokenizer(dir: &Path, vocab_size: usize) -> TextTokenizer {
    let input = dir.join("words.txt");
    fs::write(&input, "one two three one two three one two one two").unwrap();
    let dir = &dir.join(format!("tok{vocab_size}"));
    let options =
        TrainTokenizer { inputs: &[input], field: "text", vocab_size, dir, overwrite: true };
    train_tokenizer(options, &mut |_, _| {}).unwrap()
}

fn run(
    tokenizer: &TextTokenizer,
    inputs: &[PathBuf],
    prefix: &Path,
    overwrite: bool,
) -> Result<moh_data::TokenFileInfo, Error> {
    prepare(Prepare { tokenizer, inputs, field: "text", prefix, overwrite }, &mut |_, _| {})
}

#[test]
fn documents_keep_their_order_over_many_batches() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path(), 260);
    let lines = dir.path().join("a.jsonl");
    let texts: Vec<String> = (0..40_000).map(|number| format!("document {number}")).collect();
    let json: String =
        texts.iter().map(|text| format!("{}\n", serde_json::json!({"text": text}))).collect();
    fs::write(&lines, &json).unwrap();
    let whole = dir.path().join("b.txt");
    fs::write(&whole, "the last\none").unwrap();
    let prefix = dir.path().join("out");
    let inputs = [lines, whole];
    let mut seen = Vec::new();
    let options = Prepare {
        tokenizer: &tokenizer,
        inputs: &inputs,
        field: "text",
        prefix: &prefix,
        overwrite: false,
    };
    let info = prepare(options, &mut |done, total| seen.push((done, total))).unwrap();
    assert_eq!(info.documents, 40_001);
    let text_bytes: usize = texts.iter().map(String::len).sum();
    assert_eq!(info.text_bytes, text_bytes as u64 + 12);
    assert_eq!(info.vocabulary_size, tokenizer.vocab_size() as u64);
    assert_eq!(info.tokenizer_hash.as_deref(), Some(tokenizer.hash()));
    assert_eq!(info.sources.len(), 2);
    let total = json.len() as u64 + 12;
    assert_eq!((seen[0], seen[seen.len() - 1]), ((0, total), (total, total)));
    assert!(seen.len() > 3 && seen.is_sorted());
    let file = TokenFile::open(&prefix).unwrap();
    for number in [0, 16_383, 16_384, 39_999, 40_000] {
        let range = file.document(number).unwrap();
        let mut ids = vec![0; (range.end - range.start) as usize];
        file.read(range.start, &mut ids).unwrap();
        let text = texts.get(number as usize).map_or("the last\none", String::as_str);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        assert_eq!((ids[0], ids[ids.len() - 1]), (0, 1));
    }
}

#[test]
fn faults_leave_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path(), 260);
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let prefix = out.join("p");
    let good = dir.path().join("good.txt");
    fs::write(&good, "good").unwrap();
    let bad = dir.path().join("bad.jsonl");
    fs::write(&bad, "{\"text\": \"fine\"}\n{\"text\": 3}\n").unwrap();
    let empty = dir.path().join("empty.jsonl");
    fs::write(&empty, "\n").unwrap();
    let missing = dir.path().join("missing.txt");
    let fail = |inputs: &[PathBuf]| run(&tokenizer, inputs, &prefix, false).unwrap_err();
    assert!(matches!(fail(&[good.clone(), bad]), Error::Line { line: 2, .. }));
    assert!(matches!(fail(&[good.clone(), missing]), Error::Io { .. }));
    assert!(matches!(fail(&[dir.path().to_path_buf()]), Error::Io { .. }));
    assert!(matches!(fail(&[empty]), Error::Empty { .. }));
    assert!(matches!(fail(&[]), Error::Empty { .. }));
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
    let nowhere = dir.path().join("none/p");
    assert!(run(&tokenizer, std::slice::from_ref(&good), &nowhere, false).is_err());
}

#[test]
fn outputs_are_overwritten_only_when_told() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path(), 260);
    let input = dir.path().join("p.json");
    fs::write(&input, "{\"text\": \"one\"}").unwrap();
    let prefix = dir.path().join("q");
    let inputs = [input.clone()];
    run(&tokenizer, &inputs, &prefix, false).unwrap();
    assert!(matches!(run(&tokenizer, &inputs, &prefix, false), Err(Error::Exists { .. })));
    run(&tokenizer, &inputs, &prefix, true).unwrap();
    let clash = run(&tokenizer, &inputs, &dir.path().join("p"), true);
    assert!(matches!(clash, Err(Error::OverwritesInput { .. })), "{clash:?}");
    assert_eq!(fs::read_to_string(&input).unwrap(), "{\"text\": \"one\"}");
}

#[test]
fn another_tokenizer_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (tokenizer(dir.path(), 260), tokenizer(dir.path(), 259));
    let input = dir.path().join("a.txt");
    fs::write(&input, "one").unwrap();
    let prefix = dir.path().join("p");
    run(&one, &[input], &prefix, false).unwrap();
    let file = TokenFile::open(&prefix).unwrap();
    file.check_tokenizer(&one).unwrap();
    let error = file.check_tokenizer(&other).unwrap_err().to_string();
    assert!(error.contains("p.json") && error.contains("tok259"), "{error}");
    fs::remove_file(dir.path().join("p.json")).unwrap();
    TokenFile::open(&prefix).unwrap().check_tokenizer(&other).unwrap();
}

#[test]
fn the_reference_stories_have_their_number_of_tokens() {
    let fixtures = Path::new(FIXTURES);
    if !fixtures.exists() {
        println!("skipped: no fixtures");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = TextTokenizer::load(&fixtures.join("stories260K")).unwrap();
    let inputs = [fixtures.join("data/stories-valid.jsonl")];
    let info = run(&tokenizer, &inputs, &dir.path().join("p"), false).unwrap();
    assert_eq!(info.documents, 261);
    // 93.4 K tokens of text; the tokenizer adds BOS to each story, and no EOS.
    assert_eq!(info.tokens, 93_392 + 261);
}
