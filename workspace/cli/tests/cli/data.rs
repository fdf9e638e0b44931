//! `moh-data` as a process: its output, its files and its exit codes.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use tempfile::TempDir;

use moh_testkit::small_tokenizer::{WORDS, write_tokenizer};

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

/// Documents of many words, as JSON lines.
fn documents(count: usize) -> String {
    let starts = ["ka", "lo", "mi", "ne", "pu", "ra", "si", "to", "ve", "zu"];
    let ends = ["bel", "dar", "fin", "gos", "hul", "jim", "kan", "lut", "mok", "nep"];
    let word = |n: usize| format!("{}{} ", starts[n % 10], ends[n / 10 % 10]);
    let text = |document: usize| (0..20 + document).map(move |n| word(n * document + n * n));
    let line = |document| format!("{{\"text\": \"{}\"}}\n", text(document).collect::<String>());
    (0..count).map(line).collect()
}

/// A directory with 50 documents, a tokenizer and a token file.
fn prepared() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("s.jsonl"), documents(50)).unwrap();
    write_tokenizer(&dir.path().join("tok"), &WORDS);
    let run = |line: &str| moh_data(dir.path(), &line.split(' ').collect::<Vec<_>>()).success();
    run("prepare --tokenizer tok --out p s.jsonl");
    dir
}

#[test]
fn documents_become_a_token_file() {
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
    assert!(text.contains("\nvocabulary 276\neos token  <|end_of_text|>\n"), "{text}");
    assert!(text.ends_with("source     s.jsonl\n"), "{text}");
    assert_eq!(stderr(&done), "");
    fs::remove_file(dir.path().join("p.json")).unwrap();
    let text = stdout(&moh_data(dir.path(), &["info", "p"]).success());
    assert!(text.ends_with("tokenizer  not recorded\n"), "{text}");
}

#[test]
fn outputs_are_kept_unless_forced() {
    let dir = prepared();
    let prepare = ["prepare", "--tokenizer", "tok", "--out", "p", "s.jsonl"];
    let text = stderr(&moh_data(dir.path(), &prepare).code(1));
    assert!(text.starts_with("error: ") && text.contains("already exists"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    moh_data(dir.path(), &[&prepare[..], &["--force"]].concat()).success();
}

#[test]
fn special_tokens_in_texts_are_a_warning() {
    let dir = prepared();
    fs::write(dir.path().join("a.txt"), "one <|end_of_text|> two <|end_of_text|>").unwrap();
    let run = |line: &str| moh_data(dir.path(), &line.split(' ').collect::<Vec<_>>()).success();
    let text = stderr(&run("prepare --tokenizer tok --out a a.txt"));
    let expected = "warning: a: special tokens in the text became those tokens (<|end_of_text|> 2): \
                    --split-special-tokens encodes them as text\n";
    assert_eq!(text, expected);
    assert!(stdout(&run("info a")).contains("\nin texts   <|end_of_text|> 2\n"));
    let done = run("prepare --tokenizer tok --split-special-tokens --force --out a a.txt");
    assert_eq!(stderr(&done), "");
    assert!(stdout(&run("info a")).contains("\nin texts   special tokens are text\n"));
}

#[test]
fn directories_of_outputs_are_made_and_errors_name_the_users_path() {
    let dir = tempfile::tempdir().unwrap();
    let run = |line: &str| moh_data(dir.path(), &line.split(' ').collect::<Vec<_>>());
    fs::write(dir.path().join("s.jsonl"), documents(20)).unwrap();
    write_tokenizer(&dir.path().join("tok"), &WORDS);
    run("prepare --tokenizer tok --out tokens/new/p s.jsonl").success();
    assert!(dir.path().join("tokens/new/p.json").is_file());
    fs::write(dir.path().join("file"), "").unwrap();
    let prepare = "prepare --tokenizer tok --out file/p s.jsonl";
    let text = stderr(&run(prepare).code(1));
    assert!(text.starts_with("error: file/p.prepare: "), "{text}");
    assert!(!text.contains(".tmp-") && !text.contains("at path"), "{text}");
}

#[test]
fn errors_are_one_sentence_and_name_the_file() {
    let dir = prepared();
    fs::write(dir.path().join("bad.jsonl"), "{\"body\": \"a\"}\n").unwrap();
    let prepare = ["prepare", "--tokenizer", "tok", "--out", "q"];
    let cases: [(Vec<&str>, &str); 4] = [
        ([&prepare[..], &["bad.jsonl"]].concat(), "error: bad.jsonl:1: no field \"text\""),
        ([&prepare[..], &["none.txt"]].concat(), "error: none.txt: No such file"),
        (vec!["info", "none"], "error: none.bin: cannot read: No such file"),
        (vec!["info", "p.idxx"], "error: p.idxx.bin: cannot read"),
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
    let cases: [&[&str]; 4] =
        [&[], &["prepare"], &["prepare", "--tokenizer", "tok", "--out", "a"], &["unknown"]];
    for case in cases {
        moh_data(dir.path(), case).code(2);
    }
    moh_data(dir.path(), &["--version"]).success();
}

#[test]
fn every_option_takes_a_negative_number_and_says_what_it_expects() {
    let dir = prepared();
    assert!(moh_testkit::options::take_negative_numbers(PROGRAM, &[], dir.path()) >= 18);
    for (arguments, expected) in [
        (&["prepare", "--split", "-0.1,1.1"][..], "expected two shares above 0 that sum to 1"),
        (&["prepare", "--min-tokens", "-1"], "a whole number of at least 1"),
        (&["prepare", "--sample", "-1"], "a share of the documents above 0"),
        (&["prepare", "--memory", "1MB"], "at least 64 MB, as in 500MB or 2GB"),
        (&["prepare", "--skip-bad-lines", "--max-bad", "1"], "as in 0.1%"),
    ] {
        let text = stderr(&moh_data(dir.path(), arguments).code(2));
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
}

#[test]
fn examples_in_the_help_work_when_pasted() {
    for help in [
        &["--help"][..],
        &["prepare", "--help"],
        &["info", "--help"],
        &["show", "--help"],
        &["verify", "--help"],
        &["accept", "--help"],
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("text.jsonl"), documents(50)).unwrap();
        write_tokenizer(&dir.path().join("model"), &WORDS);
        let text = stdout(&moh_data(dir.path(), help).success());
        let lines = text.lines().filter_map(|line| line.trim().strip_prefix("moh-data "));
        let examples: Vec<_> = lines.collect();
        assert!(!examples.is_empty(), "{text}");
        for example in examples {
            moh_data(dir.path(), &example.split(' ').collect::<Vec<_>>()).success();
        }
    }
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

/// The names in a directory, in order.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// `moh-data prepare --tokenizer tok ...` with these bytes as standard input.
fn prepare_from(dir: &Path, input: &[u8], arguments: &str) -> assert_cmd::assert::Assert {
    let mut command = Command::new(PROGRAM);
    let arguments = arguments.split(' ').filter(|argument| !argument.is_empty());
    command.current_dir(dir).args(["prepare", "--tokenizer", "tok"]).args(arguments);
    command.write_stdin(input).assert()
}

#[test]
fn the_summary_names_the_token_that_ends_documents() {
    let dir = prepared();
    let run = |arguments: &str| prepare_from(dir.path(), b"", arguments);
    let text = stdout(&run("--out a s.jsonl").success());
    assert!(text.starts_with("a: 50 documents, "), "{text}");
    assert!(text.ends_with(" bytes of text; each document ends with <|end_of_text|>\n"), "{text}");
    let text = stdout(&run("--eos-token <|begin_of_text|> --out b s.jsonl").success());
    assert!(text.ends_with("; each document ends with <|begin_of_text|>\n"), "{text}");
    let text = stdout(&run("--no-append-eos --out c s.jsonl").success());
    assert!(text.ends_with("; documents end without an end-of-text token\n"), "{text}");
    let eos = |name: &str| {
        let text = fs::read_to_string(dir.path().join(name)).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["eos_token"].clone()
    };
    assert_eq!(
        (eos("a.json"), eos("b.json")),
        ("<|end_of_text|>".into(), "<|begin_of_text|>".into())
    );
    assert_eq!(eos("c.json"), serde_json::Value::Null);
    let text = stdout(&moh_data(dir.path(), &["info", "c"]).success());
    assert!(text.contains("\neos token  none\n"), "{text}");
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        fs::remove_file(dir.path().join("tok").join(name)).unwrap();
    }
    let text = stderr(&run("--out d s.jsonl").code(1));
    assert!(text.starts_with("error: tok/tokenizer.json: no end-of-text token: "), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    run("--eos-token x --no-append-eos --out d s.jsonl").code(2);
    assert!(!dir.path().join("d.bin").exists());
}

#[test]
fn standard_input_and_pipes_are_read_once() {
    let dir = prepared();
    let lines = fs::read(dir.path().join("s.jsonl")).unwrap();
    let expected = fs::read(dir.path().join("p.bin")).unwrap();
    // The second name is a pipe that is not called `-`.
    for (out, input) in [("a", "-"), ("b", "/dev/stdin")] {
        if cfg!(not(unix)) && input != "-" {
            continue;
        }
        let arguments = format!("--format jsonl --out {out} {input}");
        let done = prepare_from(dir.path(), &lines, &arguments).success();
        assert!(stdout(&done).starts_with(&format!("{out}: 50 documents, ")));
        assert_eq!(fs::read(dir.path().join(format!("{out}.bin"))).unwrap(), expected);
    }
    let done = prepare_from(dir.path(), b"one text\nin two lines", "--format text --out c -");
    assert!(stdout(&done.success()).starts_with("c: 1 document, "));
    let text = stderr(&prepare_from(dir.path(), &lines, "--out d -").code(1));
    assert!(text.contains("add --format jsonl or --format text"), "{text}");
    let text = stderr(&prepare_from(dir.path(), &lines, "--format jsonl --out d - -").code(1));
    assert!(text.contains("name it once"), "{text}");
    let text = stderr(&prepare_from(dir.path(), &lines[..90], "--format jsonl --out d -").code(1));
    assert!(text.starts_with("error: -:1: broken JSON at column"), "{text}");
    assert!(names(dir.path()).iter().all(|name| !name.starts_with(['d', '.'])));
}

#[test]
fn a_split_writes_two_token_files() {
    let dir = prepared();
    let done = prepare_from(dir.path(), b"", "--split 0.98,0.02 --out q s.jsonl").success();
    let text = stdout(&done);
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("q-train: 49 documents, "), "{text}");
    assert!(lines[1].starts_with("q-validation: 1 document, "), "{text}");
    assert_eq!(lines.len(), 2);
    moh_data(dir.path(), &["info", "q-train"]).success();
    let text = stderr(&prepare_from(dir.path(), b"", "--split 0.9,0.2 --out r s.jsonl").code(2));
    assert!(text.contains("that sum to 1"), "{text}");
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
    let text = stderr(&run("org/name", "b").code(1));
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
    let json = fs::read_to_string(dir.path().join("tok/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
    json["post_processor"] = serde_json::Value::Null;
    fs::write(dir.path().join("tok/tokenizer.json"), json.to_string()).unwrap();
    let done = prepare_from(dir.path(), b"a", "--format text --no-append-eos --out one -");
    let text = stdout(&done.success());
    assert!(text.starts_with("one: 1 document, 1 token, 1 byte of text; "), "{text}");
    let text = stdout(&moh_data(dir.path(), &["info", "one"]).success());
    assert!(
        text.contains("longest    1 token\n") && text.contains("text       1 byte\n"),
        "{text}"
    );
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
        let patience = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let opened = dir.join(format!("{out}.prepare/{out}.idx"));
        while !opened.exists() {
            assert!(std::time::Instant::now() < patience, "{:?}", names(dir));
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        run
    }

    /// Sends a signal and waits for the end.
    fn signal(&mut self, signal: &str) -> std::process::ExitStatus {
        // `wait` would close it, and a closed input ends the run by itself.
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
    prepare_from(dir.path(), b"", "--out q s.jsonl").success();
    let bin = |name: &str| fs::read(dir.path().join(name)).unwrap();
    assert_eq!(bin("q.bin"), bin("p.bin"));
    assert!(!dir.path().join("q.prepare").exists());
    let text = stderr(&prepare_from(dir.path(), b"", "--out other s.jsonl").code(1));
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
    prepare_from(dir.path(), b"", &format!("{arguments}{inputs}")).success();
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
            // It had ended, but for its process.
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
