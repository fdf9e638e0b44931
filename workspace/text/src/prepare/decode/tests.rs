//! Compressed inputs, whole, cut off and damaged.

use std::io::Write;

use moh_testkit::assert_refused;

use super::*;

const TEXT_BYTES: usize = 300_000;

fn text() -> Vec<u8> {
    let mut state = 1u32;
    let letters = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        b'a' + (state >> 24) as u8 % 26
    });
    letters.take(TEXT_BYTES).collect()
}

fn all(mut encoder: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    encoder.read_to_end(&mut bytes).unwrap();
    bytes
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    all(flate2::read::GzEncoder::new(bytes, flate2::Compression::fast()))
}

pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::stream::read::Encoder::new(bytes, 1).unwrap();
    encoder.include_checksum(true).unwrap();
    all(encoder)
}

fn bzip2(bytes: &[u8]) -> Vec<u8> {
    all(bzip2::read::BzEncoder::new(bytes, bzip2::Compression::fast()))
}

pub(crate) fn xz(bytes: &[u8]) -> Vec<u8> {
    all(liblzma::read::XzEncoder::new(bytes, 0))
}

type Encode = fn(&[u8]) -> Vec<u8>;

const ENCODERS: [(Compression, Encode); 4] = [
    (Compression::Gzip, gzip),
    (Compression::Zstandard, zstd),
    (Compression::Bzip2, bzip2),
    (Compression::Xz, xz),
];

/// Decodes a file from `offset` on.
fn decoded_from(bytes: &[u8], offset: u64, max_window_bytes: usize) -> Result<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    std::fs::write(&path, bytes).unwrap();
    let mut decoded = Decoded::open_at(&path, offset, max_window_bytes)?;
    assert_eq!(decoded.offset(), offset);
    let mut all = Vec::new();
    // Blocks of another size than the decoders'.
    while decoded.fill(&mut all, 10_007)? > 0 {}
    assert!(decoded.stored_bytes() <= bytes.len() as u64);
    Ok(all)
}

fn decoded(bytes: &[u8]) -> Result<Vec<u8>> {
    decoded_from(bytes, 0, 1 << 20)
}

#[test]
fn every_encoding_gives_the_same_bytes_from_any_place_on() {
    let text = text();
    assert_eq!(decoded(&text).unwrap(), text);
    assert_eq!(decoded_from(&text, 12_345, 0).unwrap(), text[12_345..]);
    for (compression, encode) in ENCODERS {
        let bytes = encode(&text);
        assert_eq!(Compression::of(&bytes[..10]), compression);
        assert!(decoded(&bytes).unwrap() == text, "{compression:?}");
        for offset in [1, 12_345, TEXT_BYTES] {
            assert!(decoded_from(&bytes, offset as u64, 0).unwrap() == text[offset..]);
        }
        assert_refused(
            decoded_from(&bytes, TEXT_BYTES as u64 + 1, 0),
            "ends after 300000 bytes of text",
        );
        assert_eq!(decoded(&encode(b"")).unwrap(), b"", "{compression:?}");
    }
}

#[test]
fn several_members_follow_one_another() {
    let text = text();
    let (first, second) = text.split_at(100_000);
    for (compression, encode) in ENCODERS {
        let bytes = [encode(first), encode(b""), encode(second)].concat();
        assert!(decoded(&bytes).unwrap() == text, "{compression:?}");
    }
}

#[test]
fn a_first_frame_without_text_is_skipped() {
    let bytes = [b"\x50\x2a\x4d\x18\x04\0\0\0skip".as_slice(), &zstd(b"text")].concat();
    assert_eq!(decoded(&bytes).unwrap(), b"text");
}

#[test]
fn what_follows_gzip_is_ignored_as_gzip_does() {
    for rest in [b"\0".as_slice(), &[0; 512], b"signature"] {
        assert_eq!(decoded(&[gzip(b"text").as_slice(), rest].concat()).unwrap(), b"text");
    }
}

#[test]
fn truncated_data_is_an_error_that_says_how_much_was_decoded() {
    let text = text();
    for (compression, encode) in ENCODERS {
        let bytes = encode(&text);
        for end in [11, bytes.len() / 2, bytes.len() - 1] {
            let error = decoded(&bytes[..end]).unwrap_err().to_string();
            assert!(
                error.contains("a.txt: compressed data ends early after "),
                "{compression:?} {error}"
            );
            assert!(error.ends_with(" bytes of text: fetch it again"), "{error}");
        }
        let end = |bytes: &[u8]| {
            let error = decoded(bytes).unwrap_err().to_string();
            let count = error.split_once("after ").unwrap().1.split_once(' ').unwrap().0;
            count.parse::<usize>().unwrap()
        };
        assert_eq!(end(&bytes[..11]), 0);
        assert!((50_000..200_000).contains(&end(&bytes[..bytes.len() / 2])), "{compression:?}");
    }
}

#[test]
fn damaged_data_is_an_error() {
    let text = text();
    for (compression, encode) in ENCODERS {
        let mut bytes = encode(&text);
        let middle = bytes.len() / 2;
        bytes[middle..middle + 4].fill(0xa5);
        let error = decoded(&bytes).unwrap_err().to_string();
        assert!(
            error.contains("a.txt: compressed data is damaged after "),
            "{compression:?} {error}"
        );
        assert!(error.ends_with("): fetch it again"), "{error}");
    }
}

#[test]
fn a_window_is_bounded() {
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(28).unwrap();
    encoder.long_distance_matching(true).unwrap();
    encoder.include_contentsize(false).unwrap();
    encoder.write_all(b"text").unwrap();
    let bytes = encoder.finish().unwrap();
    assert_eq!(decoded_from(&bytes, 0, 1 << 28).unwrap(), b"text");
    assert_refused(decoded_from(&bytes, 0, 1 << 27), "raise --memory");
}

#[test]
fn inputs_that_are_not_decoded_are_named_with_a_remedy() {
    // printf 'x' | lz4 | xxd -l 10, and so on for each program.
    let cases: [(&str, &[u8], &str); 7] = [
        (
            "a.lz4",
            b"\x04\x22\x4d\x18\x64\x40\xa7\x01\0\0",
            "LZ4: decompress it into standard input, as in `lz4cat ",
        ),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18\x64\x40\xa7\x01\0\0", "--format jsonl ... -`"),
        ("a.txt.lz4", b"\x04\x22\x4d\x18\x64\x40\xa7\x01\0\0", "--format text ... -`"),
        ("a.zip", b"PK\x03\x04\x0a\0\0\0\0\0", "`unzip -p "),
        ("a.7z", b"7z\xbc\xaf\x27\x1c\0\x04", "`7z x -so "),
        ("a.txt", b"\xff\xfeh\0i\0", "`iconv -f UTF-16 -t UTF-8 "),
        ("a.jsonl", b"\xff\xfe\0\0h\0\0\0", "`iconv -f UTF-32 -t UTF-8 "),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes, part) in cases {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = Decoded::open_at(&path, 0, 0).err().unwrap().to_string();
        assert!(error.contains(name) && error.contains(part), "{error}");
    }
}

#[test]
fn text_that_resembles_an_encoding_is_text() {
    for text in ["", "P", "PAR1 is a name", "BZh", "BZh9 and more", "ARROW1: a ship", "1AY&SY"] {
        assert_eq!(decoded(text.as_bytes()).unwrap(), text.as_bytes());
    }
}

#[test]
fn what_was_looked_at_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    for (index, bytes) in [b"some text".to_vec(), gzip(b"some text")].iter().enumerate() {
        let path = dir.path().join(index.to_string());
        std::fs::write(&path, bytes).unwrap();
        let mut decoded = Decoded::open_at(&path, 0, 0).unwrap();
        assert!(decoded.peek(4).unwrap().starts_with(b"some"));
        let mut all = Vec::new();
        assert_eq!(decoded.fill(&mut all, 3).unwrap(), 3);
        assert_eq!(decoded.peek(100).unwrap(), b"e text");
        assert_eq!(decoded.offset(), 3);
        assert_eq!(decoded.fill(&mut all, 100).unwrap(), 6);
        assert_eq!(all, b"some text");
    }
}
