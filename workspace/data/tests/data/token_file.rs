//! Token files: round trips, every stored type, reading across documents, and refusals.

use std::fs;
use std::path::{Path, PathBuf};

use moh_data::{
    DocumentEnd, Error, ProblemKind, TokenFile, TokenFileInfo, TokenFileWriter, TokenType, Verify,
};
use proptest::prelude::*;
use tempfile::TempDir;

/// The fields of an index, so that a test can corrupt one of them.
#[derive(Clone)]
struct Index {
    magic: Vec<u8>,
    version: u64,
    code: u8,
    sequences: u64,
    bounds: u64,
    lengths: Vec<i32>,
    offsets: Vec<i64>,
    documents: Vec<i64>,
}

impl Index {
    /// Returns the index of two documents of u16 tokens. The first document has two sequences.
    fn sound() -> Self {
        Self {
            magic: b"MMIDIDX\0\0".to_vec(),
            version: 1,
            code: 8,
            sequences: 3,
            bounds: 3,
            lengths: vec![2, 1, 3],
            offsets: vec![0, 4, 6],
            documents: vec![0, 2, 3],
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.clone();
        bytes.extend(self.version.to_le_bytes());
        bytes.push(self.code);
        bytes.extend(self.sequences.to_le_bytes());
        bytes.extend(self.bounds.to_le_bytes());
        bytes.extend(self.lengths.iter().flat_map(|item| item.to_le_bytes()));
        bytes.extend(self.offsets.iter().flat_map(|item| item.to_le_bytes()));
        bytes.extend(self.documents.iter().flat_map(|item| item.to_le_bytes()));
        bytes
    }
}

fn place(bin: &[u8], idx: &[u8]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t.v1");
    fs::write(dir.path().join("t.v1.bin"), bin).unwrap();
    fs::write(dir.path().join("t.v1.idx"), idx).unwrap();
    (dir, prefix)
}

/// Writes a token file of these documents, with a vocabulary of `ids` ids.
fn written<D: AsRef<[u32]>>(dir: &TempDir, name: &str, ids: usize, documents: &[D]) -> PathBuf {
    let prefix = dir.path().join(name);
    let mut writer = TokenFileWriter::replace(&prefix, ids).unwrap();
    for document in documents {
        writer.push_document(document.as_ref()).unwrap();
    }
    writer.finish(TokenFileInfo::default()).unwrap();
    prefix
}

fn u16s(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn read_all(file: &TokenFile) -> Vec<u32> {
    file.ids(0..file.num_tokens()).unwrap()
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T, Error>, part: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(part), "{error}");
}

fn refusal(bin: &[u8], idx: &[u8]) -> String {
    let (_dir, prefix) = place(bin, idx);
    match TokenFile::open(&prefix) {
        Err(error @ Error::TokenFile { .. }) => error.to_string(),
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn a_sound_file_is_read_joined() {
    let (_dir, prefix) = place(&u16s(&[5, 6, 7, 8, 9, 65535]), &Index::sound().bytes());
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!((file.num_tokens(), file.num_documents()), (6, 2));
    assert_eq!(file.token_type(), TokenType::U16);
    assert_eq!(read_all(&file), [5, 6, 7, 8, 9, 65535]);
    let mut two = [0; 2];
    file.read(2, &mut two).unwrap();
    assert_eq!(two, [7, 8]);
    file.read(6, &mut []).unwrap();
    assert_refused(file.read(5, &mut two), "cannot read tokens 5..7: the file has 6");
    assert_refused(file.read(u64::MAX, &mut two), "cannot read tokens 18446744073709551615..");
    assert_eq!(file.document_starts(0..6).unwrap(), [0, 3]);
    assert_eq!(file.document_starts(1..3).unwrap(), [] as [u64; 0]);
    assert_eq!(file.document_starts(3..4).unwrap(), [3]);
    assert!(file.document_starts(3..7).is_err());
    assert_eq!(file.document(1).unwrap(), 3..6);
    assert!(file.document(2).is_err());
    assert_eq!(file.longest_document(), 3);
}

#[test]
fn every_stored_integer_type_is_read() {
    for (code, item) in [(1u8, 1usize), (2, 1), (3, 2), (4, 4), (5, 8), (8, 2)] {
        let bin: Vec<u8> =
            (0..6u64).flat_map(|id| (id * 20).to_le_bytes()[..item].to_vec()).collect();
        let offsets = [0, 2, 3].map(|first| first * item as i64).to_vec();
        let (_dir, prefix) = place(&bin, &Index { code, offsets, ..Index::sound() }.bytes());
        let file = TokenFile::open(&prefix).unwrap();
        assert_eq!(read_all(&file), [0, 20, 40, 60, 80, 100], "type code {code}");
    }
}

#[test]
fn sequences_may_lie_anywhere_in_the_bin() {
    let index = Index { offsets: vec![8, 2, 2], ..Index::sound() };
    let (_dir, prefix) = place(&u16s(&[9, 1, 2, 3, 4, 5]), &index.bytes());
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!(read_all(&file), [4, 5, 1, 1, 2, 3]);
    let mut three = [0; 3];
    file.read(1, &mut three).unwrap();
    assert_eq!(three, [5, 1, 1]);
    file.read(3, &mut three).unwrap();
    assert_eq!(three, [1, 2, 3]);
    let verify = Verify { prefix: &prefix, vocabulary: Some(5), end_of_text: None };
    let problems = verify.run(&mut |_, _| ()).unwrap().problems.into_iter();
    let problems: Vec<_> = problems.map(|problem| (problem.kind, problem.count)).collect();
    assert_eq!(problems, [(ProblemKind::Offsets, 3), (ProblemKind::Ids, 1)]);
}

#[test]
fn empty_documents_and_files_are_sound() {
    let index = Index {
        sequences: 4,
        bounds: 6,
        lengths: vec![0, 2, 0, 0],
        offsets: vec![0, 0, 4, 4],
        documents: vec![0, 1, 1, 2, 3, 4],
        ..Index::sound()
    };
    let (_dir, prefix) = place(&u16s(&[1, 2]), &index.bytes());
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!(file.num_documents(), 5);
    assert_eq!(file.document_starts(0..2).unwrap(), [0]);
    assert_eq!(file.document_starts(1..2).unwrap(), [] as [u64; 0]);
    let empty = Index {
        sequences: 0,
        bounds: 1,
        lengths: vec![],
        offsets: vec![],
        documents: vec![0],
        ..Index::sound()
    };
    let (_dir, prefix) = place(&[], &empty.bytes());
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!((file.num_tokens(), file.num_documents()), (0, 0));
    assert_eq!(file.document_starts(0..0).unwrap(), [] as [u64; 0]);
}

#[test]
fn spoiled_indexes_are_refused() {
    let bin = u16s(&[0; 6]);
    let sound = Index::sound();
    let cases = [
        (Index { magic: b"MMIDIDX\0\x01".to_vec(), ..sound.clone() }, "first bytes are not"),
        (Index { version: 2, ..sound.clone() }, "version 2"),
        (Index { code: 7, ..sound.clone() }, "floating-point"),
        (Index { code: 6, ..sound.clone() }, "floating-point"),
        (Index { code: 9, ..sound.clone() }, "unknown"),
        (Index { sequences: 4, ..sound.clone() }, "truncated"),
        (Index { sequences: u64::MAX, ..sound.clone() }, "impossible number"),
        (Index { sequences: u64::MAX / 12, ..sound.clone() }, "impossible number"),
        (Index { bounds: u64::MAX / 8, ..sound.clone() }, "impossible number"),
        (Index { bounds: 1 << 40, ..sound.clone() }, "truncated"),
        (Index { bounds: 0, documents: vec![], ..sound.clone() }, "no document bounds"),
        (Index { lengths: vec![2, -1, 3], ..sound.clone() }, "sequence 1 has the length -1"),
        (Index { offsets: vec![0, -4, 6], ..sound.clone() }, "starts at byte -4"),
        (Index { offsets: vec![0, 5, 6], ..sound.clone() }, "not a multiple"),
        (Index { offsets: vec![0, 4, 8], ..sound.clone() }, "ends at byte 14, but the .bin has 12"),
        (Index { offsets: vec![0, 4, i64::MAX - 1], ..sound.clone() }, "the .bin has 12"),
        (Index { lengths: vec![2, 1, i32::MAX], ..sound.clone() }, "the .bin has 12"),
        (Index { documents: vec![1, 2, 3], ..sound.clone() }, "document 0 starts at sequence 1"),
        (Index { documents: vec![0, 3, 2], ..sound.clone() }, "document 2 starts at sequence 2"),
        (Index { documents: vec![0, -1, 3], ..sound.clone() }, "starts at sequence -1"),
        (Index { documents: vec![0, 4, 3], ..sound.clone() }, "starts at sequence 4"),
        (Index { documents: vec![0, 1, 2], ..sound.clone() }, "end at sequence 2, expected 3"),
    ];
    for (index, part) in cases {
        let message = refusal(&bin, &index.bytes());
        assert!(message.contains(part) && message.contains("t.v1.idx"), "{message}");
    }
}

#[test]
fn every_truncation_is_refused() {
    let (bin, idx) = (u16s(&[1; 6]), Index::sound().bytes());
    for length in 0..idx.len() {
        refusal(&bin, &idx[..length]);
    }
    for length in 0..bin.len() {
        refusal(&bin[..length], &idx);
    }
    let mut longer = idx.clone();
    longer.push(0);
    refusal(&bin, &longer);
}

#[test]
fn a_name_with_its_ending_is_explained() {
    let (_dir, prefix) = place(&u16s(&[0; 6]), &Index::sound().bytes());
    let error = TokenFile::open(Path::new(&format!("{}.bin", prefix.display()))).unwrap_err();
    assert!(error.to_string().ends_with("t.v1"), "{error}");
    assert_refused(TokenFile::open(&prefix.with_file_name("none")), "none.bin");
}

#[test]
fn ids_outside_the_vocabulary_are_found() {
    let (_dir, prefix) = place(&u16s(&[5, 6, 7, 8, 9, 65535]), &Index::sound().bytes());
    let mut file = TokenFile::open(&prefix).unwrap();
    let mut all = [0; 6];
    file.limit_vocabulary(65_536);
    file.read(0, &mut all).unwrap();
    file.limit_vocabulary(65_535);
    assert_refused(file.read(0, &mut all), "token 5 has the id 65535, outside");
    file.limit_vocabulary(8);
    let mut four = [0; 4];
    file.read(0, &mut four[..3]).unwrap();
    assert_refused(file.read(0, &mut four), "token 3 has the id 8, outside the vocabulary of 8:");
    assert_refused(file.read(0, &mut four), "t.v1.bin");
}

#[test]
fn negative_ids_are_an_error() {
    let bin: Vec<u8> = [1i32, -7, 2, 3, 4, 5].iter().flat_map(|id| id.to_le_bytes()).collect();
    let index = Index { code: 4, offsets: vec![0, 8, 12], ..Index::sound() };
    let (_dir, prefix) = place(&bin, &index.bytes());
    let file = TokenFile::open(&prefix).unwrap();
    let error = file.read(0, &mut [0; 2]).unwrap_err();
    assert!(error.to_string().contains("token 1 has the id -7, outside"), "{error}");
}

#[test]
fn a_writer_leaves_three_files_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t");
    let names = || {
        let entries = fs::read_dir(dir.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let mut writer = TokenFileWriter::create(&prefix, 10).unwrap();
    writer.push_document(&[1, 2]).unwrap();
    assert_refused(writer.push_document(&[3, 10]), "token 3 has the id 10, outside");
    drop(writer);
    assert!(names().is_empty());

    let mut writer = TokenFileWriter::create(&prefix, 10).unwrap();
    writer.push_document(&[1, 2]).unwrap();
    let info = TokenFileInfo {
        tokenizer_hash: Some("abc".to_owned()),
        text_bytes: 7,
        sources: vec!["x".to_owned()],
        eos_token: DocumentEnd::Token("e".to_owned()),
        special_tokens_in_text: Some([("e".to_owned(), 2)].into()),
        split_special_tokens: true,
        ..TokenFileInfo::default()
    };
    let info = writer.finish(info).unwrap();
    assert_eq!(names(), ["t.bin", "t.idx", "t.json"]);
    assert_eq!((info.documents, info.tokens, info.vocabulary_size), (1, 2, 10));
    assert_eq!(TokenFile::open(&prefix).unwrap().info(), Some(&info));
    assert!(matches!(TokenFileWriter::create(&prefix, 10), Err(Error::Exists { .. })));

    let file = TokenFile::open(&written(&dir, "t", 70_000, &[[69_999u32]])).unwrap();
    assert_eq!((file.token_type(), read_all(&file)), (TokenType::I32, vec![69_999]));
    assert_eq!(names().len(), 3);
}

#[test]
fn a_json_of_other_files_is_refused() {
    let (dir, prefix) = place(&u16s(&[0; 6]), &Index::sound().bytes());
    let json = dir.path().join("t.v1.json");
    let other = r#"{"vocabulary_size": 9, "documents": 2, "tokens": 7, "dtype": "u16"}"#;
    fs::write(&json, other).unwrap();
    assert_refused(TokenFile::open(&prefix), "do not belong together");
    fs::write(&json, "[]").unwrap();
    assert_refused(TokenFile::open(&prefix), "t.v1.json");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_is_written_is_read(
        documents in prop::collection::vec(prop::collection::vec(0u32..65_499, 0..40), 0..300),
        large: bool,
        cut in (0.0f64..1.0, 0.0f64..1.0),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let vocabulary = if large { 65_500 } else { 65_499 };
        let file = TokenFile::open(&written(&dir, "t", vocabulary, &documents)).unwrap();
        let joined = documents.concat();
        prop_assert_eq!(read_all(&file), joined.clone());
        prop_assert_eq!(file.num_documents(), documents.len() as u64);

        let total = joined.len() as f64;
        let (a, b) = ((cut.0 * total) as u64, (cut.1 * total) as u64);
        let range = a.min(b)..a.max(b);
        let part = file.ids(range.clone()).unwrap();
        prop_assert_eq!(&part[..], &joined[range.start as usize..range.end as usize]);

        let mut expected = Vec::new();
        let mut position = 0;
        for (number, document) in documents.iter().enumerate() {
            let end = position + document.len() as u64;
            prop_assert_eq!(file.document(number as u64).unwrap(), position..end);
            if !document.is_empty() && range.contains(&position) {
                expected.push(position);
            }
            position = end;
        }
        prop_assert_eq!(file.document_starts(range).unwrap(), expected);
    }

    #[test]
    fn spoiled_bytes_never_panic(
        spoiled in prop::collection::vec((0usize..94, any::<u8>()), 1..4),
    ) {
        let mut idx = Index::sound().bytes();
        for (at, byte) in spoiled {
            idx[at] = byte;
        }
        let (_dir, prefix) = place(&u16s(&[1, 2, 3, 4, 5, 6]), &idx);
        if let Ok(file) = TokenFile::open(&prefix) {
            let tokens = file.num_tokens();
            let _ = file.read(0, &mut vec![0; tokens as usize]);
            let _ = file.document_starts(0..tokens);
            for document in 0..file.num_documents() {
                file.document(document).unwrap();
            }
            file.longest_document();
        }
    }
}

#[test]
fn the_largest_id_and_the_first_one_outside_are_found_across_pieces() {
    // Three pieces of a thread, and a part.
    let count = 3 * (1 << 18) + 77;
    let dir = tempfile::tempdir().unwrap();
    let mut tokens: Vec<u32> = (0..count).map(|at| at as u32 % 500).collect();
    (tokens[300_000], tokens[700_000]) = (900, 990);
    let mut file = TokenFile::open(&written(&dir, "large", 1000, &[tokens])).unwrap();
    let all = 0..count as u64;
    assert_eq!(file.largest_id(all.clone()).unwrap(), 990);
    assert_eq!(file.largest_id(0..300_000).unwrap(), 499);
    assert_eq!(file.largest_id(300_000..300_001).unwrap(), 900);
    assert_eq!(file.largest_id(5..5).unwrap(), 0);
    assert_refused(file.largest_id(0..count as u64 + 1), "cannot read tokens 0..");
    file.limit_vocabulary(900);
    assert_refused(file.largest_id(all), "token 300000 has the id 900, outside");
}

#[test]
fn what_is_known_of_the_ids_is_proven_by_type_or_record() {
    let (_dir, prefix) = place(&u16s(&[1, 2, 3, 4, 5, 6]), &Index::sound().bytes());
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!(file.ids_below(&file.content()).unwrap(), Some(1 << 16));
    let signed = Index { code: 3, ..Index::sound() };
    let (_dir, prefix) = place(&u16s(&[1, 2, 3, 4, 5, 6]), &signed.bytes());
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!(file.ids_below(&file.content()).unwrap(), None);

    let dir = tempfile::tempdir().unwrap();
    let [one, other] = [("one", 3u32), ("other", 299)]
        .map(|(name, last)| written(&dir, name, 300, &[[1, 2, last]]));
    let file = TokenFile::open(&one).unwrap();
    assert_eq!(file.ids_below(&file.content()).unwrap(), Some(300));
    // The same lengths give the same index. The record is of other tokens.
    fs::copy(other.with_extension("bin"), one.with_extension("bin")).unwrap();
    let file = TokenFile::open(&one).unwrap();
    let error = file.ids_below(&file.content()).unwrap_err().to_string();
    assert!(error.contains("one.json") && error.contains("another .bin"), "{error}");
}

#[test]
fn content_is_the_same_at_another_path_and_differs_with_a_token() {
    let content = |ids: &[u16], index: Index| {
        let (_dir, prefix) = place(&u16s(ids), &index.bytes());
        TokenFile::open(&prefix).unwrap().content()
    };
    let one = content(&[1, 2, 3, 4, 5, 6], Index::sound());
    assert_eq!(content(&[1, 2, 3, 4, 5, 6], Index::sound()), one);
    let token = content(&[1, 2, 3, 4, 5, 7], Index::sound());
    assert_eq!(token.idx_blake3, one.idx_blake3);
    assert_ne!(token.bin_sample_blake3, one.bin_sample_blake3);
    let bounds = content(&[1, 2, 3, 4, 5, 6], Index { documents: vec![0, 1, 3], ..Index::sound() });
    assert_ne!(bounds.idx_blake3, one.idx_blake3);
}
