//! The speed of the readers on one thread: from a file in the page cache to texts.

// Benchmarks set up like tests.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::Path;

use divan::Bencher;
use divan::counter::BytesCount;
use moh_text::prepare::{Format, read_documents};

/// Bytes of the lines, about.
const BYTES: usize = 64 << 20;
const RECORD_BYTES: usize = 2 * BYTES;
/// Sentences of ASCII, of other letters, and with an escape every few letters.
const SENTENCES: [&str; 3] = [
    "The quick brown fox jumps over the lazy dog, and says so.\n",
    "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002} Gr\u{fc}\u{df}e aus K\u{f6}ln am Rhein, \u{41f}\u{440}\u{438}\u{432}\u{435}\u{442}.\n",
    "\"Gr\u{fc}\u{df}e\" \u{4f60}\u{597d}\n\t",
];

fn main() {
    divan::main();
}

/// JSON lines of documents of so many sentences, with other fields around the text.
fn lines(sentence: &str, sentences: usize) -> String {
    let text = sentence.repeat(sentences);
    let meta = serde_json::json!({"source": "web", "score": 0.25, "tags": ["a", "b"]});
    let line =
        serde_json::json!({"id": 1, "text": text, "url": "https://example.org/", "meta": meta});
    let line = format!("{line}\n");
    line.repeat(BYTES / line.len() + 1)
}

fn read(bencher: Bencher<'_, '_>, bytes: usize, path: &Path, format: Option<Format>) {
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        let mut total = 0;
        let mut visit = |text: Result<&str, &str>| total += text.unwrap().len();
        read_documents(path, format, "text", RECORD_BYTES, &mut visit).unwrap();
        total
    });
}

/// Documents of a page and of a book's chapter.
#[divan::bench(args = [(0, 8), (0, 1000), (1, 8), (1, 1000), (2, 20), (2, 2000)])]
fn json_lines(bencher: Bencher<'_, '_>, (sentence, sentences): (usize, usize)) {
    let file = written(lines(SENTENCES[sentence], sentences).as_bytes());
    let bytes = file.as_file().metadata().unwrap().len() as usize;
    read(bencher, bytes, file.path(), Some(Format::JsonLines));
}

#[divan::bench]
fn json_array(bencher: Bencher<'_, '_>) {
    let lines = lines(SENTENCES[0], 50);
    let file = written(format!("[{}]", lines.trim_end().replace('\n', ",\n")).as_bytes());
    read(bencher, lines.len(), file.path(), Some(Format::JsonArray));
}

#[divan::bench]
fn text(bencher: Bencher<'_, '_>) {
    let text = SENTENCES[0].repeat(BYTES / SENTENCES[0].len());
    read(bencher, text.len(), written(text.as_bytes()).path(), Some(Format::Text));
}

#[divan::bench]
fn paragraphs(bencher: Bencher<'_, '_>) {
    let paragraph = format!("{}\n", SENTENCES[0].repeat(8));
    let text = paragraph.repeat(BYTES / paragraph.len());
    read(bencher, text.len(), written(text.as_bytes()).path(), Some(Format::Paragraphs));
}

/// JSON lines in gzip; the bytes are those of the lines.
#[divan::bench]
fn gzip(bencher: Bencher<'_, '_>) {
    let lines = lines(SENTENCES[0], 50);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(lines.as_bytes()).unwrap();
    let file = written(&encoder.finish().unwrap());
    read(bencher, lines.len(), file.path(), Some(Format::JsonLines));
}

fn written(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}
