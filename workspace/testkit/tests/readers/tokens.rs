//! The index of a token file, and its mask.

use moh_data::{TokenFile, TokenFileInfo, TokenFileWriter, Verify};

use crate::{outcome, target};

#[test]
fn a_mutated_token_index_is_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("text");
    let mut writer = TokenFileWriter::create(&prefix, 64).unwrap();
    for document in 1..9u32 {
        writer.push_document(&(0..document * 3).collect::<Vec<_>>()).unwrap();
    }
    writer.finish(TokenFileInfo::default()).unwrap();
    let index = prefix.with_extension("idx");
    let seeds = &[std::fs::read(&index).unwrap()];
    target("token-index", seeds, 1).run(|input| {
        std::fs::write(&index, input).unwrap();
        let verify = Verify { prefix: &prefix, vocabulary: None, end_of_text: None };
        outcome(verify.run(&mut |_, _| ()).map(|_| ()))?;
        let file = TokenFile::open(&prefix).map_err(|error| error.to_string())?;
        (0..file.num_documents()).for_each(|number| drop(file.document(number)));
        let mut window = [0; 5];
        let last = file.num_tokens().saturating_sub(5);
        outcome(file.read(last.min(3), &mut window).and_then(|()| file.read(last, &mut window)))
    });
}

#[test]
fn a_mutated_mask_is_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("text");
    let mut writer = TokenFileWriter::create(&prefix, 64).unwrap().with_mask().unwrap();
    for document in 1..9u32 {
        let ids: Vec<u32> = (0..document * 3).collect();
        let mask: Vec<u8> = ids.iter().map(|id| (id % 2) as u8).collect();
        writer.push_masked_document(&ids, &mask).unwrap();
    }
    writer.finish(TokenFileInfo::default()).unwrap();
    let mask = prefix.with_extension("mask");
    let seeds = &[std::fs::read(&mask).unwrap()];
    target("token-mask", seeds, 1).run(|input| {
        std::fs::write(&mask, input).unwrap();
        let verify = Verify { prefix: &prefix, vocabulary: None, end_of_text: None };
        let found = verify.run(&mut |_, _| ()).map_err(|error| error.to_string())?;
        let is_fault = found.problems.iter().any(|problem| problem.kind.is_fault());
        let file = TokenFile::open(&prefix).map_err(|error| error.to_string())?;
        let mut window = [0; 5];
        file.read_mask(3, &mut window).map_err(|error| error.to_string())?;
        let count = file.count_trained(0..file.num_tokens()).map_err(|error| error.to_string())?;
        assert!(count <= file.num_tokens() && (is_fault || input.iter().all(|&byte| byte < 2)));
        Ok(())
    });
}
