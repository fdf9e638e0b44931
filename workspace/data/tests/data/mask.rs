//! Masks of token files: written, read, continued and replaced.

use std::fs;
use std::path::Path;

use moh_data::{
    MaskInfo, TokenFile, TokenFileInfo, TokenFileWriter, Written, publish_remaining, with_ending,
};

type Documents<'a> = [(&'a [u32], &'a [u8])];

const DOCUMENTS: &Documents<'static> =
    &[(&[1, 2, 9], &[0, 1, 1]), (&[3], &[0]), (&[], &[]), (&[4, 5], &[1, 0])];

fn push(mut writer: TokenFileWriter, documents: &Documents<'_>) -> TokenFileWriter {
    for (ids, mask) in documents {
        writer.push_masked_document(ids, mask).unwrap();
    }
    writer
}

fn rendered_by(template: &str) -> TokenFileInfo {
    let chat_template_blake3 = Some(template.to_owned());
    let mask = MaskInfo { chat_template_blake3, ..MaskInfo::default() };
    TokenFileInfo { mask: Some(mask), ..TokenFileInfo::default() }
}

fn write(prefix: &Path, documents: &Documents<'_>) {
    let writer = TokenFileWriter::replace(prefix, 10).unwrap().with_mask().unwrap();
    push(writer, documents).finish(rendered_by("abc")).unwrap();
}

fn write_without(prefix: &Path) {
    let mut writer = TokenFileWriter::replace(prefix, 10).unwrap();
    writer.push_document(&[1, 2]).unwrap();
    writer.finish(TokenFileInfo::default()).unwrap();
}

fn mask(prefix: &Path) -> Vec<u8> {
    let file = TokenFile::open(prefix).unwrap();
    let mut mask = vec![7; usize::try_from(file.num_tokens()).unwrap()];
    file.read_mask(0, &mut mask).unwrap();
    mask
}

#[test]
fn a_mask_has_a_byte_for_each_token() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t");
    write(&prefix, DOCUMENTS);
    assert_eq!(fs::read(with_ending(&prefix, ".mask")).unwrap(), [0, 1, 1, 0, 1, 0]);
    let file = TokenFile::open(&prefix).unwrap();
    let recorded = file.info().unwrap().mask.clone().unwrap();
    assert_eq!(
        (recorded.trained_tokens, recorded.chat_template_blake3.as_deref()),
        (3, Some("abc"))
    );
    assert!(file.has_mask() && file.ids_below(&file.content()).unwrap() == Some(10));
    assert_eq!((file.count_trained(0..6).unwrap(), file.count_trained(2..2).unwrap()), (3, 0));
    assert!(file.count_trained(0..7).is_err() && file.read_mask(6, &mut [0]).is_err());
    // Without a mask, all tokens are trained on.
    write_without(&prefix);
    assert!(!with_ending(&prefix, ".mask").exists(), "the mask of the file that was replaced");
    assert_eq!(mask(&prefix), [1, 1]);
    assert_eq!(TokenFile::open(&prefix).unwrap().count_trained(0..2).unwrap(), 2);
}

#[test]
fn a_mask_of_another_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t");
    write_without(&prefix);
    fs::write(with_ending(&prefix, ".mask"), [1, 0]).unwrap();
    let error = TokenFile::open(&prefix).unwrap_err().to_string();
    assert!(error.contains("t.mask: ") && error.contains("the .json records no mask"), "{error}");
    assert!(TokenFileWriter::create(&prefix, 10).is_err());
    // Other programs write no `.json`.
    fs::remove_file(with_ending(&prefix, ".json")).unwrap();
    assert_eq!(mask(&prefix), [1, 0]);
}

#[test]
fn what_is_no_mask_of_a_document_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t");
    let mut writer = TokenFileWriter::create(&prefix, 10).unwrap();
    let error = writer.push_masked_document(&[1], &[1]).unwrap_err().to_string();
    assert!(error.contains("written without a mask"), "{error}");
    let mut writer = TokenFileWriter::create(&prefix, 10).unwrap().with_mask().unwrap();
    for mask in [&[1u8, 1][..], &[], &[2]] {
        let error = writer.push_masked_document(&[1], mask).unwrap_err().to_string();
        assert!(error.contains("expected 0 or 1 for each token"), "{error}");
    }
    writer.push_masked_document(&[3], &[0]).unwrap();
    writer.push_document(&[4, 5]).unwrap();
    writer.finish(TokenFileInfo::default()).unwrap();
    assert_eq!(mask(&prefix), [0, 1, 1]);
}

#[test]
fn a_writer_continues_behind_what_was_synced() {
    let dir = tempfile::tempdir().unwrap();
    let [whole, prefix] = ["whole", "t"].map(|name| dir.path().join(name));
    write(&whole, DOCUMENTS);
    let working = dir.path().join("work");
    fs::create_dir(&working).unwrap();
    let resume = |written| {
        TokenFileWriter::resume(&prefix, 10, false, &working, written).unwrap().with_mask().unwrap()
    };
    let mut writer = push(resume(Written::default()), &DOCUMENTS[..2]);
    writer.sync().unwrap();
    let written = writer.written();
    // Documents that were not synced are removed.
    drop(push(writer, &[(&[7, 7], &[1, 1])]));
    let complete = push(resume(written), &DOCUMENTS[2..]).complete(rendered_by("abc")).unwrap();
    drop(complete);
    publish_remaining(&prefix, &working, false, true).unwrap();
    for ending in [".bin", ".idx", ".mask", ".json"] {
        let bytes = |prefix: &Path| fs::read(with_ending(prefix, ending)).unwrap();
        assert_eq!(bytes(&prefix), bytes(&whole), "{ending}");
    }
    assert_eq!(fs::read_dir(&working).unwrap().count(), 0);
}

#[test]
fn a_file_without_a_mask_replaces_one_with_it_even_if_it_is_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("t");
    write(&prefix, DOCUMENTS);
    let working = dir.path().join("work");
    fs::create_dir(&working).unwrap();
    let mut writer =
        TokenFileWriter::resume(&prefix, 10, true, &working, Written::default()).unwrap();
    writer.push_document(&[1; 6]).unwrap();
    drop(writer.complete(TokenFileInfo::default()).unwrap());
    publish_remaining(&prefix, &working, true, false).unwrap();
    assert_eq!(mask(&prefix), [1; 6]);
}
