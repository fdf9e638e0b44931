//! `moh-data` as a process: its output, its files and its exit codes.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use moh_data::{DocumentEnd, TokenFileInfo, TokenFileWriter};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::PATIENCE;
use moh_testkit::launcher::wait_until;
use moh_testkit::programs::{edit_json, names, read_json};
use moh_testkit::small_tokenizer::{WORDS, write_tokenizer};

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-data");

/// Runs `moh-data` with these words and standard input. Returns its exit code, standard output and standard error.
fn run_from(dir: &Path, input: &[u8], line: &str) -> (i32, String, String) {
    let mut command = Command::new(PROGRAM);
    command.current_dir(dir).args(line.split_whitespace()).write_stdin(input);
    let done = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
}

fn run(dir: &Path, line: &str) -> (i32, String, String) {
    run_from(dir, b"", line)
}

/// Returns the standard output of a command that succeeds.
fn stdout(dir: &Path, line: &str) -> String {
    let (code, out, err) = run(dir, line);
    assert_eq!((code, err.as_str()), (0, ""), "{line}: {out}");
    out
}

fn parsed(dir: &Path, line: &str) -> Value {
    serde_json::from_str(&stdout(dir, line)).unwrap()
}

/// Returns the standard error of a command that ends with this exit code and prints nothing.
fn refusal(dir: &Path, input: &[u8], line: &str, code: i32) -> String {
    let (found, out, err) = run_from(dir, input, line);
    assert_eq!((found, out.as_str()), (code, ""), "{line}: {err}");
    assert!(code != 1 || err.lines().count() == 1, "{err}");
    err
}

/// Returns documents of many words, as JSON lines.
fn documents(count: usize) -> String {
    let starts = ["ka", "lo", "mi", "ne", "pu", "ra", "si", "to", "ve", "zu"];
    let ends = ["bel", "dar", "fin", "gos", "hul", "jim", "kan", "lut", "mok", "nep"];
    let word = |n: usize| format!("{}{} ", starts[n % 10], ends[n / 10 % 10]);
    let text = |document: usize| (0..20 + document).map(move |n| word(n * document + n * n));
    let line = |document| format!("{{\"text\": \"{}\"}}\n", text(document).collect::<String>());
    (0..count).map(line).collect()
}

/// Returns a directory with 50 documents, a tokenizer and a token file.
fn prepared() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("s.jsonl"), documents(50)).unwrap();
    write_tokenizer(&dir.path().join("tok"), &WORDS);
    stdout(dir.path(), "prepare --tokenizer tok --out p s.jsonl");
    dir
}

#[test]
fn documents_become_a_token_file() {
    let dir = prepared();
    assert_eq!(names(dir.path()), ["p.bin", "p.idx", "p.json", "s.jsonl", "tok"]);
    let text = stdout(dir.path(), "info p");
    let tokens = fs::metadata(dir.path().join("p.bin")).unwrap().len() / 2;
    let start = format!("documents  50\ntokens     {tokens}\nlongest    ");
    assert!(text.starts_with(&start), "{text}");
    assert!(text.contains("\ndtype      u16\n"), "{text}");
    assert!(text.contains("\nvocabulary 276\neos token  <|end_of_text|>\n"), "{text}");
    assert!(text.ends_with("source     s.jsonl\n"), "{text}");
    fs::remove_file(dir.path().join("p.json")).unwrap();
    let text = stdout(dir.path(), "info p");
    assert!(text.ends_with("tokenizer  not recorded\n"), "{text}");
}

#[test]
fn special_tokens_in_texts_are_a_warning() {
    let dir = prepared();
    fs::write(dir.path().join("a.txt"), "one <|end_of_text|> two <|end_of_text|>").unwrap();
    let (code, _, text) = run(dir.path(), "prepare --tokenizer tok --out a a.txt");
    let expected = "warning: a: special tokens in the text became those tokens (<|end_of_text|> 2): \
                    --split-special-tokens encodes them as text\n";
    assert_eq!((code, text.as_str()), (0, expected));
    assert!(stdout(dir.path(), "info a").contains("\nin texts   <|end_of_text|> 2\n"));
    stdout(dir.path(), "prepare --tokenizer tok --split-special-tokens --force --out a a.txt");
    assert!(stdout(dir.path(), "info a").contains("\nin texts   special tokens are text\n"));
}

#[test]
fn directories_of_outputs_are_made_and_errors_name_the_users_path() {
    let dir = prepared();
    stdout(dir.path(), "prepare --tokenizer tok --out tokens/new/p s.jsonl");
    assert!(dir.path().join("tokens/new/p.json").is_file());
    fs::write(dir.path().join("file"), "").unwrap();
    let text = refusal(dir.path(), b"", "prepare --tokenizer tok --out file/p s.jsonl", 1);
    assert!(text.starts_with("error: file/p.prepare: "), "{text}");
    assert!(!text.contains(".tmp-") && !text.contains("at path"), "{text}");
}

#[test]
fn errors_are_one_sentence_and_name_the_file() {
    let dir = prepared();
    fs::write(dir.path().join("bad.jsonl"), "{\"body\": \"a\"}\n").unwrap();
    for (line, start) in [
        ("prepare --tokenizer tok --out q bad.jsonl", "error: bad.jsonl:1: no field \"text\""),
        ("prepare --tokenizer tok --out q none.txt", "error: none.txt: No such file"),
        ("info p.idxx", "error: p.idxx.bin: cannot read: No such file"),
    ] {
        let text = refusal(dir.path(), b"", line, 1);
        assert!(text.starts_with(start), "{text}");
    }
    stdout(dir.path(), "prepare --tokenizer tok --out q --field body bad.jsonl");
}

#[test]
fn wrong_usage_exits_with_two() {
    let dir = tempfile::tempdir().unwrap();
    for line in ["", "prepare", "prepare --tokenizer tok --out a", "unknown"] {
        assert_eq!(run(dir.path(), line).0, 2, "{line}");
    }
    stdout(dir.path(), "--version");
}

#[test]
fn every_option_takes_a_negative_number_and_says_what_it_expects() {
    let dir = prepared();
    assert!(moh_testkit::options::take_negative_numbers(PROGRAM, &[], dir.path()) >= 18);
    for (line, expected) in [
        ("prepare --split -0.1,1.1", "expected two shares above 0 that sum to 1"),
        ("prepare --split 0.9,0.2", "that sum to 1"),
        ("prepare --min-tokens -1", "a whole number of at least 1"),
        ("prepare --sample -1", "a share of the documents above 0"),
        ("prepare --memory 1MB", "at least 64 MB, as in 500MB or 2GB"),
        ("prepare --skip-bad-lines --max-bad 1", "as in 0.1%"),
    ] {
        let text = refusal(dir.path(), b"", line, 2);
        assert!(text.contains(expected), "{line}: {text}");
    }
}

#[test]
fn examples_in_the_help_work_when_pasted() {
    for command in ["", "prepare", "info", "show", "verify", "accept"] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("text.jsonl"), documents(50)).unwrap();
        write_tokenizer(&dir.path().join("model"), &WORDS);
        let text = stdout(dir.path(), &format!("{command} --help"));
        let lines = text.lines().filter_map(|line| line.trim().strip_prefix("moh-data "));
        let examples: Vec<_> = lines.collect();
        assert!(!examples.is_empty(), "{text}");
        for example in examples {
            assert_eq!(run(dir.path(), example).0, 0, "{example}");
        }
    }
}

#[test]
fn the_summary_names_the_token_that_ends_documents() {
    let dir = prepared();
    let prepare = "prepare --tokenizer tok";
    let eos = |name: &str| read_json(&dir.path().join(name))["eos_token"].clone();
    for (options, end, recorded) in [
        ("", " bytes of text; each document ends with <|end_of_text|>\n", json!("<|end_of_text|>")),
        (
            "--eos-token <|begin_of_text|>",
            "; each document ends with <|begin_of_text|>\n",
            json!("<|begin_of_text|>"),
        ),
        ("--no-append-eos", "; documents end without an end-of-text token\n", Value::Null),
    ] {
        let text = stdout(dir.path(), &format!("{prepare} --force {options} --out a s.jsonl"));
        assert!(text.starts_with("a: 50 documents, ") && text.ends_with(end), "{text}");
        assert_eq!(eos("a.json"), recorded);
    }
    assert!(stdout(dir.path(), "info a").contains("\neos token  none\n"));
    let both = format!("{prepare} --eos-token x --no-append-eos --out d s.jsonl");
    refusal(dir.path(), b"", &both, 2);
    assert!(!dir.path().join("d.bin").exists());
}

#[test]
fn standard_input_and_pipes_are_read_once() {
    let dir = prepared();
    let lines = fs::read(dir.path().join("s.jsonl")).unwrap();
    let expected = fs::read(dir.path().join("p.bin")).unwrap();
    let prepare = |input: &[u8], arguments: &str| {
        run_from(dir.path(), input, &format!("prepare --tokenizer tok {arguments}"))
    };
    // The second name is a pipe with a name other than `-`.
    for (out, input) in [("a", "-"), ("b", "/dev/stdin")] {
        if cfg!(not(unix)) && input != "-" {
            continue;
        }
        let (code, text, err) = prepare(&lines, &format!("--format jsonl --out {out} {input}"));
        assert!(code == 0 && text.starts_with(&format!("{out}: 50 documents, ")), "{err}");
        assert_eq!(fs::read(dir.path().join(format!("{out}.bin"))).unwrap(), expected);
    }
    let (code, text, err) = prepare(b"one text\nin two lines", "--format text --out c -");
    assert!(code == 0 && text.starts_with("c: 1 document, "), "{err}");
    let line = "prepare --tokenizer tok --format jsonl --out d -";
    let text = refusal(dir.path(), &lines[..90], line, 1);
    assert!(text.contains("error: -:1: broken JSON at column"), "{text}");
    assert!(names(dir.path()).iter().all(|name| !name.starts_with(['d', '.'])));
}

#[test]
fn a_split_writes_two_token_files() {
    let dir = prepared();
    let text = stdout(dir.path(), "prepare --tokenizer tok --split 0.98,0.02 --out q s.jsonl");
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("q-train: 49 documents, "), "{text}");
    assert!(lines[1].starts_with("q-validation: 1 document, "), "{text}");
    assert_eq!(lines.len(), 2);
    stdout(dir.path(), "info q-train");
}

#[test]
fn a_tokenizer_is_a_directory_a_file_or_a_hub_id() {
    let dir = prepared();
    let cache = dir.path().join("cache");
    let run = |tokenizer: &str, out: &str| {
        let mut command = Command::new(PROGRAM);
        command.env("HF_HUB_CACHE", &cache).env("HF_HUB_OFFLINE", "1").current_dir(dir.path());
        command.args(["prepare", "--tokenizer", tokenizer, "--out", out, "s.jsonl"]).assert()
    };
    let bin = |name: &str| fs::read(dir.path().join(name)).unwrap();
    run("tok/tokenizer.json", "a").success();
    assert_eq!(bin("a.bin"), bin("p.bin"));
    let done = run("org/name", "b").code(1);
    let text = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(text.starts_with("error: org/name: ") && text.contains("not in the cache"), "{text}");
    let repository = cache.join("models--org--name");
    let snapshot = repository.join("snapshots/abc");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), "abc").unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(dir.path().join("tok").join(name), snapshot.join(name)).unwrap();
    }
    run("org/name", "b").success();
    assert_eq!(bin("b.bin"), bin("p.bin"));
}

#[test]
fn one_of_something_is_singular() {
    let dir = prepared();
    fs::write(dir.path().join("tok/tokenizer_config.json"), "{}").unwrap();
    let tokenizer = dir.path().join("tok/tokenizer.json");
    edit_json(&tokenizer, |json| json["post_processor"] = Value::Null);
    let line = "prepare --tokenizer tok --format text --no-append-eos --out one -";
    let (code, text, err) = run_from(dir.path(), b"a", line);
    assert!(code == 0 && text.starts_with("one: 1 document, 1 token, 1 byte of text; "), "{err}");
    let text = stdout(dir.path(), "info one");
    assert!(text.contains("longest    1 token\n"), "{text}");
    assert!(text.contains("text       1 byte\n"), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_no_panic() {
    use std::process::Stdio;
    let dir = prepared();
    let full = || Stdio::from(fs::File::options().write(true).open("/dev/full").unwrap());
    let left = || {
        let (_, writer) = std::io::pipe().unwrap();
        Stdio::from(writer)
    };
    let code = |arguments: &[&str], out: Stdio, err: Stdio| {
        let mut command = std::process::Command::new(PROGRAM);
        command.args(arguments).current_dir(dir.path()).stdout(out).stderr(err);
        command.status().unwrap().code()
    };
    let fails = ["info", "none"];
    assert_eq!(code(&fails, Stdio::null(), full()), Some(1));
    assert_eq!(code(&fails, left(), left()), Some(1));
    let works = ["prepare", "--tokenizer", "tok", "--force", "--out", "q", "s.jsonl"];
    assert_eq!(code(&works, Stdio::null(), full()), Some(0));
    assert_eq!(code(&works, left(), left()), Some(0));
    assert_eq!(code(&works, full(), full()), Some(1));
}

/// A run that waits for more of its standard input.
#[cfg(unix)]
struct Waiting(std::process::Child);

#[cfg(unix)]
impl Waiting {
    /// Starts a run, and waits until it has opened its files.
    fn start(dir: &Path, out: &str) -> Self {
        use std::process::Stdio;
        let mut command = std::process::Command::new(PROGRAM);
        command.args(["prepare", "--tokenizer", "tok", "--format", "jsonl", "--out", out, "-"]);
        command.current_dir(dir).stdin(Stdio::piped());
        let run = Waiting(command.spawn().unwrap());
        let opened = dir.join(format!("{out}.prepare/{out}.idx"));
        wait_until(PATIENCE, "the files of the run", || opened.exists());
        run
    }

    fn signal(&mut self, signal: &str) -> std::process::ExitStatus {
        // `wait` would close the input, and a closed input ends the run by itself.
        let _input = self.0.stdin.take();
        let id = self.0.id().to_string();
        let sent = std::process::Command::new("kill").args([signal, &id]).status().unwrap();
        assert!(sent.success());
        self.0.wait().unwrap()
    }
}

#[cfg(unix)]
impl Drop for Waiting {
    fn drop(&mut self) {
        // A run that has ended cannot be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(unix)]
#[test]
fn interrupted_runs_on_standard_input_leave_no_files() {
    let dir = prepared();
    let before = names(dir.path());
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let status = Waiting::start(dir.path(), "q").signal(signal);
        assert_eq!(status.code(), Some(code));
        assert_eq!(names(dir.path()), before);
    }
}

#[cfg(unix)]
#[test]
fn what_a_killed_run_left_is_replaced_and_what_a_running_one_uses_stays() {
    let dir = prepared();
    assert_eq!(Waiting::start(dir.path(), "q").signal("-KILL").code(), None);
    assert!(dir.path().join("q.prepare").exists());
    let mut other = Waiting::start(dir.path(), "other");
    stdout(dir.path(), "prepare --tokenizer tok --out q s.jsonl");
    let bin = |name: &str| fs::read(dir.path().join(name)).unwrap();
    assert_eq!(bin("q.bin"), bin("p.bin"));
    assert!(!dir.path().join("q.prepare").exists());
    let text = refusal(dir.path(), b"", "prepare --tokenizer tok --out other s.jsonl", 1);
    assert!(text.contains("another process prepares this token file"), "{text}");
    assert!(dir.path().join("other.prepare").exists());
    other.signal("-TERM");
    assert!(!dir.path().join("other.prepare").exists());
}

#[cfg(unix)]
#[test]
fn a_killed_run_continues_and_ends_with_the_same_bytes() {
    let dir = prepared();
    for number in 0..6 {
        fs::write(dir.path().join(format!("part{number}.jsonl")), documents(400)).unwrap();
    }
    let arguments = "--split 0.9,0.1 --exact-dedup --sync-every 0 --out whole";
    let inputs = (0..6).map(|number| format!(" part{number}.jsonl")).collect::<String>();
    stdout(dir.path(), &format!("prepare --tokenizer tok {arguments}{inputs}"));
    let arguments = format!("{}{inputs}", arguments.replace("whole", "cut"));
    let mut kills = 0;
    loop {
        let mut command = std::process::Command::new(PROGRAM);
        command.args(["prepare", "--tokenizer", "tok"]).args(arguments.split(' '));
        let mut run = Waiting(command.current_dir(dir.path()).spawn().unwrap());
        std::thread::sleep(std::time::Duration::from_millis(30 + 10 * kills));
        if let Some(status) = run.0.try_wait().unwrap() {
            assert!(status.success());
            break;
        }
        run.0.kill().unwrap();
        run.0.wait().unwrap();
        kills += 1;
        let exists = |name| dir.path().join(name).exists();
        if exists("cut-train.idx") && !exists("cut.prepare") {
            // The run had finished, except that its process still existed.
            break;
        }
    }
    let bytes = |name: &str| fs::read(dir.path().join(name)).unwrap();
    for part in ["train", "validation"] {
        for ending in ["bin", "idx", "json"] {
            let [whole, cut] =
                ["whole", "cut"].map(|name| bytes(&format!("{name}-{part}.{ending}")));
            assert_eq!(whole, cut, "{part}.{ending} after {kills} kills");
        }
    }
    assert!(names(dir.path()).iter().all(|name| !name.ends_with(".prepare")));
}

/// Writes a token file `t` of ids below 10 with these documents. It records that they end with </s>.
fn written(dir: &Path, documents: &[&[u32]]) {
    let mut writer = TokenFileWriter::replace(&dir.join("t"), 10).unwrap();
    for document in documents {
        writer.push_document(document).unwrap();
    }
    let eos_token = DocumentEnd::Token("</s>".to_owned());
    writer.finish(TokenFileInfo { eos_token, ..TokenFileInfo::default() }).unwrap();
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
    let line: Value = serde_json::from_str(documents(3).lines().nth(2).unwrap()).unwrap();
    let expected = line["text"].as_str().unwrap();
    assert_eq!(body, format!("<|begin_of_text|>{expected}<|end_of_text|>\n"));
    let found = parsed(dir.path(), "show p --doc 2 --tokenizer tok --json");
    assert_eq!(found["text"], body.trim_end());
    assert_eq!(
        (&found["document"], &found["more_tokens"], &found["ends_with_eos"]),
        (&2.into(), &0.into(), &true.into())
    );
    assert_eq!(found["tokens"], found["ids"].as_array().unwrap().len());
    let text = stdout(dir.path(), "show p --doc 49 --tokenizer tok/tokenizer.json --max-tokens 3");
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
    for (line, code, part) in [
        ("show t --doc 3", 1, "error: document = 3: the file has 3 documents"),
        ("show t --tokens 4..6", 1, "cannot read tokens 4..6: the file has 5"),
        ("show t --tokens 4..4", 2, "as in 100..110"),
        ("show t", 2, "--doc <N>"),
        ("show t --doc 0 --tokens 0..1", 2, "cannot be used with"),
    ] {
        let text = refusal(dir.path(), b"", line, code);
        assert!(text.contains(part), "{line}: {text}");
    }
}

#[test]
fn show_refuses_another_tokenizer() {
    let dir = prepared();
    write_tokenizer(&dir.path().join("other"), &[" word"]);
    let err = refusal(dir.path(), b"", "show p --doc 0 --tokenizer other", 1);
    assert!(err.contains("prepared with another tokenizer than other/tokenizer.json"), "{err}");
}

#[cfg(unix)]
#[test]
fn a_reader_that_goes_away_is_no_error() {
    let dir = prepared();
    for line in ["show p --doc 3", "show p --doc 3 --json", "info p", "info p --json", "verify p"] {
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
    assert!(text.starts_with("p: no fault in 50 documents and "), "{text}");
    let size = &parsed(dir.path(), "info p --json")["recorded"]["vocabulary_size"];
    assert!(text.ends_with(&format!("; all ids are below {size}\n")), "{text}");
    let found = parsed(dir.path(), "verify p --json");
    assert_eq!((&found["is_sound"], &found["problems"]), (&true.into(), &json!([])));
    assert_eq!((&found["documents"], &found["vocabulary_size"]), (&50.into(), size));
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
    let err = refusal(dir.path(), b"", "verify none", 1);
    assert!(err.starts_with("error: none.bin: cannot read: "), "{err}");
}
