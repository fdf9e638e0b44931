//! The inputs of preparation: files and, named `-`, standard input. Compressed and columnar data is
//! recognised by its first bytes and refused with a remedy.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, Chain, Cursor, Read};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The name of standard input.
const STANDARD_INPUT: &str = "-";
/// Bytes at the start of an input that identify its encoding.
const MAGIC_BYTES: u64 = 10;
/// Size of the read buffer.
const BUFFER_BYTES: usize = 1 << 20;

/// Compressed formats: their first bytes, their name, and a program that decompresses them to
/// standard output.
const COMPRESSED: [(&[u8], &str, &str); 6] = [
    (b"\x1f\x8b", "gzip", "zcat"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "zstdcat"),
    (b"\xfd7zXZ\0", "xz", "xzcat"),
    (b"\x04\x22\x4d\x18", "LZ4", "lz4cat"),
    (b"PK\x03\x04", "zip", "unzip -p"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", "7z x -so"),
];
/// bzip2's first bytes but for the level, a digit after the first three.
const BZIP2: (&[u8], &[u8]) = (b"BZh", b"1AY&SY");
/// Columnar formats: their first bytes, the last of which occurs in no text, their name, and the
/// function of pandas that reads them.
const COLUMNAR: [(&[u8], &str, &str); 2] =
    [(b"PAR1\x15", "Parquet", "read_parquet"), (b"ARROW1\0", "Arrow", "read_feather")];

/// The format of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One JSON object per line, one document each.
    JsonLines,
    /// One document.
    Text,
    /// A document for each paragraph; blank lines separate them.
    Paragraphs,
}

/// An opened input.
pub(crate) type Input = BufReader<Chain<Cursor<Vec<u8>>, Box<dyn Read + Send>>>;

/// The format of `path`: `given`, or that of its name.
///
/// # Errors
/// Fails for standard input without `given`.
pub(crate) fn format_of(path: &Path, given: Option<Format>) -> Result<Format> {
    match given {
        Some(format) => Ok(format),
        None if is_standard_input(path) => Err(Error::Input {
            path: path.to_path_buf(),
            reason: "the format of standard input is unknown: add --format jsonl or --format text"
                .to_owned(),
        }),
        None if is_json_lines(path) => Ok(Format::JsonLines),
        None => Ok(Format::Text),
    }
}

fn is_json_lines(path: &Path) -> bool {
    path.extension()
        .is_some_and(|end| end.eq_ignore_ascii_case("jsonl") || end.eq_ignore_ascii_case("json"))
}

/// Whether `path` names standard input.
pub(crate) fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == STANDARD_INPUT
}

/// Opens an input at its start.
///
/// # Errors
/// Fails if it cannot be read, or is compressed or columnar.
pub(crate) fn open(path: &Path) -> Result<Input> {
    let mut source: Box<dyn Read + Send> = if is_standard_input(path) {
        Box::new(std::io::stdin())
    } else {
        Box::new(File::open(path).map_err(Error::io(path, "read"))?)
    };
    let mut start = Vec::new();
    let mut limited = source.by_ref().take(MAGIC_BYTES);
    limited.read_to_end(&mut start).map_err(Error::io(path, "read"))?;
    if let Some(reason) = refusal(path, &start) {
        return Err(Error::Input { path: path.to_path_buf(), reason });
    }
    Ok(BufReader::with_capacity(BUFFER_BYTES, Cursor::new(start).chain(source)))
}

/// Checks the inputs before any work is done, and returns their size in bytes; 0 if it is unknown,
/// as of standard input and other pipes.
///
/// # Errors
/// Fails if there is no input, if an input is named twice, if standard input has no format, or if a file
/// cannot be read, or is compressed or columnar.
pub(crate) fn check(inputs: &[PathBuf], format: Option<Format>) -> Result<u64> {
    if inputs.is_empty() {
        return Err(Error::Empty { reason: "no input: name at least one file".to_owned() });
    }
    if inputs.iter().filter(|input| is_standard_input(input)).count() > 1 {
        return Err(Error::Input {
            path: PathBuf::from(STANDARD_INPUT),
            reason: "standard input can be read once: name it once".to_owned(),
        });
    }
    let (mut total, mut is_known) = (0, true);
    let mut files = BTreeSet::new();
    for input in inputs {
        format_of(input, format)?;
        if is_standard_input(input) {
            is_known = false;
            continue;
        }
        let kind = std::fs::metadata(input).map_err(Error::io(input, "read"))?;
        if kind.is_dir() {
            return Err(Error::Io {
                path: input.clone(),
                action: "read",
                source: std::io::Error::from(std::io::ErrorKind::IsADirectory),
            });
        }
        if kind.is_file() {
            if !files.insert(input.canonicalize().map_err(Error::io(input, "read"))?) {
                return Err(Error::Input {
                    path: input.clone(),
                    reason:
                        "is named twice: name it once; a source's weight in a recipe reads its \
                             tokens more often"
                            .to_owned(),
                });
            }
            open(input)?;
            total += kind.len();
        } else {
            // Opening a pipe twice would lose the bytes that were read first.
            is_known = false;
        }
    }
    Ok(if is_known { total } else { 0 })
}

/// Why an input that starts with these bytes is not text.
fn refusal(path: &Path, start: &[u8]) -> Option<String> {
    let name = match is_standard_input(path) {
        true => PathBuf::from("FILE"),
        false => path.to_path_buf(),
    };
    if let Some((encoding, program)) = compression(start) {
        let inner = name.with_extension("");
        let format =
            if is_json_lines(&inner) || name == Path::new("FILE") { "jsonl" } else { "text" };
        return Some(format!(
            "compressed with {encoding}: decompress it into standard input, as in \
             `{program} {} | moh-data prepare --format {format} ... -`",
            name.display()
        ));
    }
    let (_, encoding, function) =
        COLUMNAR.into_iter().find(|(magic, ..)| start.starts_with(magic))?;
    Some(format!(
        "a file of {encoding}: convert it to JSON lines, as in Python with \
         pandas.{function}({:?}).to_json(\"text.jsonl\", orient=\"records\", lines=True)",
        name.display().to_string()
    ))
}

/// The encoding of these first bytes, and the program that decodes it.
fn compression(start: &[u8]) -> Option<(&'static str, &'static str)> {
    let (first, block) = BZIP2;
    if start.starts_with(first) && start.get(first.len() + 1..) == Some(block) {
        return Some(("bzip2", "bzcat"));
    }
    let found = COMPRESSED.into_iter().find(|(magic, ..)| start.starts_with(magic));
    found.map(|(_, encoding, program)| (encoding, program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_and_columnar_inputs_are_named_with_a_remedy() {
        // printf 'x' | gzip | xxd -l 10, and so on for each program.
        let cases: [(&str, &[u8], &str); 9] = [
            (
                "a.jsonl.gz",
                b"\x1f\x8b\x08\0\0\0\0\0\0\x03",
                "gzip: decompress it into standard input, as in `zcat",
            ),
            ("a.txt.zst", b"\x28\xb5\x2f\xfd\x04\x58\x09\0\0x", "--format text ... -`"),
            ("a.jsonl.xz", b"\xfd7zXZ\0\0\x04\xe6\xd6", "--format jsonl ... -`"),
            ("a.lz4", b"\x04\x22\x4d\x18\x64\x40\xa7\x01\0\0", "`lz4cat "),
            ("a.zip", b"PK\x03\x04\x0a\0\0\0\0\0", "`unzip -p "),
            ("a.7z", b"7z\xbc\xaf\x27\x1c\0\x04", "`7z x -so "),
            ("a.bz2", b"BZh91AY&SY", "`bzcat "),
            ("a.parquet", b"PAR1\x15\x04\x15", "a file of Parquet: convert it to JSON lines"),
            ("a.arrow", b"ARROW1\0\0\xff\xff", "pandas.read_feather("),
        ];
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes, part) in cases {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let error = check(std::slice::from_ref(&path), None).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(part), "{error}");
            assert!(open(&path).is_err());
        }
    }

    #[test]
    fn text_that_resembles_an_encoding_is_text() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        for text in ["", "P", "PAR1 is a name", "BZh", "BZh9 and more", "ARROW1: a ship", "1AY&SY"]
        {
            std::fs::write(&path, text).unwrap();
            let mut read = String::new();
            open(&path).unwrap().read_to_string(&mut read).unwrap();
            assert_eq!(read, text);
        }
    }

    #[test]
    fn standard_input_needs_a_format_and_comes_once() {
        let dash = PathBuf::from("-");
        let error = check(std::slice::from_ref(&dash), None).unwrap_err().to_string();
        assert!(error.contains("--format jsonl"), "{error}");
        assert_eq!(check(std::slice::from_ref(&dash), Some(Format::Text)).unwrap(), 0);
        let error = check(&[dash.clone(), dash], Some(Format::Text)).unwrap_err().to_string();
        assert!(error.contains("name it once"), "{error}");
    }

    #[test]
    fn a_given_format_wins_over_the_name() {
        let format = |name: &str, given| format_of(Path::new(name), given).unwrap();
        assert_eq!(format("a.JSON", None), Format::JsonLines);
        assert_eq!(format("a.json", Some(Format::Text)), Format::Text);
        assert_eq!(format("README", None), Format::Text);
        assert_eq!(format("-", Some(Format::JsonLines)), Format::JsonLines);
    }
}
