//! Documents of inputs of every format of text.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moh_testkit::assert_refused;
use proptest::prelude::*;

use super::*;
use crate::prepare::decode::tests::{gzip, xz, zstd};
use crate::prepare::reader::Place;

/// Returns options with chunks that contain the tests' documents whole.
pub(super) fn options() -> ReadOptions {
    ReadOptions {
        max_record_bytes: 1 << 20,
        ..ReadOptions::new(Arc::new(Fields::parse("text").unwrap()), 1 << 23)
    }
}

/// A document's text, or why a record is not a document.
type Read = Result<String, BadRecord>;

/// Reads an input from a position of a part on, and returns its documents and the chunks' ends.
pub(super) fn read_from(
    input: &OpenInput,
    part: usize,
    from: Position,
) -> Result<Vec<(Vec<Read>, Position)>> {
    let mut reader = input.read(part, from)?;
    let mut found = Vec::new();
    let mut end = from;
    while let Some(chunk) = reader.next_chunk()? {
        assert_eq!(chunk.start, end);
        end = chunk.end;
        let texts = chunk.documents().map(|document| Ok(document?.text.into_owned()));
        found.push((texts.collect(), end));
    }
    Ok(found)
}

/// Returns the documents of a file, which are the same from every chunk's end on.
pub(super) fn documents(
    path: &Path,
    format: Option<Format>,
    options: ReadOptions,
) -> Result<Vec<Read>> {
    let input = open(path, format, Arc::new(options))?;
    let mut all = Vec::new();
    for part in 0..input.parts() {
        let chunks = read_from(&input, part, Position::default())?;
        for (index, &(_, end)) in chunks.iter().enumerate() {
            let joined = |chunks: &[(Vec<Read>, Position)]| -> Vec<Read> {
                chunks.iter().flat_map(|(documents, _)| documents.clone()).collect()
            };
            let rest = read_from(&input, part, end)?;
            assert_eq!(joined(&rest), joined(&chunks[index + 1..]));
        }
        all.extend(chunks.into_iter().flat_map(|(documents, _)| documents));
    }
    input.check_unchanged()?;
    Ok(all)
}

pub(super) fn written(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

/// Returns the texts of a file, or the first error.
fn texts(name: &str, bytes: &[u8]) -> Result<Vec<String>> {
    let (_dir, path) = written(name, bytes);
    let found = documents(&path, None, options())?;
    found.into_iter().collect::<Result<_, _>>().map_err(|bad| bad.error(&path))
}

#[test]
fn each_line_is_a_document() {
    let found = texts("a.jsonl", b"{\"text\": \"one\"}\n\n{\"id\": 1, \"text\": \"t\\nwo\"}");
    assert_eq!(found.unwrap(), ["one", "t\nwo"]);
    assert_eq!(texts("a.json", b"\xef\xbb\xbf{\"text\": \"\"}\r\n").unwrap(), [""]);
    assert_eq!(texts("a.json", b" \r\n {\"text\": \"nul\\u0000\"} \r\n").unwrap(), ["nul\0"]);
    assert!(texts("a.jsonl", b"").unwrap().is_empty());
    assert!(texts("a.jsonl", b"\n \n").unwrap().is_empty());
}

#[test]
fn a_text_file_is_one_document() {
    assert_eq!(texts("a.txt", b"one\ntwo\n").unwrap(), ["one\ntwo\n"]);
    assert_eq!(texts("README", "\u{e4}".as_bytes()).unwrap(), ["\u{e4}"]);
    assert_eq!(texts("a.txt", b"").unwrap(), [""]);
    assert_eq!(texts("a.txt", b"\xef\xbb\xbfone\0").unwrap(), ["one\0"]);
}

#[test]
fn what_is_neither_text_nor_a_table_is_refused_by_its_kind() {
    let cases: Vec<[String; 3]> = serde_json::from_str(include_str!("kinds.json")).unwrap();
    for [name, text, expected] in cases {
        let error = texts(&name, text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(&format!("{name}: {expected}")), "{error}");
    }
    let (_dir, path) = written("a.csv", b"a,b\n");
    assert_eq!(documents(&path, Some(Format::Text), options()).unwrap(), [Ok("a,b\n".to_owned())]);
    for (name, text) in [("a.py", "x = 1\n"), ("a.md", "<html>"), ("notes", "a b")] {
        assert_eq!(texts(name, text.as_bytes()).unwrap(), [text]);
    }
}

#[test]
fn blank_lines_separate_paragraphs() {
    let found = |text: &str| {
        let (_dir, path) = written("a.txt", text.as_bytes());
        [1, 5, 1 << 16].map(|chunk_bytes| {
            let options = ReadOptions { chunk_bytes, ..options() };
            let found = documents(&path, Some(Format::Paragraphs), options).unwrap();
            found.into_iter().map(Result::unwrap).collect::<Vec<_>>()
        })
    };
    let same =
        |texts: &[&str]| [0; 3].map(|_| texts.iter().map(|&t| t.to_owned()).collect::<Vec<_>>());
    let text = "  one\ntwo\n\n \t\nthree\r\n\r\nfour";
    assert_eq!(found(text), same(&["  one\ntwo", "three", "four"]));
    assert_eq!(found("\u{feff}\n\nfirst\n"), same(&["first"]));
    assert_eq!(found(""), same(&[]));
    assert_eq!(found(" \n\n"), same(&[]));
}

#[test]
fn faults_name_the_line() {
    let cases: [(&[u8], u64, &str); 8] = [
        (b"{\"text\": \"a\"}\n{\"text\": \"b\n", 2, "broken JSON at column"),
        (b"\n{\"content\": \"a\"}", 2, "no field \"text\", the line has \"content\""),
        (b"{}", 1, "the line has nothing"),
        (b"{\"text\": 1}", 1, "is not a string"),
        (b"{} [1]", 1, "broken JSON at column 4: trailing characters"),
        (b"{\"text\": \"a\"}\n[1]", 2, "expected one JSON object per line"),
        (b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}", 2, "not UTF-8 at byte 10"),
        (b"{\"text\": \"a\\ud83d\"}", 1, "the field \"text\" is broken: "),
    ];
    for (bytes, expected, part) in cases {
        let error = texts("a.jsonl", bytes).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert!(error.contains(&format!("a.jsonl:{expected}: ")), "{error}");
    }
}

#[test]
fn a_bad_byte_in_a_text_is_located() {
    for bytes in [&b"good \xc3"[..], b"good \xff and more", b"\xef\xbb\xbfgo\xff\n"] {
        let error = texts("a.txt", bytes).unwrap_err().to_string();
        assert!(error.ends_with("a.txt: not UTF-8 at byte 5"), "{error}");
    }
}

#[test]
fn a_long_record_is_skipped_without_being_held() {
    let short = "{\"text\": \"short\"}\n";
    let long = format!("{{\"text\": \"{}\"}}\n", "x".repeat(100));
    for bytes in [1, 7, 64, 1000] {
        let options = || ReadOptions { chunk_bytes: bytes, max_record_bytes: 50, ..options() };
        let (_dir, path) = written("a.jsonl", format!("{short}{long}{short}{long}").as_bytes());
        let found = documents(&path, None, options()).unwrap();
        let bad = |place| {
            let reason = "has more than 0.00005 MB, the most of a document: split it".to_owned();
            Err(BadRecord { place, reason })
        };
        let named = |noun: &str, place| {
            bad(place)
                .map_err(|bad| BadRecord { reason: format!("the {noun} {}", bad.reason), ..bad })
        };
        let good = || Ok("short".to_owned());
        let line = |line| named("line", Place::Line(line));
        assert_eq!(found, [good(), line(2), good(), line(4)]);

        let array = format!("[{}]", [short, &long, short, &long].join(","));
        let (_dir, path) = written("a.json", array.as_bytes());
        let found = documents(&path, None, options()).unwrap();
        let element = |row| named("element", Place::Row(row));
        assert_eq!(found, [good(), element(2), good(), element(4)]);

        let text = format!("short\n\n{0}\n{0}\n\nshort\n\n{0}", "x y".repeat(30));
        let (_dir, path) = written("a.txt", text.as_bytes());
        let found = documents(&path, Some(Format::Paragraphs), options()).unwrap();
        let row = |row| named("paragraph", Place::Row(row));
        assert_eq!(found, [good(), row(2), good(), row(4)]);
    }
}

#[test]
fn a_document_may_have_as_many_bytes_as_the_limit_and_no_more() {
    let options = || ReadOptions { max_record_bytes: 50, ..options() };
    let reason =
        |noun| format!("the {noun} has more than 0.00005 MB, the most of a document: split it");
    for (length, is_read) in [(50, true), (51, false)] {
        let (_dir, path) = written("a.txt", "x".repeat(length).as_bytes());
        let found = documents(&path, None, options()).unwrap();
        match &found[..] {
            [Ok(text)] => assert!(is_read && text.len() == length),
            [Err(bad)] => {
                assert!(!is_read && bad.reason.starts_with(&reason("text")), "{bad:?}");
                assert!(bad.reason.ends_with("with --format paragraphs"), "{bad:?}");
            }
            _ => panic!("{found:?}"),
        }
    }
    // The text of a short line.
    let (_dir, path) = written("a.jsonl", b"{\"text\": \"0123456789\"}\n{\"text\": \"\"}");
    let fields = Arc::new(Fields::parse("{text}{text}{text}{text}{text}{text}").unwrap());
    let found = documents(&path, None, ReadOptions { fields, ..options() }).unwrap();
    let bad = BadRecord { place: Place::Line(1), reason: reason("text") };
    assert_eq!(found, [Err(bad), Ok(String::new())]);
}

#[test]
fn a_line_that_unpacks_to_more_than_the_limit_is_skipped_in_every_encoding() {
    let line = vec![b'a'; 50_000_000];
    for bytes in [gzip(&line), zstd(&line), xz(&line)] {
        assert!(bytes.len() < line.len() / 100);
        let (_dir, path) = written("a.jsonl", &bytes);
        let found = documents(&path, None, options()).unwrap();
        assert!(
            matches!(&found[..], [Err(bad)] if bad.reason.ends_with("of a document: split it")),
            "{found:?}"
        );
    }
}

#[test]
fn the_elements_of_an_array_are_documents() {
    let array =
        b"\xef\xbb\xbf [\n {\"text\": \"a]},[\\\"\\\\\"} ,{\"x\":[[1],{}],\"text\":\"b\"}\n]\n";
    for name in ["a.json", "a.jsonl", "a"] {
        assert_eq!(texts(name, array).unwrap(), ["a]},[\"\\", "b"], "{name}");
    }
    assert_eq!(texts("a.txt", array).unwrap().len(), 1);
    assert!(texts("a.json", b"[ ]").unwrap().is_empty());
    let cases: [(&[u8], &str); 10] = [
        (b"[1]", "a.json: row 1: expected one JSON object per element"),
        (b"[{\"text\": \"\"}, {\"a\": 1}]", "row 2: no field \"text\", the element has \"a\""),
        (b"[{\"text\": \"\"},]", "row 2: broken JSON at column 0: EOF"),
        (b"[{\"text\": \"\xff\"}]", "row 1: not UTF-8 at byte 10 of the element"),
        (b"[{\"text\": \"\"},", "(its end is missing, after 1 elements and 13 bytes of text)"),
        (b"[{\"text\": \"", "(its end is missing, after 0 elements"),
        (b"[", "(its end is missing"),
        (b"[] x", "(something after its end"),
        (b"[{\"text\": \"\"}] []", "(something after its end, after 1 elements"),
        (b"[}]", "(a brace that is not open"),
    ];
    for (bytes, part) in cases {
        assert_refused(texts("a.json", bytes), part);
    }
}

#[test]
fn the_format_is_that_of_the_content_then_of_the_name() {
    let format = |name: &str, content: &str, given| {
        let (_dir, path) = written(name, content.as_bytes());
        open(&path, given, Arc::new(options())).unwrap().format
    };
    let cases = [
        ("a.JSON", "", Format::JsonLines),
        ("a.json.gz", "", Format::JsonLines),
        ("a.json", " \n[", Format::JsonArray),
        ("a.txt", "{\"text\": 1}", Format::Text),
        ("a.txt.zst", "[{\"text\": 1}]", Format::Text),
        ("README", "", Format::Text),
        ("README", "[link]", Format::Text),
        ("part-0000", "\u{feff}{ \"text\": 1}", Format::JsonLines),
        ("part-0000", "[\n{\"text\": 1}]", Format::JsonArray),
        ("main.c", "{ int a; }", Format::Text),
    ];
    for (name, content, expected) in cases {
        assert_eq!(format(name, content, None), expected, "{name} {content}");
    }
    assert_eq!(format("a.json", "[{}]", Some(Format::JsonLines)), Format::JsonLines);
    assert_eq!(format("a.json", "[{}]", Some(Format::Text)), Format::Text);
}

#[test]
fn standard_input_needs_a_format() {
    let format = |given| format::format_of(Path::new("-"), b"{\"text\"", given);
    let refusal = "-: the format of standard input is unknown: add --format jsonl or --format text";
    assert_refused(format(None), refusal);
    assert_eq!(format(Some(Format::Text)).unwrap(), Format::Text);
}

#[cfg(unix)]
#[test]
fn a_pipe_is_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    std::thread::scope(|scope| {
        scope.spawn(|| std::fs::write(&path, "{\"text\": \"one\"}\n".repeat(2000)).unwrap());
        let input = open(&path, None, Arc::new(options())).unwrap();
        assert_eq!((input.format, &input.identity), (Format::JsonLines, &None));
        input.check_unchanged().unwrap();
        let chunks = read_from(&input, 0, Position::default()).unwrap();
        assert_eq!(chunks.iter().map(|(documents, _)| documents.len()).sum::<usize>(), 2000);
        assert_refused(input.read(0, Position::default()), "can be read once");
    });
}

#[test]
fn a_changed_file_is_an_error() {
    let (_dir, path) = written("a.txt", b"text");
    let input = open(&path, None, Arc::new(options())).unwrap();
    assert_eq!(input.identity.as_ref().unwrap().bytes, 4);
    input.check_unchanged().unwrap();
    std::fs::write(&path, b"texts").unwrap();
    assert_refused(input.check_unchanged(), "changed while it was read");
    assert_refused(input.read(0, Position { offset: 9, record: 0 }), "ends after 5 bytes");
}

proptest! {
    #[test]
    fn texts_come_back_from_json_lines_in_chunks_of_any_size(
        texts in prop::collection::vec(any::<String>(), 0..8),
        chunk_bytes in 1usize..200,
    ) {
        let lines: String = texts
            .iter()
            .map(|text| format!("{}\n", serde_json::json!({"id": 1, "text": text, "n": [text]})))
            .collect();
        let (_dir, path) = written("a.jsonl", lines.as_bytes());
        let options = ReadOptions { chunk_bytes, ..options() };
        let found = documents(&path, None, options.clone()).unwrap();
        let array = format!("[{}]", lines.trim_end().replace('\n', ",\n"));
        std::fs::write(&path, array).unwrap();
        prop_assert_eq!(&documents(&path, None, options).unwrap(), &found);
        prop_assert_eq!(found, texts.into_iter().map(Ok).collect::<Vec<_>>());
    }

    #[test]
    fn a_text_comes_back_in_steps_of_any_size(text: String, chunk_bytes in 1usize..40) {
        let (_dir, path) = written("a.txt", text.as_bytes());
        let options = ReadOptions { chunk_bytes, ..options() };
        let found = documents(&path, None, options.clone()).unwrap();
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        prop_assert_eq!(&found, &[Ok(text.to_owned())]);
        let trimmed: Vec<_> = found.into_iter().map(Result::unwrap).collect();
        let paragraphs = documents(&path, Some(Format::Paragraphs), options).unwrap();
        let joined: String = paragraphs.into_iter().map(Result::unwrap).collect();
        let words = |text: &str| text.split_whitespace().collect::<String>();
        prop_assert_eq!(words(&joined), words(&trimmed[0]));
    }
}
