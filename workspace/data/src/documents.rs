//! The documents of an input: one per line of JSON lines, or one per input or paragraph of plain text.
//! Inputs are streamed; memory holds at most a batch, a line or a text.

use std::collections::VecDeque;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::input::{self, Input};
use crate::{Error, Format, JsonLines, Result};

/// Maximum bytes of a line; a file with a longer one is taken not to be JSON lines.
const MAX_LINE_BYTES: u64 = 1 << 30;
/// Maximum number of keys that an error lists.
const MAX_SHOWN_KEYS: usize = 5;

/// A document's text, and its length in the input in bytes.
pub(crate) struct Document {
    pub(crate) text: String,
    pub(crate) input_bytes: u64,
}

/// Iterates over the documents of several inputs in sequence.
pub(crate) struct Documents<'a> {
    inputs: std::slice::Iter<'a, PathBuf>,
    field: &'a str,
    format: Option<Format>,
    lines: Option<JsonLines<Input>>,
    /// The rest of an input's paragraphs.
    paragraphs: VecDeque<Document>,
}

impl<'a> Documents<'a> {
    pub(crate) fn new(inputs: &'a [PathBuf], field: &'a str, format: Option<Format>) -> Self {
        Self { inputs: inputs.iter(), field, format, lines: None, paragraphs: VecDeque::new() }
    }

    fn next_document(&mut self) -> Result<Option<Document>> {
        loop {
            if let Some(lines) = &mut self.lines {
                if let Some(found) = lines.next_object()? {
                    let text = text_of(found.fields, self.field);
                    let text = text.map_err(|reason| lines.fault(reason))?;
                    return Ok(Some(Document { text, input_bytes: found.input_bytes }));
                }
                self.lines = None;
            }
            if let Some(paragraph) = self.paragraphs.pop_front() {
                return Ok(Some(paragraph));
            }
            let Some(input) = self.inputs.next() else {
                return Ok(None);
            };
            match input::format_of(input, self.format)? {
                Format::Text => return read_text(input).map(Some),
                Format::Paragraphs => self.paragraphs = paragraphs(&read_text(input)?.text),
                Format::JsonLines => {
                    let reader = input::open(input)?;
                    self.lines = Some(JsonLines::new(input, reader, MAX_LINE_BYTES));
                }
            }
        }
    }
}

impl Iterator for Documents<'_> {
    type Item = Result<Document>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_document().transpose()
    }
}

/// Reads a whole input as one document.
fn read_text(path: &Path) -> Result<Document> {
    let mut bytes = Vec::new();
    input::open(path)?.read_to_end(&mut bytes).map_err(Error::io(path, "read"))?;
    let input_bytes = bytes.len() as u64;
    let text = String::from_utf8(bytes).map_err(|fault| Error::NotUtf8 {
        path: path.to_path_buf(),
        offset: fault.utf8_error().valid_up_to() as u64,
    })?;
    Ok(Document { text, input_bytes })
}

/// The paragraphs of a text, each without the ends of its last line and the blank lines after it.
fn paragraphs(text: &str) -> VecDeque<Document> {
    let mut found = VecDeque::<Document>::new();
    let mut is_inside = false;
    for line in text.strip_prefix('\u{feff}').unwrap_or(text).split_inclusive('\n') {
        let is_blank = line.trim().is_empty();
        match found.back_mut() {
            Some(last) if is_inside || is_blank => {
                last.text.push_str(if is_blank { "" } else { line });
                last.input_bytes += line.len() as u64;
            }
            None if is_blank => {}
            _ => {
                found.push_back(Document { text: line.to_owned(), input_bytes: line.len() as u64 })
            }
        }
        is_inside = !is_blank;
    }
    for document in &mut found {
        document.text.truncate(document.text.trim_end_matches(['\r', '\n']).len());
    }
    found
}

/// The string under `field` of a JSON object.
fn text_of(mut object: Map<String, Value>, field: &str) -> Result<String, String> {
    match object.remove(field) {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(format!("the field {field:?} is not a string")),
        None => {
            let keys: Vec<_> =
                object.keys().take(MAX_SHOWN_KEYS).map(|key| format!("{key:?}")).collect();
            let keys = if keys.is_empty() { "nothing".to_owned() } else { keys.join(", ") };
            Err(format!(
                "no field {field:?}, the line has {keys}: name the text's field with --field"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(name: &str, bytes: &[u8]) -> Result<Vec<String>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        Documents::new(&[path], "text", None)
            .map(|document| document.map(|found| found.text))
            .collect()
    }

    #[test]
    fn each_line_is_a_document() {
        let found = texts("a.jsonl", b"{\"text\": \"one\"}\n\n{\"id\": 1, \"text\": \"t\\nwo\"}");
        assert_eq!(found.unwrap(), ["one", "t\nwo"]);
        assert_eq!(texts("a.json", b"\xef\xbb\xbf{\"text\": \"\"}\r\n").unwrap(), [""]);
        assert!(texts("a.jsonl", b"").unwrap().is_empty());
    }

    #[test]
    fn a_text_file_is_one_document() {
        assert_eq!(texts("a.txt", b"one\ntwo\n").unwrap(), ["one\ntwo\n"]);
        assert_eq!(texts("README", "\u{e4}".as_bytes()).unwrap(), ["\u{e4}"]);
    }

    #[test]
    fn blank_lines_separate_paragraphs() {
        let found = |text: &str| {
            let found = paragraphs(text);
            let bytes: u64 = found.iter().map(|paragraph| paragraph.input_bytes).sum();
            (found.into_iter().map(|paragraph| paragraph.text).collect::<Vec<_>>(), bytes)
        };
        let text = "  one\ntwo\n\n \t\nthree\r\n\r\nfour";
        let expected = ["  one\ntwo", "three", "four"].map(str::to_owned).to_vec();
        assert_eq!(found(text), (expected, text.len() as u64));
        assert_eq!(found("\u{feff}\n\nfirst\n").0, ["first"]);
        assert!(found("").0.is_empty() && found(" \n\n").0.is_empty());
    }

    #[test]
    fn faults_name_the_line() {
        let cases: [(&[u8], u64, &str); 6] = [
            (b"{\"text\": \"a\"}\n{\"text\": \"b\n", 2, "broken JSON at column"),
            (b"\n{\"content\": \"a\"}", 2, "no field \"text\", the line has \"content\""),
            (b"{}", 1, "the line has nothing"),
            (b"{\"text\": 1}", 1, "is not a string"),
            (b"[1]", 1, "expected one JSON object per line"),
            (b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}", 2, "not UTF-8 at byte 10"),
        ];
        for (bytes, expected, part) in cases {
            let error = texts("a.jsonl", bytes).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
            assert!(matches!(error, Error::Line { line, .. } if line == expected), "{error}");
        }
    }

    #[test]
    fn a_bad_byte_in_a_text_is_located() {
        let error = texts("a.txt", b"good \xc3").unwrap_err();
        assert!(matches!(error, Error::NotUtf8 { offset: 5, .. }), "{error}");
    }
}
