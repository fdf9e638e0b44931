//! Unusable inputs and disks: the errors of `moh-data prepare`, and the files that it leaves.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use moh_text::prepare::{Observer, Prepare, Progress, prepare};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;

use moh_testkit::programs::{names, stderr};
use moh_testkit::small_tokenizer::WORDS;
use moh_testkit::texts::small_tokenizer;

fn table(texts: &[String]) -> RecordBatch {
    let texts = StringArray::from_iter_values(texts);
    RecordBatch::try_from_iter([("text", Arc::new(texts) as ArrayRef)]).unwrap()
}

fn parquet(texts: &[String]) -> Vec<u8> {
    let table = table(texts);
    let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
    let mut writer = ArrowWriter::try_new(Vec::new(), table.schema(), Some(properties)).unwrap();
    writer.write(&table).unwrap();
    writer.into_inner().unwrap()
}

fn arrow(texts: &[String]) -> Vec<u8> {
    let table = table(texts);
    let mut writer = arrow_ipc::writer::FileWriter::try_new(Vec::new(), &table.schema()).unwrap();
    writer.write(&table).unwrap();
    writer.into_inner().unwrap()
}

fn lines(texts: &[String]) -> String {
    texts.iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect()
}

/// Runs `moh-data prepare --tokenizer tok --out out ...`, after the shell text `before`.
fn run(dir: &Path, before: &str, arguments: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_moh-data");
    let line = format!("{before}exec {program} prepare --tokenizer tok --out out {arguments}");
    Command::new("sh").args(["-c", &line]).current_dir(dir).output().unwrap()
}

/// Returns the names of token files in a directory.
fn outputs(dir: &Path) -> Vec<String> {
    names(dir).into_iter().filter(|name| name.starts_with("out")).collect()
}

#[cfg(unix)]
#[test]
fn a_damaged_table_is_one_sentence_even_where_its_reader_panics() {
    let dir = tempfile::tempdir().unwrap();
    small_tokenizer(dir.path(), &WORDS);
    let texts: Vec<String> = (0..100).map(|row| format!("one two three {row}")).collect();
    let reads = |name: &str, bytes: &[u8]| {
        fs::write(dir.path().join(name), bytes).unwrap();
        let done = run(dir.path(), "", &format!("--force --no-append-eos {name}"));
        let text = stderr(&done);
        if !done.status.success() {
            assert_eq!(text.lines().count(), 1, "{text}");
            assert!(text.starts_with(&format!("error: {name}: ")), "{text}");
        }
        text
    };
    for (name, bytes) in [("a.parquet", parquet(&texts)), ("a.arrow", arrow(&texts))] {
        for at in (8..bytes.len()).step_by(bytes.len() / 30) {
            let mut damaged = bytes.clone();
            damaged[at..(at + 4).min(bytes.len())].fill(0xfe);
            reads(name, &damaged);
        }
    }
    // The lowest bit of a number in the footer is its sign: the crate asserts that an offset is not negative.
    let bytes = parquet(&texts);
    let (rest, length) = bytes[..bytes.len() - 4].split_last_chunk().unwrap();
    let footer = rest.len() - u32::from_le_bytes(*length) as usize;
    let panics = |at: usize| {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        reads("a.parquet", &damaged).contains("(a length or an offset is wrong)")
    };
    assert!((footer..rest.len()).any(panics), "no damage made a reader panic: choose another");
}

#[cfg(unix)]
#[test]
fn a_full_disk_leaves_no_final_name_and_the_command_goes_on_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    small_tokenizer(dir.path(), &WORDS);
    let texts: Vec<String> = (0..60_000).map(|line| format!("one two three {line}")).collect();
    fs::write(dir.path().join("a.jsonl"), lines(&texts)).unwrap();
    let arguments = "--no-append-eos --sync-every 0 --memory 64MB a.jsonl";
    assert!(run(dir.path(), "", arguments).status.success());
    let whole = ["out.bin", "out.idx"].map(|name| fs::read(dir.path().join(name)).unwrap());
    for name in ["out.bin", "out.idx", "out.json"] {
        fs::remove_file(dir.path().join(name)).unwrap();
    }
    // Files hold at most half of the tokens; the signal of a larger file becomes an error.
    let limit = format!("trap '' XFSZ; ulimit -f {}; ", whole[0].len() / 2 / 512);
    let done = run(dir.path(), &limit, arguments);
    let text = stderr(&done);
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(text.starts_with("error: out.") && text.contains("File too large"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(outputs(dir.path()).iter().all(|name| name == "out.prepare"), "{text}");
    let done = run(dir.path(), "", arguments);
    assert!(done.status.success(), "{}", stderr(&done));
    let again = ["out.bin", "out.idx"].map(|name| fs::read(dir.path().join(name)).unwrap());
    assert!(again == whole);
    assert_eq!(outputs(dir.path()), ["out.bin", "out.idx", "out.json"]);
}

/// Changes a file when the first documents are written.
struct Change<F>(Option<F>);

impl<F: FnOnce() + Send> Observer for Change<F> {
    fn note(&mut self, _: &str) {}

    fn progress(&mut self, _: Progress) {
        if let Some(change) = self.0.take() {
            change();
        }
    }
}

#[test]
fn an_input_that_changes_while_it_is_read_is_named_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = small_tokenizer(dir.path(), &WORDS);
    // More text than is read before the first documents are written, with little memory.
    let texts: Vec<String> =
        (0..500).map(|row| format!("{row} ") + &"one two ".repeat(1000)).collect();
    let array = format!("[{}]", lines(&texts).trim_end().replace('\n', ",\n"));
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    gzip.write_all(lines(&texts).as_bytes()).unwrap();
    let files: [(&str, Vec<u8>); 6] = [
        ("a.jsonl", lines(&texts).into()),
        ("a.jsonl.gz", gzip.finish().unwrap()),
        ("a.json", array.into()),
        ("a.txt", texts.concat().into()),
        ("a.parquet", parquet(&texts)),
        ("a.arrow", arrow(&texts)),
    ];
    for (name, bytes) in files {
        let path = dir.path().join(name);
        let grow =
            || fs::File::options().append(true).open(&path).unwrap().write_all(b" ").unwrap();
        let shrink = || {
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_len(bytes.len() as u64 / 2).unwrap();
        };
        let replace = || {
            let other = dir.path().join("other");
            fs::write(&other, &bytes[..bytes.len() - 1]).unwrap();
            fs::rename(&other, &path).unwrap();
        };
        let changes: [&(dyn Fn() + Sync); 3] = [&grow, &shrink, &replace];
        for change in changes {
            fs::write(&path, &bytes).unwrap();
            let (inputs, prefix) = ([path.clone()], dir.path().join("out"));
            let mut options = Prepare::new(&tokenizer, &inputs, &prefix);
            options.append_eos = moh_text::prepare::AppendEos::Never;
            options.memory = 10_000_000;
            options.sync_every = Duration::from_secs(3600);
            let done = prepare(options, &AtomicBool::new(false), &mut Change(Some(change)));
            moh_testkit::assert_refused(done, &format!("{name}: was changed while it was read"));
            assert_eq!(outputs(dir.path()), [] as [&str; 0]);
        }
    }
}
