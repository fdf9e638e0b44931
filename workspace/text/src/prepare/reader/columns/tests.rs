//! Documents in tables, whole and damaged.

use std::io::Write;
use std::sync::Arc;

use arrow_array::Array as _;
use arrow_array::cast::AsArray;
use arrow_array::types::{Int8Type, Int32Type};
use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, Date32Array, DictionaryArray, FixedSizeListArray,
    Float64Array, Int64Array, LargeStringArray, RecordBatch, RecordBatchWriter, StringArray,
    StringViewArray, StructArray,
};
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use arrow_schema::{DataType, Field};
use moh_testkit::assert_refused;
use parquet::arrow::ArrowWriter;
use parquet::basic::{BrotliLevel, Compression, Encoding, GzipLevel, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet::schema::types::ColumnPath;

use crate::prepare::decode::tests::gzip;
use crate::prepare::fields::Fields;
use crate::prepare::reader::Place;
use crate::prepare::reader::tests::{documents, options, written};
use crate::prepare::reader::{BadRecord, Format, ReadOptions, open};

const ROWS: usize = 1000;

fn text(row: usize) -> String {
    format!("text {row} \u{e4}").repeat(row % 7)
}

/// Returns a table with a column of every type of text, and others.
fn table() -> RecordBatch {
    let texts: Vec<String> = (0..ROWS).map(text).collect();
    let texts = || texts.iter().map(String::as_str);
    let few = || (0..ROWS).map(|row| ["one", "two", "three"][row % 3]);
    let inner = StructArray::new(
        vec![
            Field::new("text", DataType::Utf8, true),
            Field::new("unused", DataType::Int64, false),
        ]
        .into(),
        vec![
            Arc::new(StringArray::from_iter_values(texts())),
            Arc::new(Int64Array::from_iter_values(0..ROWS as i64)),
        ],
        (0..ROWS).map(|row| (row != 3).then_some(true)).collect::<BooleanArray>().nulls().cloned(),
    );
    let nulls = texts().enumerate().map(|(row, text)| (row % 10 != 9).then_some(text));
    let columns: [(&str, ArrayRef); 11] = [
        ("id", Arc::new(Int64Array::from_iter_values(0..ROWS as i64))),
        ("text", Arc::new(StringArray::from_iter_values(texts()))),
        ("large", Arc::new(LargeStringArray::from_iter_values(texts()))),
        ("view", Arc::new(StringViewArray::from_iter_values(texts()))),
        ("few", Arc::new(few().collect::<DictionaryArray<Int32Type>>())),
        ("tiny", Arc::new(few().collect::<DictionaryArray<Int8Type>>())),
        ("nulls", Arc::new(StringArray::from_iter(nulls))),
        ("score", Arc::new(Float64Array::from_iter_values((0..ROWS).map(|row| row as f64 / 4.0)))),
        ("good", Arc::new(BooleanArray::from_iter((0..ROWS).map(|row| Some(row % 2 == 0))))),
        ("a.b", Arc::new(StringArray::from_iter_values(texts()))),
        ("in", Arc::new(inner)),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true)))
        .unwrap()
}

fn parquet(table: &RecordBatch, properties: WriterProperties) -> Vec<u8> {
    let mut writer = ArrowWriter::try_new(Vec::new(), table.schema(), Some(properties)).unwrap();
    writer.write(table).unwrap();
    writer.into_inner().unwrap()
}

/// Returns a table in several row groups with small pages.
fn parquet_in_groups(table: &RecordBatch, compression: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_max_row_group_row_count(Some(300))
        .set_data_page_row_count_limit(50)
        .set_write_batch_size(50)
        .build();
    parquet(table, properties)
}

fn write_batches(mut writer: impl RecordBatchWriter, table: &RecordBatch) {
    for start in (0..table.num_rows()).step_by(300) {
        writer.write(&table.slice(start, 300.min(table.num_rows() - start))).unwrap();
    }
    writer.close().unwrap();
}

fn arrow_stream(table: &RecordBatch, compression: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
    let mut bytes = Vec::new();
    let writer = StreamWriter::try_new_with_options(&mut bytes, &table.schema(), options);
    write_batches(writer.unwrap(), table);
    bytes
}

fn arrow_file(table: &RecordBatch, compression: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
    let mut bytes = Vec::new();
    let writer = FileWriter::try_new_with_options(&mut bytes, &table.schema(), options);
    write_batches(writer.unwrap(), table);
    bytes
}

fn with_field(field: &str) -> ReadOptions {
    ReadOptions { fields: Arc::new(Fields::parse(field).unwrap()), chunk_bytes: 1000, ..options() }
}

fn read(bytes: &[u8], field: &str) -> crate::prepare::Result<Vec<Result<String, BadRecord>>> {
    documents(&written("table", bytes).1, None, with_field(field))
}

fn error(bytes: &[u8], field: &str) -> String {
    read(bytes, field).unwrap_err().to_string()
}

fn files() -> Vec<(&'static str, Vec<u8>)> {
    let table = table();
    let mut v2 = WriterProperties::builder()
        .set_writer_version(WriterVersion::PARQUET_2_0)
        .set_dictionary_enabled(false)
        .set_encoding(Encoding::DELTA_BYTE_ARRAY)
        .set_compression(Compression::ZSTD(ZstdLevel::default()));
    // The writer has no such encoding for other types than strings.
    for column in [&["score"][..], &["id"], &["good"], &["in", "unused"]] {
        let path: Vec<String> = column.iter().map(|&name| name.to_owned()).collect();
        v2 = v2.set_column_encoding(ColumnPath::from(path), Encoding::PLAIN);
    }
    vec![
        ("plain", parquet_in_groups(&table, Compression::UNCOMPRESSED)),
        ("snappy", parquet_in_groups(&table, Compression::SNAPPY)),
        ("gzip", parquet_in_groups(&table, Compression::GZIP(GzipLevel::default()))),
        ("zstd", parquet_in_groups(&table, Compression::ZSTD(ZstdLevel::default()))),
        ("brotli", parquet_in_groups(&table, Compression::BROTLI(BrotliLevel::default()))),
        ("lz4", parquet_in_groups(&table, Compression::LZ4_RAW)),
        ("v2", parquet(&table, v2.build())),
        ("stream", arrow_stream(&table, None)),
        ("stream zstd", arrow_stream(&table, Some(CompressionType::ZSTD))),
        ("file", arrow_file(&table, None)),
        ("file lz4", arrow_file(&table, Some(CompressionType::LZ4_FRAME))),
    ]
}

#[test]
fn every_table_gives_the_same_documents() {
    let texts: Vec<_> = (0..ROWS).map(|row| Ok(text(row))).collect();
    for (name, bytes) in files() {
        for field in ["text", "large", "view", "a.b"] {
            assert_eq!(read(&bytes, field).unwrap(), texts, "{name} {field}");
        }
        for field in ["few", "tiny"] {
            let found = read(&bytes, field).unwrap();
            assert_eq!(found[..4], ["one", "two", "three", "one"].map(|text| Ok(text.to_owned())));
            assert_eq!(found.len(), ROWS, "{name} {field}");
        }
        let found = read(&bytes, "{id} {good} {score}: {text}").unwrap();
        assert_eq!(found[6], Ok(format!("6 true 1.5: {}", text(6))), "{name}");
    }
}

#[test]
fn nulls_are_bad_records_with_their_row() {
    for (name, bytes) in files() {
        let found = read(&bytes, "nulls").unwrap();
        for (row, found) in found.iter().enumerate() {
            match found {
                Ok(found) => assert_eq!(*found, text(row), "{name}"),
                Err(bad) => {
                    assert_eq!(row % 10, 9, "{name}");
                    assert_eq!(bad.place, Place::Row(row as u64 + 1), "{name}");
                    assert_eq!(bad.reason, "the column \"nulls\" is null");
                }
            }
        }
        // A null structure has no text.
        let found = read(&bytes, "in.text").unwrap();
        assert_eq!(found[2], Ok(text(2)), "{name}");
        assert!(matches!(&found[3], Err(bad) if bad.reason == "the column \"in.text\" is null"));
        assert_eq!(found.len(), ROWS);
    }
}

#[test]
fn a_column_that_is_missing_or_no_text_is_named() {
    for (name, bytes) in files() {
        let found = error(&bytes, "content");
        let part = "no column \"content\", the table has \"id\", \"text\", \"large\", ";
        assert!(found.contains(part) && found.ends_with("column with --field"), "{name} {found}");
        assert!(error(&bytes, "in.other").contains("no column \"in.other\""), "{name}");
        let found = error(&bytes, "id");
        assert!(found.ends_with("the column \"id\" is Int64, not text"), "{name} {found}");
        assert!(error(&bytes, "{in}").contains("the column \"in\" is Struct("), "{name}");
    }
}

#[test]
fn a_field_of_a_message_that_json_has_not_says_so_when_it_is_read() {
    let column = |name: &str, values: ArrayRef| {
        (Arc::new(Field::new(name, values.data_type().clone(), true)), values)
    };
    let bytes = |bytes: &'static [u8]| BinaryArray::from(vec![Some(bytes), None]);
    let messages = StructArray::from(vec![
        column("role", Arc::new(bytes(b"user"))),
        column("content", Arc::new(bytes(b"\xff"))),
        column("at", Arc::new(Date32Array::from(vec![Some(1), None]))),
    ]);
    let kind = Arc::new(Field::new_list_field(messages.data_type().clone(), true));
    let lists = FixedSizeListArray::new(kind, 1, Arc::new(messages), None);
    let table = RecordBatch::try_from_iter([("messages", Arc::new(lists) as ArrayRef)]).unwrap();
    let options =
        ReadOptions { fields: Arc::new(Fields::of_chat("messages")), ..with_field("text") };
    let (_dir, path) = written("table", &parquet(&table, WriterProperties::default()));
    let found = documents(&path, None, options).unwrap();
    let message = "{\"role\":\"user\",\"content\":\"\u{fdd2}?the field \\\"content\\\" is Binary, no text\",\
                   \"at\":\"\u{fdd2}?the field \\\"at\\\" is Date32, no text\"}";
    assert!(found[0].as_ref().unwrap().starts_with(&format!("{{\"messages\":[{message}],")));
    assert!(found[1].as_ref().unwrap().starts_with("{\"messages\":[{}],"));
}

#[test]
fn the_row_groups_are_parts() {
    let (_dir, path) = written("a.txt", &parquet_in_groups(&table(), Compression::SNAPPY));
    let input = open(&path, None, Arc::new(options())).unwrap();
    assert_eq!((input.format, input.parts()), (Format::Parquet, 4));
}

#[test]
fn a_format_that_does_not_fit_is_refused() {
    let open_as =
        |bytes: &[u8], format| open(&written("table", bytes).1, Some(format), Arc::new(options()));
    for (_, bytes) in files() {
        let expected = ", not what --format says: leave --format out";
        assert_refused(open_as(&bytes, Format::Text), expected);
    }
    assert_refused(open_as(b"text", Format::Parquet), "is not Parquet, which --format says");
}

#[test]
fn a_compressed_file_gives_the_rows_of_arrow_but_not_of_parquet() {
    for bytes in [arrow_file(&table(), None), arrow_stream(&table(), None)] {
        assert_eq!(read(&gzip(&bytes), "text").unwrap(), read(&bytes, "text").unwrap());
    }
    let whole = gzip(&arrow_file(&table(), None));
    let half = read(&whole[..whole.len() / 2], "text");
    assert_refused(half, "/table: compressed data ends early after ");
    let parquet = gzip(&parquet(&table(), WriterProperties::default()));
    assert_refused(read(&parquet, "text"), "a compressed file or a pipe with Parquet: write it to");
}

#[test]
fn an_empty_table_has_no_documents() {
    let empty = table().slice(0, 0);
    let properties = WriterProperties::default();
    for bytes in [parquet(&empty, properties), arrow_file(&empty, None), arrow_stream(&empty, None)]
    {
        assert_eq!(read(&bytes, "text").unwrap(), []);
    }
}

#[test]
fn a_large_value_is_one_document() {
    let large = "large text ".repeat(1 << 16);
    let texts = StringArray::from_iter_values([large.as_str(), "short", large.as_str()]);
    let table = RecordBatch::try_from_iter([("text", Arc::new(texts) as ArrayRef)]).unwrap();
    for bytes in [parquet(&table, WriterProperties::default()), arrow_file(&table, None)] {
        let expected = [&large, "short", &large].map(|text| Ok(text.to_owned()));
        assert_eq!(read(&bytes, "text").unwrap(), expected);
    }
}

#[test]
fn a_truncated_table_is_an_error() {
    for (name, bytes) in files() {
        for end in [9, 100, bytes.len() / 2, bytes.len() - 9, bytes.len() - 1] {
            // A stream may lack its end.
            if !(name.starts_with("stream") && end == bytes.len() - 9) {
                let found = error(&bytes[..end], "text");
                assert!(found.contains("table"), "{name} {end} {found}");
                assert!(found.contains("fetch it again"), "{name} {end} {found}");
            }
        }
    }
}

#[test]
fn damage_anywhere_is_an_error_or_other_texts() {
    for (name, bytes) in files() {
        let mut errors = 0;
        for at in (4..bytes.len()).step_by(bytes.len() / 60) {
            let mut damaged = bytes.clone();
            damaged[at..(at + 4).min(bytes.len())].fill(0xfe);
            if let Err(found) = read(&damaged, "text") {
                let found = found.to_string();
                errors += 1;
                assert!(found.contains("/table: "), "{name} {found}");
            }
        }
        assert!(errors > 2, "{name} {errors}");
    }
}

#[test]
fn a_damaged_footer_page_or_dictionary_is_an_error() {
    let table = table();
    let bytes = parquet_in_groups(&table, Compression::SNAPPY);
    let length = bytes.len();
    let mut footer = bytes.clone();
    footer[length - 100..length - 50].fill(0xff);
    assert_refused(read(&footer, "text"), "the table is damaged (");
    let mut long = bytes.clone();
    long[length - 8..length - 4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_refused(read(&long, "text"), "the table is damaged (");
    let metadata = open_metadata(&bytes);
    let column = metadata.row_group(0).column(1);
    for start in [column.dictionary_page_offset().unwrap(), column.data_page_offset()] {
        let mut page = bytes.clone();
        page[start as usize..start as usize + 60].fill(0x77);
        assert_refused(read(&page, "text"), "the table is damaged (");
        // Other columns are not read.
        assert_eq!(read(&page, "large").unwrap().len(), ROWS);
    }
}

/// `pq.write_table(pa.table({"text": ["one two"]}), path, compression="none", use_dictionary=False,
/// write_statistics=False, store_schema=False, write_page_checksum=True)` of pyarrow 26.
const WITH_CHECKSUM: &[u8] =
    b"PAR1\x15\x00\x15\x22\x15\x22\x15\xe7\x91\xa9\x88\x0c\x1c\x15\x02\x15\x00\x15\x06\x15\x06\
    \x1c\x00\x00\x00\x02\x00\x00\x00\x02\x01\x07\x00\x00\x00one two\x15\x04\x19,5\x00\x18\
    \x06schema\x15\x02\x00\x15\x0c%\x02\x18\x04text%\x00L\x1c\x00\x00\x00\x16\x02\x19\x1c\
    \x19\x1c&\x00\x1c\x15\x0c\x19%\x06\x00\x19\x18\x04text\x15\x00\x16\x02\x16T\x16T&\x08I\
    \x1c\x15\x00\x15\x00\x15\x02\x00<\x16\x0e\x19\x06\x19&\x00\x02\x00\x00\x00\x16T\x16\x02&\
    \x08\x16T\x00( parquet-cpp-arrow version 26.0.1\x19\x1c\x1c\x00\x00\x00\x88\x00\x00\x00P\
    AR1";

#[test]
fn a_page_that_its_checksum_contradicts_is_an_error() {
    assert_eq!(read(WITH_CHECKSUM, "text").unwrap(), [Ok("one two".to_owned())]);
    let mut damaged = WITH_CHECKSUM.to_vec();
    let place = damaged.windows(7).position(|text| text == b"one two").unwrap();
    damaged[place] = b'O';
    let found = error(&damaged, "text");
    let [what, why] = ["the table is damaged (", "Page CRC checksum mismatch): fetch it again"];
    assert!(found.contains(what) && found.ends_with(why), "{found}");
}

fn open_metadata(bytes: &[u8]) -> parquet::file::metadata::ParquetMetaData {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    parquet::file::metadata::ParquetMetaDataReader::new().parse_and_finish(&file).unwrap()
}

/// Returns a table with large texts. One text is longer than the others.
fn large() -> RecordBatch {
    let long = "long words ".repeat(200_000);
    let texts =
        (0..200).map(|row| format!("{row} ") + if row == 150 { &long } else { &long[..10_000] });
    let texts = StringArray::from_iter_values(texts);
    let ids = Int64Array::from_iter_values(0..200);
    RecordBatch::try_from_iter([("id", Arc::new(ids) as ArrayRef), ("text", Arc::new(texts))])
        .unwrap()
}

fn large_files() -> Vec<(&'static str, Vec<u8>)> {
    let table = large();
    let zstd = || Compression::ZSTD(ZstdLevel::default());
    let properties = |compression| WriterProperties::builder().set_compression(compression);
    let one = |compression| properties(compression).set_dictionary_enabled(false).build();
    let delta = properties(zstd())
        .set_dictionary_enabled(false)
        .set_column_encoding("text".into(), Encoding::DELTA_BYTE_ARRAY);
    vec![
        ("snappy", parquet(&table, properties(Compression::SNAPPY).build())),
        ("zstd", parquet(&table, one(zstd()))),
        ("gzip", parquet(&table, one(Compression::GZIP(GzipLevel::default())))),
        ("delta", parquet(&table, delta.build())),
        ("file", arrow_file(&table, None)),
        ("file lz4", arrow_file(&table, Some(CompressionType::LZ4_FRAME))),
        ("stream", arrow_stream(&table, None)),
        ("stream zstd", arrow_stream(&table, Some(CompressionType::ZSTD))),
    ]
}

#[test]
fn large_tables_are_read_from_any_row_on() {
    let table = large();
    let texts = table.column(1).as_string::<i32>();
    for (name, bytes) in large_files() {
        let (_dir, path) = written("table", &bytes);
        for chunk_bytes in [100_000, 1 << 20] {
            let options =
                ReadOptions { chunk_bytes, max_record_bytes: 1 << 24, ..with_field("text") };
            let found = documents(&path, None, options).unwrap();
            assert_eq!(found.len(), texts.len(), "{name}");
            for (found, text) in found.iter().zip(texts) {
                assert!(found.as_deref() == Ok(text.unwrap()), "{name}");
            }
        }
    }
}

#[test]
fn a_text_that_is_too_long_is_a_bad_record() {
    for (name, bytes) in large_files() {
        let options = ReadOptions { max_record_bytes: 1_000_000, ..with_field("text") };
        let found = documents(&written("table", &bytes).1, None, options).unwrap();
        assert_eq!(found.len(), 200, "{name}");
        let bad: Vec<_> = found.iter().filter_map(|found| found.as_ref().err()).collect();
        let reason = "the text has more than 1 MB, the most of a document: split it".to_owned();
        assert_eq!(bad, [&BadRecord { place: Place::Row(151), reason }], "{name}");
    }
}

#[test]
fn texts_that_are_not_utf_8_are_errors_that_name_the_table() {
    let table = table();
    for bytes in [
        parquet_in_groups(&table, Compression::UNCOMPRESSED),
        arrow_file(&table, None),
        arrow_stream(&table, None),
    ] {
        let mut damaged = bytes.clone();
        let is_text = |at: &usize| bytes[*at..].starts_with(b"text 299 ");
        (0..bytes.len()).filter(is_text).for_each(|at| damaged[at] = 0xff);
        assert_ne!(damaged, bytes);
        let found = error(&damaged, "text");
        assert!(
            found.contains("table: the table is damaged (") && found.to_lowercase().contains("utf"),
            "{found}"
        );
    }
}
