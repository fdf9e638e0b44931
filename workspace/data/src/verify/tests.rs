//! Every kind of problem is found, and no bytes make the verification panic.

use std::fs;
use std::sync::LazyLock;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::{TokenFileInfo, TokenFileWriter};

const END: u32 = 9;

/// Writes a token file with these documents, a vocabulary of ten ids, and the end of text </s>.
fn written(documents: &[&[u32]]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t");
    let mut writer = TokenFileWriter::create(&prefix, 10).unwrap();
    for document in documents {
        writer.push_document(document).unwrap();
    }
    let eos_token = DocumentEnd::Token("</s>".to_owned());
    writer.finish(TokenFileInfo { eos_token, ..TokenFileInfo::default() }).unwrap();
    (dir, prefix)
}

fn sound() -> (TempDir, PathBuf) {
    written(&[&[1, 2, END], &[3, END], &[4, 5, 6, END]])
}

fn verify(prefix: &Path) -> Verification {
    let verify = Verify { prefix, vocabulary: None, end_of_text: None };
    let mut seen = 0;
    let found = verify.run(&mut |done, _| seen = done).unwrap();
    if found.documents > 0 {
        let item = TokenFile::open_without_info(prefix).unwrap().token_type().bytes() as u64;
        assert_eq!(seen, found.tokens * item);
    }
    found
}

fn problems_with(prefix: &Path, vocabulary: Option<u64>, end_of_text: Option<u32>) -> Vec<Problem> {
    Verify { prefix, vocabulary, end_of_text }.run(&mut |_, _| ()).unwrap().problems
}

/// Returns kind, count and first document of each problem.
fn kinds(prefix: &Path) -> Vec<(ProblemKind, u64, Option<u64>)> {
    let problems = verify(prefix).problems.into_iter();
    problems.map(|problem| (problem.kind, problem.count, problem.document)).collect()
}

fn change(prefix: &Path, ending: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let path = with_ending(prefix, ending);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(&path, bytes).unwrap();
}

#[test]
fn a_sound_file_has_no_problem() {
    let (_dir, prefix) = sound();
    let found = verify(&prefix);
    assert_eq!((found.documents, found.tokens, found.vocabulary), (3, 9, Some(10)));
    assert_eq!(found.problems, []);
    fs::remove_file(with_ending(&prefix, ".json")).unwrap();
    let found = verify(&prefix);
    assert_eq!((found.vocabulary, found.problems.len()), (None, 0));
    let (_dir, prefix) = written(&[]);
    assert_eq!(kinds(&prefix), []);
}

#[test]
fn documents_tell_how_the_file_was_made() {
    let (_dir, prefix) =
        written(&[&[1, END], &[2], &[], &[2, END], &[1, END], &[1, END], &[2], &[]]);
    let expected = [
        (ProblemKind::EndOfText, 2, Some(1)),
        (ProblemKind::Empty, 2, Some(2)),
        (ProblemKind::Duplicates, 3, Some(4)),
    ];
    assert_eq!(kinds(&prefix), expected);
    let messages = verify(&prefix).problems.into_iter().map(|problem| problem.message);
    let messages = messages.collect::<Vec<_>>().join("\n");
    for part in [
        ": 2 of 8 documents do not end with </s>, assumed to have the id 9, which ends most of them, first document 1\n",
        ": 2 of 8 documents have no tokens, first document 2\n",
        ": 3 of 8 documents (37.50%) repeat an earlier one, first document 4, which repeats document 0",
    ] {
        assert!(messages.contains(part), "{messages}");
    }
    let problems = problems_with(&prefix, None, Some(2));
    assert_eq!((problems[0].count, problems[0].document), (4, Some(0)));
    assert!(problems[0].message.contains("with </s>, of id 2, first"), "{}", problems[0].message);
}

#[test]
fn ids_outside_the_vocabulary_are_counted() {
    let (_dir, prefix) = sound();
    change(&prefix, ".bin", |bytes| {
        bytes[2 * 4] = END as u8 + 1;
        bytes[2 * 7 + 1] = 255;
    });
    let found = verify(&prefix);
    // The content has changed too.
    assert_eq!(found.problems[0].kind, ProblemKind::Record);
    assert_eq!((found.problems[1].kind, found.problems[1].count), (ProblemKind::Ids, 2));
    let part = ".bin: the ids of 2 of 9 tokens are outside the vocabulary of 10, first 10, token 4, in document 1";
    assert!(found.problems[1].message.ends_with(part), "{}", found.problems[1].message);
    let problems = problems_with(&prefix, Some(11), None);
    assert_eq!((problems[1].kind, problems[1].count), (ProblemKind::Ids, 1));
    assert_eq!(problems[1].document, Some(2));
}

#[test]
fn a_large_document_is_read_by_several_threads() {
    let mut large = vec![1; 3 << 20];
    large[(2 << 20) + 5] = 9;
    let (_dir, prefix) = written(&[&[2, END], &large]);
    let problems = problems_with(&prefix, Some(9), None);
    assert_eq!((problems[0].kind, problems[0].count), (ProblemKind::Ids, 2));
    change(&prefix, ".bin", |bytes| bytes[2] = 0);
    let problems = problems_with(&prefix, Some(9), None);
    let ids = problems.iter().find(|problem| problem.kind == ProblemKind::Ids).unwrap();
    let part = format!("first 9, token {}, in document 1", (2 << 20) + 5 + 2);
    assert!(ids.message.ends_with(&part), "{}", ids.message);
}

#[test]
fn damaged_tables_are_found() {
    // The second of three offsets, after the header and three lengths.
    const OFFSET: usize = 34 + 3 * 4 + 8;
    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, Damage); 4] = [
        (".idx", |bytes| bytes.truncate(bytes.len() - 3)),
        (".idx", Vec::clear),
        (".bin", |bytes| bytes.truncate(17)),
        (".idx", |bytes| bytes[OFFSET + 7] = 128),
    ];
    for (ending, damage) in damages {
        let (_dir, prefix) = sound();
        change(&prefix, ending, damage);
        assert_eq!(kinds(&prefix), [(ProblemKind::Tables, 1, None)]);
    }
    let (_dir, prefix) = sound();
    change(&prefix, ".idx", |bytes| bytes[OFFSET] = 4);
    let found = kinds(&prefix);
    assert_eq!(found[..2], [(ProblemKind::Offsets, 2, None), (ProblemKind::Record, 1, None)]);
    let message = &verify(&prefix).problems[0].message;
    let part = ".idx: 2 of 3 sequences do not begin where the one before ends, first sequence 1";
    assert!(message.ends_with(part), "{message}");
    let (_dir, prefix) = sound();
    change(&prefix, ".bin", |bytes| bytes.extend([1, 0]));
    assert_eq!(kinds(&prefix), [(ProblemKind::Size, 2, None), (ProblemKind::Record, 1, None)]);
}

#[test]
fn a_wrong_record_is_found_and_a_missing_file_is_an_error() {
    let (_dir, prefix) = sound();
    change(&prefix, ".json", |bytes| bytes.truncate(9));
    assert_eq!(kinds(&prefix), [(ProblemKind::Record, 1, None)]);
    let (_other_dir, other) = written(&[&[1, END]]);
    fs::copy(with_ending(&other, ".json"), with_ending(&prefix, ".json")).unwrap();
    assert_eq!(kinds(&prefix), [(ProblemKind::Record, 1, None)]);
    fs::remove_file(with_ending(&prefix, ".bin")).unwrap();
    let verify = Verify { prefix: &prefix, vocabulary: None, end_of_text: None };
    assert!(matches!(verify.run(&mut |_, _| ()), Err(Error::Io { .. })));
}

/// The bytes of a sound token file's three files. Writing them without a sync takes no time.
static SOUND: LazyLock<[Vec<u8>; 3]> = LazyLock::new(|| {
    let (_dir, prefix) = sound();
    [".bin", ".idx", ".json"].map(|ending| fs::read(with_ending(&prefix, ending)).unwrap())
});

proptest! {
    #[test]
    fn no_bytes_make_it_panic(
        changes in prop::collection::vec((0..3usize, any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in prop::option::of((0..3usize, any::<prop::sample::Index>())),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let prefix = dir.path().join("t");
        let endings = [".bin", ".idx", ".json"];
        for (ending, bytes) in endings.iter().zip(SOUND.iter()) {
            fs::write(with_ending(&prefix, ending), bytes).unwrap();
        }
        for (file, at, byte) in changes {
            change(&prefix, endings[file], |bytes| {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            });
        }
        if let Some((file, at)) = cut {
            change(&prefix, endings[file], |bytes| bytes.truncate(at.index(bytes.len())));
        }
        verify(&prefix);
        if let Ok(file) = TokenFile::open(&prefix) {
            (0..file.num_documents()).for_each(|number| drop(file.document(number)));
        }
    }
}

#[test]
fn a_mask_is_verified() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t");
    let write = || {
        let mut writer = TokenFileWriter::replace(&prefix, 10).unwrap().with_mask().unwrap();
        for (ids, mask) in
            [(&[1, 2, 9][..], &[0, 1, 1][..]), (&[3], &[0]), (&[], &[]), (&[4, 5], &[0, 1])]
        {
            writer.push_masked_document(ids, mask).unwrap();
        }
        writer.finish(TokenFileInfo::default()).unwrap()
    };
    assert_eq!(write().mask.unwrap().trained_tokens, 3);
    let empty = (ProblemKind::Empty, 1, Some(2));
    let untrained = (ProblemKind::Untrained, 1, Some(1));
    assert_eq!(kinds(&prefix), [empty, untrained]);
    change(&prefix, ".mask", |bytes| bytes[4] = 7);
    assert!(kinds(&prefix).contains(&(ProblemKind::Mask, 1, None)));
    // Another mask with as many trained tokens is not the recorded mask.
    change(&prefix, ".mask", |bytes| bytes.copy_from_slice(&[1, 1, 1, 0, 0, 0]));
    assert!(kinds(&prefix).contains(&(ProblemKind::Record, 1, None)));
    for damage in [|bytes: &mut Vec<u8>| bytes.push(0), |bytes: &mut Vec<u8>| bytes.truncate(0)] {
        write();
        change(&prefix, ".mask", damage);
        assert!(kinds(&prefix).contains(&(ProblemKind::Mask, 1, None)));
        let error = TokenFile::open(&prefix).unwrap_err().to_string();
        assert!(
            error.contains("t.mask: ") && error.contains("a mask has a byte for each"),
            "{error}"
        );
    }
    fs::remove_file(with_ending(&prefix, ".mask")).unwrap();
    assert!(kinds(&prefix).contains(&(ProblemKind::Mask, 1, None)));
    let error = TokenFile::open(&prefix).unwrap_err().to_string();
    assert!(error.contains("t.mask: ") && error.contains("it is missing"), "{error}");
}
