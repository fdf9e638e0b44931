//! Files that are neither text nor a supported table, by their names and first bytes. Read as text, each file would
//! become a document without a warning.

use std::path::Path;

use super::BYTE_ORDER_MARK;

/// The ends of names of a kind, its description, and a remedy.
const KINDS: [[&str; 3]; 10] = [
    [
        "csv tsv tab psv",
        "a table of separated values",
        "write it as Parquet, as in `pandas.read_csv(NAME).to_parquet(\"x.parquet\")`",
    ],
    [
        "xlsx xls xlsm ods orc avro dta sav h5 hdf5",
        "a table of another format",
        "write its rows as Parquet or JSON lines, with pandas for example",
    ],
    [
        "html htm xhtml mhtml xml svg rss",
        "markup",
        "extract its text, with trafilatura or pandoc for example",
    ],
    [
        "pdf docx doc odt rtf epub pptx ppt odp mobi djvu ps",
        "a formatted document",
        "extract its text, with pandoc or pdftotext for example",
    ],
    ["ipynb", "a notebook", "convert it, as in `jupyter nbconvert --to markdown`"],
    [
        "npy npz pkl pickle pt pth ckpt bin idx mask safetensors gguf onnx msgpack tfrecord mat rds joblib",
        "binary data, such as arrays or weights",
        "write the texts in it as JSON lines",
    ],
    [
        "sqlite sqlite3 db duckdb mdb lmdb sql",
        "a database",
        "write its rows as JSON, as `sqlite3 -json` does",
    ],
    [
        "png jpg jpeg gif webp bmp tif tiff ico heic mp3 wav flac ogg m4a mp4 mkv avi mov webm",
        "an image, sound or film",
        "name files of text",
    ],
    [
        "tar tgz tbz2 txz rar jar whl iso cab deb rpm zip 7z",
        "an archive",
        "unpack it and name the files in it",
    ],
    ["exe dll so o a pyc class wasm", "a program", "name files of text"],
];
/// First bytes of a file, and an end of names of its kind.
const FIRST_BYTES: [(&[u8], &str); 12] = [
    (b"%pdf-", "pdf"),
    (b"{\\rtf", "rtf"),
    (b"<!doctype html", "html"),
    (b"<html", "html"),
    (b"<?xml", "xml"),
    (b"\x93numpy", "npy"),
    (b"sqlite format 3\0", "sqlite"),
    (b"\x89png", "png"),
    (b"\xff\xd8\xff", "jpg"),
    (b"gif8", "gif"),
    (b"\x89hdf", "h5"),
    (b"\x7felf", "exe"),
];

/// Returns why a file is not read, or `None`. `end` is the ending of its name without a compression's ending; the file
/// starts with `start`.
pub(crate) fn refusal(name: &Path, end: Option<&str>, start: &[u8]) -> Option<String> {
    let end = end.map(str::to_ascii_lowercase);
    if let Some(table @ ("parquet" | "arrow" | "feather")) = end.as_deref() {
        return Some(format!("is no table of {table}, as its name says: fetch it again"));
    }
    let small: Vec<u8> = start.iter().take(16).map(u8::to_ascii_lowercase).collect();
    let small = small.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&small);
    let content = FIRST_BYTES.iter().find(|(bytes, _)| small.starts_with(bytes));
    let end = end.as_deref().filter(|end| kind(end).is_some()).or(content.map(|(_, end)| *end));
    let (what, remedy) = match end.and_then(kind) {
        Some(found) => found,
        None if start.contains(&0) => kind("bin")?,
        None => return None,
    };
    let remedy = remedy.replace("NAME", &format!("{:?}", name.display().to_string()));
    Some(format!("is {what}, which is not read: {remedy}; --format text makes it a document"))
}

fn kind(end: &str) -> Option<(&'static str, &'static str)> {
    let found = KINDS.iter().find(|[ends, ..]| ends.split(' ').any(|known| known == end));
    found.map(|[_, what, remedy]| (*what, *remedy))
}
