//! `moh-data info`, `show` and `verify` as processes, on small token files, sound and damaged.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use moh_data::{DocumentEnd, Provenance, TokenFileWriter};
use serde_json::{Value, json};
use tempfile::TempDir;

use moh_testkit::small_tokenizer::{WORDS, write_tokenizer};

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-data");

/// Runs `moh-data` with these words; its exit code, standard output and standard error.
fn run(dir: &Path, line: &str) -> (i32, String, String) {
    let done = Command::new(PROGRAM).current_dir(dir).args(line.split(' ')).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
}

/// Standard output of a command that succeeds.
fn stdout(dir: &Path, line: &str) -> String {
    let (code, out, err) = run(dir, line);
    assert_eq!((code, err.as_str()), (0, ""), "{line}: {out}");
    out
}

fn parsed(dir: &Path, line: &str) -> Value {
    serde_json::from_str(&stdout(dir, line)).unwrap()
}

/// 60 documents as JSON lines, a tokenizer, and a token file `p`.
fn prepared() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let text = |n: usize| (0..=n).map(|word| format!("word{} ", word * n % 17)).collect::<String>();
    let lines: String = (0..60).map(|n| format!("{{\"text\": \"{}{n}\"}}\n", text(n))).collect();
    fs::write(dir.path().join("s.jsonl"), lines).unwrap();
    write_tokenizer(&dir.path().join("tok"), &WORDS);
    stdout(dir.path(), "prepare --tokenizer tok --out p s.jsonl");
    dir
}

/// A token file `t` of ids below 10 with these documents, which says that they end with </s>.
fn written(dir: &Path, documents: &[&[u32]]) {
    let mut writer = TokenFileWriter::replace(&dir.join("t"), 10).unwrap();
    for document in documents {
        writer.push_document(document).unwrap();
    }
    let eos_token = DocumentEnd::Token("</s>".to_owned());
    writer.finish(Provenance { eos_token, ..Provenance::default() }).unwrap();
}

fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn info_shows_how_long_documents_are() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &[&[1, 2, 9], &[9], &[1, 9], &[1, 2, 3, 4, 9]]);
    let text = stdout(dir.path(), "info t");
    assert!(text.contains("longest    5 tokens\ndtype      u16\n"), "{text}");
    let found = parsed(dir.path(), "info t --json");
    assert_eq!(found["longest"], 5);
    assert_eq!(
        (&found["documents"], &found["tokens"], &found["dtype"]),
        (&4.into(), &11.into(), &"u16".into())
    );
    assert_eq!((&found["prefix"], &found["recorded"]["eos_token"]), (&"t".into(), &"</s>".into()));
    fs::remove_file(dir.path().join("t.json")).unwrap();
    assert_eq!(parsed(dir.path(), "info --json t")["recorded"], Value::Null);
    written(dir.path(), &[]);
    assert!(stdout(dir.path(), "info t").contains("longest    0 tokens\ndtype"));
}

#[test]
fn show_decodes_a_document() {
    let dir = prepared();
    let text = stdout(dir.path(), "show p --doc 2 --tokenizer tok");
    let (head, body) = text.split_once('\n').unwrap();
    assert!(
        head.starts_with("document 2: ") && head.ends_with("; ends with <|end_of_text|>"),
        "{head}"
    );
    assert_eq!(body, "<|begin_of_text|>word0 word2 word4 2<|end_of_text|>\n");
    let found = parsed(dir.path(), "show p --doc 2 --tokenizer tok --json");
    assert_eq!(found["text"], body.trim_end());
    assert_eq!(
        (&found["document"], &found["more_tokens"], &found["ends_with_eos"]),
        (&2.into(), &0.into(), &true.into())
    );
    assert_eq!(found["tokens"], found["ids"].as_array().unwrap().len());
    let text = stdout(dir.path(), "show p --doc 59 --tokenizer tok/tokenizer.json --max-tokens 3");
    assert!(text.lines().nth(1).unwrap().starts_with("<|begin_of_text|>"), "{text}");
    assert!(text.ends_with(" more tokens: --max-tokens shows more\n"), "{text}");
    let start = found["start"].as_u64().unwrap();
    let line = format!("show p --tokens {}..{} --tokenizer tok --json", start, start + 1);
    let first = parsed(dir.path(), &line);
    assert_eq!(
        (&first["document"], &first["ids"][0], &first["ends_with_eos"]),
        (&2.into(), &found["ids"][0], &Value::Null)
    );
}

#[test]
fn show_without_a_tokenizer_prints_ids() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &[&[1, 2, 9], &[], &[4, 5]]);
    let expected = "document 0: 3 tokens from token 0 on; the last id is 9\n1 2 9\n";
    assert_eq!(stdout(dir.path(), "show t --doc 0"), expected);
    assert_eq!(stdout(dir.path(), "show t --doc 1"), "document 1: 0 tokens from token 3 on\n\n");
    let expected =
        "document 0: 3 tokens from token 2 on\n9 4\nand 1 more token: --max-tokens shows more\n";
    assert_eq!(stdout(dir.path(), "show t --tokens 2..5 --max-tokens 2"), expected);
    let fails = |line: &str, code: i32, part: &str| {
        let (found, out, err) = run(dir.path(), line);
        assert!(found == code && out.is_empty() && err.contains(part), "{line}: {found}: {err}");
    };
    fails("show t --doc 3", 1, "error: document = 3: the file has 3 documents");
    fails("show t --tokens 4..6", 1, "cannot read tokens 4..6: the file has 5");
    fails("show t --tokens 4..4", 2, "as in 100..110");
    fails("show t", 2, "--doc <N>");
    fails("show t --doc 0 --tokens 0..1", 2, "cannot be used with");
}

#[test]
fn show_refuses_another_tokenizer() {
    let dir = prepared();
    write_tokenizer(&dir.path().join("other"), &[" word"]);
    let (code, out, err) = run(dir.path(), "show p --doc 0 --tokenizer other");
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("prepared with another tokenizer than other/tokenizer.json"), "{err}");
}

#[cfg(unix)]
#[test]
fn a_reader_that_goes_away_is_no_error() {
    let dir = prepared();
    for line in ["show p --doc 3", "show p --doc 3 --json", "info p --json", "verify p"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = std::process::Command::new(PROGRAM);
        command.args(line.split(' ')).current_dir(dir.path()).stdout(writer);
        assert!(command.status().unwrap().success(), "{line}");
    }
}

#[test]
fn verify_passes_what_was_prepared() {
    let dir = prepared();
    let text = stdout(dir.path(), "verify p --strict --tokenizer tok");
    assert!(text.starts_with("p: no fault in 60 documents and "), "{text}");
    let size = &parsed(dir.path(), "info p --json")["recorded"]["vocabulary_size"];
    assert!(text.ends_with(&format!("; all ids are below {size}\n")), "{text}");
    let found = parsed(dir.path(), "verify p --json");
    assert_eq!((&found["is_sound"], &found["problems"]), (&true.into(), &json!([])));
    assert_eq!((&found["documents"], &found["vocabulary_size"]), (&60.into(), size));
    fs::remove_file(dir.path().join("p.json")).unwrap();
    assert!(stdout(dir.path(), "verify p").contains("no vocabulary is recorded"));
    let (code, out, _) = run(dir.path(), "verify p --vocab-size 2");
    assert!(code == 1 && out.contains("are outside the vocabulary of 2, first "), "{out}");
}

#[test]
fn verify_tells_what_may_be_intended_and_fails_on_it_if_strict() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &[&[1, 9], &[2], &[], &[1, 9]]);
    let text = stdout(dir.path(), "verify t");
    let starts = [
        "warning: t.bin: 1 of 4 documents do not end with </s>",
        "warning: t.bin: 1 of 4 documents have no tokens, first document 2",
        "warning: t.bin: 1 of 4 documents (25.00%) repeat an earlier one, first document 3",
        "t: no fault in 4 documents and 5 tokens; all ids are below 10",
    ];
    assert_eq!(text.lines().count(), starts.len());
    assert!(text.lines().zip(starts).all(|(line, start)| line.starts_with(start)), "{text}");
    let (code, out, err) = run(dir.path(), "verify t --strict");
    assert_eq!((code, err.as_str()), (1, "error: t: 3 kinds of fault, listed above\n"));
    assert!(out.lines().all(|line| line.starts_with("fault: t.bin: ")), "{out}");
    let (code, out, _) = run(dir.path(), "verify t --strict --json");
    let found: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &found["is_sound"]), (1, &false.into()));
    let kinds = found["problems"].as_array().unwrap().iter().map(|problem| &problem["kind"]);
    assert_eq!(kinds.collect::<Vec<_>>(), ["end_of_text", "empty", "duplicates"]);
}

#[test]
fn verify_finds_every_fault() {
    let dir = tempfile::tempdir().unwrap();
    let fresh = || written(dir.path(), &[&[1, 2, 9], &[3, 9]]);
    let [bin, idx, record] = ["t.bin", "t.idx", "t.json"].map(|name| dir.path().join(name));
    let fails = |starts: &[&str]| {
        let (code, out, err) = run(dir.path(), "verify t");
        assert_eq!(code, 1, "{out}");
        assert!(err.starts_with("error: t: ") && err.lines().count() == 1, "{err}");
        let faults: Vec<&str> = out.lines().filter(|line| line.starts_with("fault: ")).collect();
        assert_eq!(faults.len(), starts.len(), "{out}");
        assert!(faults.iter().zip(starts).all(|(line, start)| line.contains(start)), "{out}");
    };
    fresh();
    change(&idx, |bytes| bytes.truncate(40));
    fails(&["fault: t.idx: not a valid token file: 40 bytes for 2 sequences"]);
    fresh();
    // The second of two offsets, after the header and two lengths.
    change(&idx, |bytes| bytes[34 + 2 * 4 + 8] = 2);
    fails(&["fault: t.idx: 1 of 2 sequences do not begin where", "fault: t.json: not a valid"]);
    fresh();
    change(&bin, |bytes| bytes[2] = 200);
    let ids = "fault: t.bin: the ids of 1 of 5 tokens are outside the vocabulary of 10, first 200, token 1";
    fails(&["fault: t.json: not a valid token file: it describes another .bin", ids]);
    fresh();
    change(&bin, |bytes| bytes.extend([0, 0]));
    fails(&["fault: t.bin: 12 bytes, but the documents of the index have 10", "fault: t.json: "]);
    fresh();
    change(&record, |bytes| bytes.truncate(20));
    fails(&["fault: t.json: not a valid token file: not a token file's metadata"]);
    let (code, _, err) = run(dir.path(), "verify none");
    assert!(code == 1 && err.starts_with("error: none.bin: cannot read: "), "{err}");
}
