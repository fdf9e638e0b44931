//! One token file becomes several: each of its documents goes to one of them, as it is stored.

use std::path::{Path, PathBuf};

use crate::copying::{Copier, open, refuse_inputs_as_outputs, start, vocabulary};
use crate::{
    BEGINNING_TOKENS, Error, Provenance, Result, TokenFile, TokenFileInfo, publish_token_files,
};

/// Writes each document of the token file `input` to one of the token files `outputs`: `part` gives the index of
/// the output for the number of a document. The metadata of the outputs is that of the input; the bytes of
/// their texts and the special tokens in these are not known. `progress` gets the bytes of tokens that were
/// copied, and of all.
///
/// # Errors
/// Fails if an output would have no document, is the input, or exists and may not be replaced, if the input is
/// not a token file, or if the disk is full. No output is left then.
///
/// # Panics
/// If `part` gives the index of no output.
pub fn divide(
    input: &Path,
    outputs: &[PathBuf],
    overwrite: bool,
    part: &dyn Fn(u64) -> usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<TokenFileInfo>> {
    let file = open(input)?;
    let mut counts = vec![0u64; outputs.len()];
    for number in 0..file.num_documents() {
        counts[part(number)] += 1;
    }
    if let Some((output, _)) = outputs.iter().zip(counts).find(|(_, count)| *count == 0) {
        let reason = format!(
            "{}: would have no document, of {} in all: add documents, or give it a larger share",
            output.display(),
            file.num_documents()
        );
        return Err(Error::Invalid(reason));
    }
    let files = [file];
    let paths: Vec<&Path> = outputs.iter().map(PathBuf::as_path).collect();
    refuse_inputs_as_outputs(&files, &paths)?;
    let [file] = &files;
    let vocabulary = vocabulary(file)?;
    let writers = paths.iter().map(|path| start(path, file, vocabulary, overwrite));
    let mut writers = writers.collect::<Result<Vec<_>>>()?;
    let mut copier = Copier::new(&files, progress);
    for document in file.documents() {
        copier.copy(file, &document, &mut writers[part(document.number)])?;
    }
    let beginning = beginning(file, part);
    let complete = writers
        .into_iter()
        .enumerate()
        .map(|(number, writer)| writer.complete(provenance(file, beginning == Some(number))));
    publish_token_files(complete.collect::<Result<Vec<_>>>()?, overwrite)
}

/// The index of the output that begins as the input does, if one does.
fn beginning(file: &TokenFile, part: &dyn Fn(u64) -> usize) -> Option<usize> {
    let documents = file.documents();
    let mut parts = documents
        .take_while(|document| document.start < BEGINNING_TOKENS as u64)
        .map(|document| part(document.number));
    let first = parts.next()?;
    parts.all(|part| part == first).then_some(first)
}

/// The origin of a part's documents.
fn provenance(file: &TokenFile, begins_as_it: bool) -> Provenance {
    let Some(info) = file.info() else {
        let sources = vec![file.prefix().display().to_string()];
        return Provenance { sources, ..Provenance::default() };
    };
    Provenance {
        tokenizer_hash: info.tokenizer_hash.clone(),
        tokenizer_content: info.tokenizer_content.clone(),
        beginning_blake3: info.beginning_blake3.clone().filter(|_| begins_as_it),
        text_bytes: 0,
        sources: info.sources.clone(),
        eos_token: info.eos_token.clone(),
        special_tokens_in_text: None,
        split_special_tokens: info.split_special_tokens,
        chat_template_blake3: info.mask.as_ref().and_then(|mask| mask.chat_template_blake3.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenFileWriter;

    #[test]
    fn every_document_is_in_its_part() {
        let dir = tempfile::tempdir().unwrap();
        let [whole, even, odd] = ["whole", "even", "odd"].map(|name| dir.path().join(name));
        let mut writer = TokenFileWriter::create(&whole, 3000).unwrap();
        let first: Vec<u32> = (0..1024).collect();
        for document in [&first[..], &[5], &[], &[6, 7]] {
            writer.push_document(document).unwrap();
        }
        let beginning_blake3 = Some("abc".to_owned());
        writer.finish(Provenance { beginning_blake3, ..Provenance::default() }).unwrap();
        let outputs = [even.clone(), odd.clone()];
        let part = |number| (number % 2) as usize;
        let infos = divide(&whole, &outputs, false, &part, &mut |_, _| ()).unwrap();
        let numbers = infos.iter().map(|info| (info.documents, info.tokens, info.vocabulary_size));
        assert_eq!(numbers.collect::<Vec<_>>(), [(2, 1024, 3000), (2, 3, 3000)]);
        let beginnings = infos.iter().map(|info| info.beginning_blake3.as_deref());
        assert_eq!(beginnings.collect::<Vec<_>>(), [Some("abc"), None]);
        let odd = TokenFile::open(&odd).unwrap();
        let mut tokens = [0; 3];
        odd.read(0, &mut tokens).unwrap();
        assert_eq!((tokens, odd.document(1).unwrap()), ([5, 6, 7], 1..3));
        let again = divide(&whole, &outputs, false, &part, &mut |_, _| ());
        assert!(matches!(again, Err(Error::Exists { .. })));
        let failed = divide(&whole, &outputs, true, &|_| 0, &mut |_, _| ()).unwrap_err();
        assert!(
            failed.to_string().contains("odd: would have no document, of 4 in all"),
            "{failed}"
        );
        let outputs = [even, whole.clone()];
        let failed = divide(&whole, &outputs, true, &part, &mut |_, _| ()).unwrap_err();
        assert!(failed.to_string().contains("is both an input and an output"), "{failed}");
    }
}
