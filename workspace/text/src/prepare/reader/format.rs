//! The format of an input, by its first bytes and its name.

use std::path::Path;

use super::{BYTE_ORDER_MARK, kinds};
use crate::prepare::decode::Compression;
use crate::prepare::fields::list_of_records;
use crate::prepare::names::is_standard_input;
use crate::prepare::{Error, Result};

/// The format of an input, as `--format` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// One JSON object per line
    #[value(name = "jsonl")]
    JsonLines,
    /// One array of JSON objects
    #[value(name = "json")]
    JsonArray,
    /// Plain text, one document
    Text,
    /// Plain text, a document for each paragraph; blank lines separate them
    Paragraphs,
    /// Tables of Parquet
    Parquet,
    /// Tables of Arrow
    Arrow,
}

/// Decoded bytes that decide the format.
pub(super) const START_BYTES: usize = 1 << 12;

const PARQUET: &[u8] = b"PAR1";
/// The first bytes of Parquet with an encrypted footer.
const ENCRYPTED_PARQUET: &[u8] = b"PARE";
pub(super) const ARROW_FILE: &[u8] = b"ARROW1\0\0";
const ARROW_STREAM: &[u8] = b"\xff\xff\xff\xff";

/// Returns the format of an input that starts with `start`: `given`, or the format of its content or its name.
pub(super) fn format_of(path: &Path, start: &[u8], given: Option<Format>) -> Result<Format> {
    let table = table(start);
    if start.starts_with(ENCRYPTED_PARQUET) && table.is_none() && given != Some(Format::Text) {
        return Err(Error::unusable(path, "encrypted Parquet: decrypt it first"));
    }
    match (given, table) {
        (None, Some(table)) => Ok(table),
        (Some(given), Some(table)) if given == table => Ok(table),
        (Some(_), Some(table)) => Err(Error::unusable(
            path,
            format!("is {}, not what --format says: leave --format out", table.name()),
        )),
        (Some(given @ (Format::Parquet | Format::Arrow)), None) => Err(Error::unusable(
            path,
            format!("is not {}, which --format says: leave --format out", given.name()),
        )),
        (Some(given), None) => Ok(given),
        (None, None) if is_standard_input(path) => Err(Error::unusable(
            path,
            "the format of standard input is unknown: add --format jsonl or --format text",
        )),
        (None, None) => of_text(path, start).map_err(|reason| Error::unusable(path, reason)),
    }
}

fn table(start: &[u8]) -> Option<Format> {
    // Text may start with the letters of Parquet's name. A page header's first byte occurs in no text.
    if start.starts_with(PARQUET) && start.get(PARQUET.len()) == Some(&0x15) {
        Some(Format::Parquet)
    } else if start.starts_with(ARROW_FILE) || start.starts_with(ARROW_STREAM) {
        Some(Format::Arrow)
    } else {
        None
    }
}

/// Returns the format of an input that is not a table, or why the input is not text.
fn of_text(path: &Path, start: &[u8]) -> Result<Format, String> {
    if start.starts_with(moh_files::GIT_LFS) {
        return Err(moh_files::IS_POINTER.to_owned());
    }
    let start = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(start);
    let mut tokens = start.iter().filter(|byte| !byte.is_ascii_whitespace());
    let tokens = (tokens.next(), tokens.next());
    let is_array = matches!(tokens, (Some(b'['), Some(b'{' | b']')));
    let is_object = matches!(tokens, (Some(b'{'), Some(b'"' | b'}')));
    match end_of_name(path).as_deref() {
        // An array of other values than objects is rejected as an array, not line by line.
        Some("json" | "jsonl" | "ndjson") if tokens.0 == Some(&b'[') => Ok(Format::JsonArray),
        Some("json" | "jsonl" | "ndjson") => {
            several_lines(start).map_or(Ok(Format::JsonLines), Err)
        }
        Some("txt" | "text" | "md") => Ok(Format::Text),
        _ if is_array => Ok(Format::JsonArray),
        end if is_object && end != Some("ipynb") => Ok(Format::JsonLines),
        end => kinds::refusal(path, end, start).map_or(Ok(Format::Text), Err),
    }
}

/// Returns why an object that begins on the first line and ends on a later line is not read.
fn several_lines(start: &[u8]) -> Option<String> {
    let start = String::from_utf8_lossy(start);
    let (first, _) = start.trim_start().split_once('\n')?;
    let parsed = serde_json::from_str::<serde::de::IgnoredAny>(first);
    parsed.is_err_and(|error| error.is_eof()).then(|| {
        let list = list_of_records(&start).map_or(".".to_owned(), |key| format!("'.{key}[]'"));
        format!("is an object of JSON over several lines, not one a line: write lines, as in `jq -c {list} FILE`")
    })
}

fn end_of_name(path: &Path) -> Option<String> {
    let end_of = |path: &Path| path.extension().map(|end| end.to_ascii_lowercase());
    let mut end = end_of(path);
    if end.as_ref().is_some_and(|end| Compression::NAMES.iter().any(|name| end == *name)) {
        end = path.file_stem().and_then(|stem| end_of(Path::new(stem)));
    }
    end.and_then(|end| end.into_string().ok())
}

impl Format {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Format::JsonLines => "JSON lines",
            Format::JsonArray => "an array of JSON",
            Format::Text | Format::Paragraphs => "text",
            Format::Parquet => "Parquet",
            Format::Arrow => "Arrow",
        }
    }
}
