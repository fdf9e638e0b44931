//! Inputs from a hub on the loopback interface, with `moh-data` as a process.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::PATIENCE;
use moh_testkit::hub_server::{Behaviour, COMMIT, ID, Server};
use moh_testkit::launcher::wait_until;
use moh_testkit::programs::{exits, read_json, stderr, success};
use moh_testkit::small_tokenizer::{WORDS, write_tokenizer};

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-data");

/// Returns documents of a few words, as JSON lines.
fn lines(name: &str, count: usize) -> Vec<u8> {
    let words = ["one", "two", "three", "four", "five", "six", "seven"];
    let word = |n: usize| words[n % words.len()];
    let line = |n: usize| format!("{{\"text\": \"{name} {} {} {n}\"}}\n", word(n), word(n / 7));
    (0..count).map(line).collect::<String>().into_bytes()
}

/// A server of a dataset, and a directory with a tokenizer and a cache.
struct Place {
    server: Server,
    dir: tempfile::TempDir,
}

impl Place {
    fn new(names: &[&str]) -> Self {
        let files = names.iter().map(|name| ((*name).to_owned(), lines(name, 40))).collect();
        Self::with(files)
    }

    fn with(files: HashMap<String, Vec<u8>>) -> Self {
        let server = Server::start(Behaviour { files, is_dataset: true, ..Behaviour::default() });
        let place = Self { server, dir: tempfile::tempdir().unwrap() };
        fs::write(place.path("words.jsonl"), lines("words", 200)).unwrap();
        write_tokenizer(&place.path("tok"), &WORDS);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(PROGRAM);
        command.current_dir(self.dir.path()).args(line.split_whitespace());
        for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", &self.server.endpoint).env("HF_HOME", self.path("home"));
        command
    }

    fn fail(&self, line: &str) -> String {
        exits(&mut self.command(line), 1).1
    }

    fn run(&self, line: &str) -> String {
        success(&mut self.command(line))
    }

    fn prepare(&self, inputs: &str) -> String {
        self.run(&format!("prepare --tokenizer tok --force --out out {inputs}"))
    }

    /// Returns the error of a preparation that fails, which is a single sentence.
    fn refuse(&self, inputs: &str) -> String {
        let stderr = self.fail(&format!("prepare --tokenizer tok --out refused {inputs}"));
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(!self.path("refused.prepare").exists());
        stderr.trim_end().strip_prefix("error: ").unwrap().to_owned()
    }

    /// Returns the recorded sources of the token file `out`, without the dataset's address.
    fn sources(&self) -> Vec<String> {
        let record = read_json(&self.path("out.json"));
        let start = format!("hf://datasets/{ID}@{COMMIT}/");
        let sources = record["sources"].as_array().unwrap().iter();
        sources.map(|name| name.as_str().unwrap().replace(&start, "hub:")).collect()
    }

    /// Returns the token files of these files as local files.
    fn local(&self, names: &[&str]) -> [Vec<u8>; 2] {
        for name in names {
            let path = self.path(&format!("local/{name}"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, &self.server.behaviour.lock().unwrap().files[*name]).unwrap();
        }
        let names: Vec<_> = names.iter().map(|name| format!("local/{name}")).collect();
        self.run(&format!("prepare --tokenizer tok --force --out local/out {}", names.join(" ")));
        self.tokens("local/out")
    }

    fn tokens(&self, prefix: &str) -> [Vec<u8>; 2] {
        ["bin", "idx"].map(|ending| fs::read(self.path(&format!("{prefix}.{ending}"))).unwrap())
    }

    /// Returns the folder of the dataset in the cache.
    fn cache(&self) -> PathBuf {
        self.path("home/hub/datasets--org--tiny")
    }

    /// Returns the number of requests for data since the last call.
    fn downloads(&self) -> usize {
        let log = self.server.log();
        log.iter().filter(|line| line.contains("/resolve/") && !line.contains("README")).count()
    }
}

fn address(path: &str) -> String {
    format!("hf://datasets/{ID}/{path}")
}

#[test]
fn remote_and_local_files_mix_and_give_the_bytes_of_local_ones() {
    let names =
        ["data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl", "data/_x.jsonl", "data/y.csv"];
    let place = Place::new(&names);
    let local = place.local(&["data/a.jsonl", "data/b.jsonl"]);
    place.prepare(&address("data/*.jsonl"));
    assert_eq!(place.sources(), ["hub:data/_x.jsonl", "hub:data/a.jsonl", "hub:data/b.jsonl"]);
    place.prepare(&address("data/[ab].jsonl"));
    assert_eq!(place.tokens("out"), local);
    // Again from the cache, which Hugging Face's programs share.
    let snapshot = place.cache().join("snapshots").join(COMMIT).join("data/a.jsonl");
    assert!(fs::read_link(&snapshot).unwrap().starts_with("../../../blobs"));
    assert_eq!(place.downloads(), 3);
    place.prepare(&format!("words.jsonl {} {}", address("data/b.jsonl"), "local/data/a.jsonl"));
    assert_eq!(place.sources(), ["words.jsonl", "hub:data/b.jsonl", "local/data/a.jsonl"]);
    assert_eq!(place.downloads(), 0);
    place.prepare(&format!("{} {}", address("data/*/c.jsonl"), address("data/a.jsonl")));
    assert_eq!(place.sources(), ["hub:data/deep/c.jsonl", "hub:data/a.jsonl"]);
    let show = place.run("info out");
    assert!(show.contains(&format!("hf://datasets/{ID}@{COMMIT}/data/a.jsonl")), "{show}");
    let text = place.refuse(&format!("{0} {0}", address("data/a.jsonl")));
    assert!(text.contains("data/a.jsonl: is named twice"), "{text}");
}

#[test]
fn offline_the_cache_serves_and_says_what_it_lacks() {
    let place = Place::new(&[
        "data/train-00000-of-00002.jsonl",
        "data/train-00001-of-00002.jsonl",
        "x.jsonl",
    ]);
    let offline = |inputs: &str| {
        let line = format!("prepare --tokenizer tok --force --out out {inputs}");
        stderr(&place.command(&line).env("HF_HUB_OFFLINE", "1").output().unwrap())
    };
    let text = offline(&address("data/*"));
    assert!(text.starts_with("error: org/tiny: its revision main is not in the cache"), "{text}");
    place.prepare(&address("data/*-00000-*"));
    place.server.log();
    let text = offline(&address("data/*"));
    let expected =
        "/data/*: 1 of the 2 files data/train-* are in the cache, and HF_HUB_OFFLINE is set";
    assert!(text.contains(expected), "{text}");
    let text = offline(&address("x.jsonl"));
    let expected = "/x.jsonl: matches no file: the cache (HF_HUB_OFFLINE is set) has data/train-00000-of-00002.jsonl";
    assert!(text.contains(expected), "{text}");
    place.prepare(&address("data/*"));
    place.server.log();
    assert_eq!(offline(&address("data/*")), "");
    assert!(place.server.log().is_empty());
}

#[test]
fn downloads_are_removed_unless_they_were_there_before() {
    let place = Place::new(&["a.jsonl", "b.jsonl", "c.jsonl"]);
    place.prepare(&address("b.jsonl"));
    let cached = || {
        let blobs = fs::read_dir(place.cache().join("blobs")).unwrap();
        blobs.count()
    };
    assert_eq!(cached(), 1);
    place.prepare(&format!("--no-keep {}", address("*.jsonl")));
    assert_eq!(cached(), 1);
    assert_eq!(place.tokens("out"), place.local(&["a.jsonl", "b.jsonl", "c.jsonl"]));
    assert!(!place.path("out.prepare").exists());
}

#[test]
fn what_a_dataset_lacks_is_one_sentence_with_a_remedy() {
    let place = Place::new(&["train.jsonl", "en/a.jsonl", "de/b.jsonl"]);
    let text = place.refuse(&address("fr/*.jsonl"));
    let page = format!("{}/datasets/{ID}", place.server.endpoint);
    let expected = format!("/fr/*.jsonl: matches no file: fr has no files, see {page}");
    assert!(text.ends_with(&expected), "{text}");
    let text = place.refuse(&address("en/*.txt"));
    let expected =
        "/en/*.txt: matches no file: en has en/a.jsonl; the files of a folder are FOLDER/*";
    assert!(text.ends_with(expected), "{text}");
    for folder in ["en", ""] {
        let text = place.refuse(&address(folder));
        assert!(text.contains("the dataset has train.jsonl; the files of a folder"), "{text}");
    }
    let text = place.refuse(&address("a**.jsonl"));
    assert!(text.contains("/a**.jsonl: is no pattern: "), "{text}");
    let text = place.refuse("hf://org/tiny/x");
    assert!(text.contains("expected hf://datasets/OWNER/NAME/GLOB"), "{text}");
    let text = place.refuse("http://host/x");
    assert!(text.starts_with("http://host/x: is no address of an input"), "{text}");
}

#[test]
fn files_behind_a_token_are_fetched_with_it() {
    // The description of a gated dataset is public; its files are not.
    let place = Place::new(&["a.jsonl"]);
    place.server.set(|server| server.refuse_files = Some((401, "GatedRepo")));
    let text = place.refuse(&address("a.jsonl"));
    assert!(
        text.starts_with("org/tiny: the dataset is gated (401): accept its terms at "),
        "{text}"
    );
    place.server.set(|server| {
        server.refuse_files = None;
        server.token = Some("secret");
    });
    let text = place.refuse(&address("a.jsonl"));
    assert!(text.contains("then set HF_TOKEN to a token of your account"), "{text}");
    let line = format!("prepare --tokenizer tok --out x {}", address("a.jsonl"));
    success(place.command(&line).env("HF_TOKEN", "secret"));
}

#[test]
fn files_of_which_no_byte_arrives_leave_nothing_behind() {
    let place = Place::new(&["a.jsonl", "b.jsonl"]);
    let leaves_nothing = |expected: &str, change: &dyn Fn(&mut Behaviour)| {
        place.server.set(change);
        for options in ["", "--no-keep "] {
            let text = place.refuse(&format!("{options}{}", address("*.jsonl")));
            assert!(text.starts_with("org/tiny: ") && text.contains(expected), "{text}");
        }
    };
    leaves_nothing("is gated (401)", &|server| server.refuse_files = Some((401, "GatedRepo")));
    leaves_nothing("(404)", &|server| server.refuse_files = Some((404, "EntryNotFound")));
    leaves_nothing("the connection to", &|server| {
        server.refuse_files = None;
        server.breaks_after = Some(0);
    });
}

#[cfg(unix)]
#[test]
fn one_file_is_fetched_ahead_of_its_use() {
    let place = Place::new(&["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]);
    let expected = place.local(&["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]);
    let made = Command::new("mkfifo").arg(place.path("pipe")).status().unwrap();
    assert!(made.success());
    // The program waits for the pipe between the first file and the others.
    let files = format!("{} pipe {}", address("a.jsonl"), address("[b-d].jsonl"));
    let line = format!("prepare --tokenizer tok --format jsonl --out out {files}");
    let mut child = place.command(&line).spawn().unwrap();
    let mut asked = 0;
    wait_until(PATIENCE, "requests for two files", || {
        asked += place.downloads();
        asked >= 2
    });
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!((asked, place.downloads()), (2, 0));
    fs::write(place.path("pipe"), "").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(place.downloads(), 2);
    assert_eq!(place.tokens("out"), expected);
}

/// Returns a dataset of three files with 20000 documents each.
fn large() -> Place {
    let names = ["a.jsonl", "b.jsonl", "c.jsonl"];
    Place::with(names.iter().map(|name| ((*name).to_owned(), lines(name, 20_000))).collect())
}

/// Waits until the journal of the token file `out` has a line that contains `text`.
fn wait_for(place: &Place, text: &str) {
    let journal = || fs::read_to_string(place.path("out.prepare/journal.jsonl"));
    wait_until(PATIENCE, text, || journal().is_ok_and(|journal| journal.contains(text)));
}

#[cfg(unix)]
fn interrupt(child: &std::process::Child) {
    success(Command::new("kill").args(["-INT", &child.id().to_string()]));
}

#[cfg(unix)]
#[test]
fn an_interrupted_download_stops_at_once_and_goes_on_without_files_that_were_used() {
    for options in ["", "--no-keep "] {
        let place = large();
        let expected = place.local(&["a.jsonl", "b.jsonl", "c.jsonl"]);
        let line = format!(
            "prepare --tokenizer tok --sync-every 0 --out out {options}{}",
            address("*.jsonl")
        );
        // The second file breaks off, and later connections never answer.
        let first = place.server.behaviour.lock().unwrap().files["a.jsonl"].len();
        place.server.set(|server| server.breaks_after = Some(first + 100_000));
        let text = place.fail(&line);
        assert!(text.contains("run the same command again"), "{text}");
        place.server.set(|server| {
            server.breaks_after = None;
            server.stalls = true;
        });
        let child = place.command(&line).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(700));
        let start = Instant::now();
        interrupt(&child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(75));
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        wait_for(&place, "checkpoint");
        if !options.is_empty() {
            let left = fs::read_dir(place.path("out.prepare/downloads")).unwrap().count();
            assert!(left <= 1, "{left}");
        }
        place.server.set(|server| server.stalls = false);
        place.server.log();
        place.run(&line);
        assert_eq!(place.tokens("out"), expected);
        let is_again = |line: &String| line.contains("/resolve/") && line.contains("a.jsonl");
        assert!(!place.server.log().iter().any(is_again));
        assert!(!place.path("out.prepare").exists());
    }
}

#[cfg(unix)]
#[test]
fn lines_say_how_much_was_downloaded() {
    use std::io::{BufRead, BufReader};

    let place = large();
    place.server.set(|server| server.stalls = true);
    let line = format!("prepare --tokenizer tok --out out --no-keep {}", address("*.jsonl"));
    let mut child = place.command(&line).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert!(line.starts_with("preparing: 0 B of 2."), "{line}");
    assert!(line.contains("0 B/s, ") && line.contains("downloaded 0 B of 2."), "{line}");
    interrupt(&child);
    assert!(!child.wait().unwrap().success());
}

#[test]
fn a_dataset_that_moved_on_is_named_with_the_commit_to_go_on_with() {
    let place = large();
    let line = |revision: &str| {
        let files = format!("hf://datasets/{ID}{revision}/*.jsonl");
        format!("prepare --tokenizer tok --sync-every 0 --out out {files}")
    };
    let first = place.server.behaviour.lock().unwrap().files["a.jsonl"].len();
    place.server.set(|server| server.breaks_after = Some(first + 1000));
    place.fail(&line(""));
    let moved = "f".repeat(40);
    place.server.set(|server| {
        server.breaks_after = None;
        server.commit = Some(moved.clone());
    });
    let text = place.fail(&line(""));
    let expected = format!(
        "error: out.prepare: holds what an interrupted preparation has done, and since then the dataset {ID} was at commit \
         {COMMIT} and is now at {moved}: name {ID}@{COMMIT} to continue, or begin anew with --begin-anew\n"
    );
    assert_eq!(text, expected);
    place.server.set(|server| server.commit = None);
    place.run(&line(&format!("@{COMMIT}")));
    assert_eq!(place.tokens("out"), place.local(&["a.jsonl", "b.jsonl", "c.jsonl"]));
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_one_sentence_and_the_download_resumes() {
    let place = large();
    let line = format!("prepare --tokenizer tok --out out {}", address("a.jsonl"));
    let script = format!("ulimit -f 64; exec '{PROGRAM}' \"$@\"");
    let mut command = Command::new("sh");
    command.current_dir(place.dir.path()).args(["-c", &script, "sh"]).args(line.split_whitespace());
    command.env("HF_ENDPOINT", &place.server.endpoint).env("HF_HOME", place.path("home"));
    let (_, text) = exits(&mut command, 1);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("error: org/tiny: no space for a.jsonl, of "), "{text}");
    assert!(text.contains("free some, then the same command resumes the download"), "{text}");
    place.run(&line);
}
