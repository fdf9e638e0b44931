//! The inputs of preparation: JSON, text and compressed files, and tables.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_ipc::writer::{FileWriter, StreamWriter};
use moh_testkit::fuzz::Target;
use moh_text::prepare::{Format, read_documents};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterVersion};

use crate::{ALLOCATOR, outcome, run_on_file};

/// Maximum bytes of a record that the readers keep.
const RECORD_BYTES: usize = 1 << 16;
/// Bytes that a reader of text needs: a few records, and a decoder's buffer.
const TEXT_MEMORY: usize = 4 << 20;
/// Maximum bytes of a decoder's window.
const WINDOW_MEMORY: usize = 160 << 20;
/// Bytes that a reader of tables needs. Twice the length of a page, which has 31 bits, is reserved before the page is
/// decompressed. Only memory with data is used.
const TABLE_MEMORY: usize = 4 << 30;

/// Reads mutated input with each of `fields`. An outcome is an error, or the problem of the last record
/// that is not a document.
fn fuzz(name: &str, seeds: &[Vec<u8>], memory: usize, format: Option<Format>, fields: &[&str]) {
    let read = |path: &Path, field: &str| {
        let mut bad = Ok(());
        let mut visit = |text: Result<&str, &str>| {
            if let Err(reason) = text {
                bad = Err(reason.to_owned());
            }
        };
        outcome(read_documents(path, format, field, RECORD_BYTES, &mut visit)).and(bad)
    };
    let target = Target { name, seeds, memory, allocator: &ALLOCATOR };
    run_on_file(target, "input", |path| fields.iter().try_for_each(|field| read(path, field)));
}

const LINES: &str = "{\"text\": \"One\\n\\ud83d\\ude00 \\u00e4\", \"id\": 1, \"a\": {\"b\": \"x\"}}\n\n{\"id\": -2e5, \"a\": {\"b\": \"in\"}, \"text\": \"two\"}\n";

#[test]
fn mutated_json_lines_are_read_or_refused() {
    let seeds = [LINES.into(), format!("\u{feff}{}", LINES.replace('\n', "\r\n")).into()];
    let fields = ["text", "a.b", "{id}: {text}"];
    fuzz("json-lines", &seeds, TEXT_MEMORY, Some(Format::JsonLines), &fields);
}

#[test]
fn a_mutated_json_array_is_read_or_refused() {
    let array = format!("[{}]", LINES.trim_end().replace("\n\n", ",\n"));
    fuzz("json-array", &[array.into()], TEXT_MEMORY, Some(Format::JsonArray), &["text", "a.b"]);
}

#[test]
fn mutated_text_is_read_or_refused() {
    let text = "One day,\na boat.\n\n \nAnother \u{e4}.\r\n".to_owned();
    let long = text.repeat(1500).replace("\n\n", "\n");
    let seeds = [text.into_bytes(), long.into_bytes()];
    fuzz("text", &seeds, TEXT_MEMORY, Some(Format::Text), &["text"]);
    fuzz("paragraphs", &seeds, TEXT_MEMORY, Some(Format::Paragraphs), &["text"]);
}

#[test]
fn mutated_compressed_text_is_read_or_refused() {
    let text = LINES.repeat(20).into_bytes();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&text).unwrap();
    let gzip = gzip.finish().unwrap();
    let mut bzip2 = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    bzip2.write_all(&text).unwrap();
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 0);
    xz.write_all(&text).unwrap();
    let seeds = [
        [gzip.clone(), gzip].concat(),
        zstd::stream::encode_all(&text[..], 1).unwrap(),
        bzip2.finish().unwrap(),
        xz.finish().unwrap(),
        text,
    ];
    fuzz("compressed", &seeds, TEXT_MEMORY + WINDOW_MEMORY, None, &["text"]);
}

fn table() -> RecordBatch {
    let texts = ["one", "two", "", "four"].into_iter().cycle().take(60);
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..60));
    RecordBatch::try_from_iter([("text", texts), ("id", ids)]).unwrap()
}

#[test]
fn mutated_parquet_is_read_or_refused() {
    let seeds = [
        WriterProperties::builder().set_compression(Compression::SNAPPY),
        WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_writer_version(WriterVersion::PARQUET_2_0),
        WriterProperties::builder().set_dictionary_enabled(false),
    ];
    let seeds = seeds.map(|properties| {
        let properties = properties.set_max_row_group_row_count(Some(25)).build();
        let mut writer =
            ArrowWriter::try_new(Vec::new(), table().schema(), Some(properties)).unwrap();
        writer.write(&table()).unwrap();
        writer.into_inner().unwrap()
    });
    fuzz("parquet", &seeds, TABLE_MEMORY, None, &["text", "{id}: {text}"]);
}

#[test]
fn mutated_arrow_is_read_or_refused() {
    let mut stream = StreamWriter::try_new(Vec::new(), &table().schema()).unwrap();
    let mut file = FileWriter::try_new(Vec::new(), &table().schema()).unwrap();
    for start in [0, 25, 50] {
        stream.write(&table().slice(start, 10)).unwrap();
        file.write(&table().slice(start, 10)).unwrap();
    }
    let seeds = [stream.into_inner().unwrap(), file.into_inner().unwrap()];
    fuzz("arrow", &seeds, TABLE_MEMORY, None, &["text", "{id}: {text}"]);
}
