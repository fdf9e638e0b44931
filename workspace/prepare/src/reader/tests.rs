//! Documents of inputs of every format of text.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::error::Place;
use crate::{Error, Result};

/// Options with chunks and pieces that hold the tests' documents whole.
pub(super) fn options() -> ReadOptions {
    ReadOptions {
        chunk_bytes: 1 << 16,
        piece_bytes: 1 << 16,
        max_piece_bytes: 1 << 20,
        max_record_bytes: 1 << 20,
        ..ReadOptions::new(
            Arc::new(Fields::parse("text").unwrap()),
            1 << 30,
            Arc::new(after_a_space),
        )
    }
}

/// A place to cut as of a tokenizer of words.
fn after_a_space(text: &str) -> Option<usize> {
    text.rfind(' ').map(|at| at + 1)
}

/// A document that is joined from its pieces, or why a record is none.
type Read = Result<String, BadRecord>;

/// Reads an input from a position of a part on, and returns its documents and the chunks' ends.
pub(super) fn read_from(
    input: &OpenInput,
    part: usize,
    from: Position,
) -> Result<Vec<(Vec<Read>, Position)>> {
    let mut reader = input.read(part, from)?;
    let mut found: Vec<(Vec<Read>, Position)> = Vec::new();
    let mut end = from;
    let mut joined: Option<String> = None;
    while let Some(chunk) = reader.next_chunk()? {
        assert_eq!(chunk.start, end);
        end = chunk.end;
        let mut documents = Vec::new();
        for document in chunk.documents() {
            match document {
                Err(bad) => documents.push(Err(bad)),
                Ok(document) => {
                    let is_start = matches!(document.part, Part::Whole | Part::First);
                    assert!(is_start == joined.is_none() || from != Position::default());
                    let is_end = matches!(document.part, Part::Whole | Part::Last);
                    assert!(is_end || document.text.ends_with(' '), "cut in a word");
                    joined.get_or_insert_default().push_str(&document.text);
                    if is_end {
                        documents.extend(joined.take().map(Ok));
                    }
                }
            }
        }
        found.push((documents, end));
    }
    assert_eq!(joined, None);
    Ok(found)
}

/// The documents of a file, which are the same from every chunk's end on.
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
            if input.format == Format::Text && end.record == 0 {
                continue;
            }
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

fn written(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

/// The texts of a file, or the first error.
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
        (b"{\"text\": \"a\\ud83d\"}", 1, "broken JSON at column 12: lone surrogate"),
    ];
    for (bytes, expected, part) in cases {
        let error = texts("a.jsonl", bytes).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
        assert!(
            matches!(error, Error::Record { place: Place::Line(line), .. } if line == expected),
            "{error}"
        );
    }
}

#[test]
fn a_bad_byte_in_a_text_is_located() {
    let error = texts("a.txt", b"good \xc3").unwrap_err().to_string();
    assert!(error.ends_with("a.txt: not UTF-8 at byte 5"), "{error}");
    // A piece was given out before: it is no record to skip.
    let (_dir, path) = written("a.txt", b"many good words, then \xff and more");
    let error = documents(&path, None, ReadOptions { piece_bytes: 8, ..options() }).unwrap_err();
    assert!(error.to_string().ends_with("a.txt: not UTF-8 at byte 22"), "{error}");
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
            let reason = "is longer than 50 bytes: raise --memory".to_owned();
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
    let (_dir, path) = written("a.txt", "x".repeat(100).as_bytes());
    let options = || ReadOptions { piece_bytes: 8, max_piece_bytes: 50, ..options() };
    let found = documents(&path, None, options()).unwrap();
    assert!(matches!(&found[..], [Err(bad)] if bad.reason.contains("raise --memory")), "{found:?}");
    // A word may be as long at the end of a document as elsewhere, and a document longer.
    for (words, is_read) in [([40, 40, 40], true), ([40, 120, 40], false), ([40, 40, 120], false)] {
        let text = words.map(|letters| "x".repeat(letters)).join(" ");
        let (_dir, path) = written("a.jsonl", format!("{{\"text\": \"{text}\"}}").as_bytes());
        let found = documents(&path, None, options()).unwrap();
        match &found[..] {
            [Ok(found)] => assert!(is_read && *found == text, "{words:?}"),
            [Err(bad)] => assert!(!is_read && bad.reason.contains("without a place to cut")),
            _ => panic!("{found:?}"),
        }
    }
}

#[test]
fn a_line_that_unpacks_to_more_than_memory_is_skipped_in_every_encoding() {
    let line = vec![b'a'; 50_000_000];
    let (mut gzip, mut xz) = (Vec::new(), Vec::new());
    flate2::read::GzEncoder::new(&line[..], flate2::Compression::fast())
        .read_to_end(&mut gzip)
        .unwrap();
    liblzma::read::XzEncoder::new(&line[..], 0).read_to_end(&mut xz).unwrap();
    let zstd = zstd::encode_all(&line[..], 1).unwrap();
    for bytes in [gzip, zstd, xz] {
        assert!(bytes.len() < line.len() / 100);
        let (_dir, path) = written("a.jsonl", &bytes);
        let found = documents(&path, None, options()).unwrap();
        assert!(
            matches!(&found[..], [Err(bad)] if bad.reason.ends_with("raise --memory")),
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
        let error = texts("a.json", bytes).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
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
    let error = format::format_of(Path::new("-"), b"{\"text\"", None).unwrap_err().to_string();
    assert!(error.contains("-: the format of standard input is unknown"), "{error}");
    assert!(error.contains("add --format jsonl or --format text"), "{error}");
    let given = format::format_of(Path::new("-"), b"{\"text\"", Some(Format::Text));
    assert_eq!(given.unwrap(), Format::Text);
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
        assert_eq!((input.format, input.identity()), (Format::JsonLines, None));
        input.check_unchanged().unwrap();
        let chunks = read_from(&input, 0, Position::default()).unwrap();
        assert_eq!(chunks.iter().map(|(documents, _)| documents.len()).sum::<usize>(), 2000);
        let error = input.read(0, Position::default()).err().unwrap().to_string();
        assert!(error.contains("can be read once"), "{error}");
    });
}

#[test]
fn a_changed_file_is_an_error() {
    let (_dir, path) = written("a.txt", b"text");
    let input = open(&path, None, Arc::new(options())).unwrap();
    assert_eq!(input.identity().unwrap().bytes, 4);
    input.check_unchanged().unwrap();
    std::fs::write(&path, b"texts").unwrap();
    let error = input.check_unchanged().unwrap_err().to_string();
    assert!(error.contains("changed while it was read"), "{error}");
    let error = input.read(0, Position { offset: 9, record: 0 }).err().unwrap().to_string();
    assert!(error.contains("ends after 5 bytes"), "{error}");
}

#[test]
fn a_long_string_comes_in_pieces_without_split_escapes() {
    let word = "\\ud83d\\ude00\\n\\u00e4 ";
    let line = format!("{{\"title\": \"T\", \"text\": \"{}\"}}", word.repeat(1000));
    let (_dir, path) = written("a.jsonl", line.as_bytes());
    let fields = Arc::new(Fields::parse("{title}: {text}!").unwrap());
    for piece_bytes in 1..60 {
        let options = Arc::new(ReadOptions { fields: fields.clone(), piece_bytes, ..options() });
        let input = open(&path, None, options).unwrap();
        let chunk = input.read(0, Position::default()).unwrap().next_chunk().unwrap().unwrap();
        let pieces: Vec<_> = chunk.documents().map(Result::unwrap).collect();
        assert!(pieces.iter().all(|piece| piece.text.len() < 2 * (piece_bytes + 20)));
        let joined: String = pieces.iter().map(|piece| &*piece.text).collect();
        assert_eq!(joined, format!("T: {}!", "\u{1f600}\n\u{e4} ".repeat(1000)));
        let parts = [pieces[0].part, pieces[1].part, pieces[pieces.len() - 1].part];
        assert_eq!(parts, [Part::First, Part::Middle, Part::Last]);
    }
    // What is wrong at its end is found before its first piece is given out.
    let (_dir, path) = written("a.jsonl", line.replace(" \"}", "\\ud83d\"}").as_bytes());
    let found = documents(&path, None, ReadOptions { piece_bytes: 9, ..options() }).unwrap();
    assert!(matches!(&found[..], [Err(bad)] if bad.reason.contains("lone surrogate")), "{found:?}");
}

proptest! {
    #[test]
    fn texts_come_back_from_json_lines_in_chunks_and_pieces_of_any_size(
        texts in prop::collection::vec(any::<String>(), 0..8),
        chunk_bytes in 1usize..200,
        piece_bytes in 1usize..200,
    ) {
        let lines: String = texts
            .iter()
            .map(|text| format!("{}\n", serde_json::json!({"id": 1, "text": text, "n": [text]})))
            .collect();
        let (_dir, path) = written("a.jsonl", lines.as_bytes());
        let options = ReadOptions { chunk_bytes, piece_bytes, ..options() };
        let found = documents(&path, None, options.clone()).unwrap();
        let array = format!("[{}]", lines.trim_end().replace('\n', ",\n"));
        std::fs::write(&path, array).unwrap();
        prop_assert_eq!(&documents(&path, None, options).unwrap(), &found);
        prop_assert_eq!(found, texts.into_iter().map(Ok).collect::<Vec<_>>());
    }

    #[test]
    fn a_text_comes_back_in_pieces_of_any_size(text: String, piece_bytes in 1usize..40) {
        let (_dir, path) = written("a.txt", text.as_bytes());
        let options = ReadOptions { piece_bytes, ..options() };
        let found = documents(&path, None, options.clone()).unwrap();
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        prop_assert_eq!(&found, &[Ok(text.to_owned())]);
        let trimmed: Vec<_> = found.into_iter().map(Result::unwrap).collect();
        let paragraphs = documents(&path, Some(Format::Paragraphs), options).unwrap();
        let joined: String = paragraphs.into_iter().map(Result::unwrap).collect();
        let words = |text: &str| text.split_whitespace().collect::<String>();
        prop_assert_eq!(words(&joined), words(&trimmed[0]));
    }

    #[test]
    fn a_text_goes_on_after_any_piece(words in prop::collection::vec("[a-z\u{e4}]{1,9}", 1..30)) {
        let text = words.join(" ");
        let (_dir, path) = written("a.txt", text.as_bytes());
        let options = Arc::new(ReadOptions { piece_bytes: 16, ..options() });
        let input = open(&path, None, options).unwrap();
        let mut reader = input.read(0, Position::default()).unwrap();
        let mut before = String::new();
        while let Some(chunk) = reader.next_chunk().unwrap() {
            chunk.documents().for_each(|piece| before.push_str(&piece.unwrap().text));
            prop_assert!(chunk.end.record == 1 || before.ends_with(' '));
            let mut rest = input.read(0, chunk.end).unwrap();
            let mut after = String::new();
            while let Some(chunk) = rest.next_chunk().unwrap() {
                chunk.documents().for_each(|piece| after.push_str(&piece.unwrap().text));
            }
            prop_assert_eq!(format!("{before}{after}"), text.as_str());
        }
    }
}
