//! Several token files become one: their documents one after the other, as they are stored.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::copying::{Copier, open, refuse_inputs_as_outputs, start, vocabulary};
use crate::{
    BEGINNING_TOKENS, DocumentEnd, Error, Provenance, Result, TokenFile, TokenFileInfo,
    TokenizerContent,
};

/// What to do about a missing `.json`: the tokenizer and the end of text that it names cannot be told from the tokens.
const WITHOUT_RECORD: &str = "; fetch the missing one again, or a recipe takes both as two sources";

/// Writes the documents of `inputs` to the token file `prefix`. Its metadata has the tokenizer of the inputs,
/// which is the same, and the sums of their numbers. `progress` gets the bytes of tokens that were copied, and
/// of all.
///
/// # Errors
/// Fails without an input, if the inputs differ in the type of their tokens or in what they record of
/// tokenizer and end of text, if an input is not a token file or is the output, if the output exists and may
/// not be replaced, or if the disk is full.
pub fn merge(
    inputs: &[PathBuf],
    prefix: &Path,
    overwrite: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<TokenFileInfo> {
    let files = inputs.iter().map(|input| open(input)).collect::<Result<Vec<_>>>()?;
    let Some(first) = files.first() else {
        return Err(Error::Invalid("no token file to merge".to_owned()));
    };
    for file in &files[1..] {
        if let Some(difference) = difference(first, file) {
            return Err(Error::Invalid(format!(
                "{}: cannot be merged with {}: {difference}: prepare the text of one of them as that of the other",
                file.prefix().display(),
                first.prefix().display()
            )));
        }
    }
    refuse_inputs_as_outputs(&files, &[prefix])?;
    let mut size = 0;
    for file in &files {
        size = size.max(vocabulary(file)?);
    }
    let mut writer = start(prefix, first, size, overwrite)?;
    let mut copier = Copier::new(&files, progress);
    for file in &files {
        for document in file.documents() {
            copier.copy(file, &document, &mut writer)?;
        }
    }
    writer.finish(provenance(&files))
}

/// What a file has otherwise than the first one, so that they cannot be one file; `None` if nothing.
fn difference(first: &TokenFile, file: &TokenFile) -> Option<String> {
    let differs = |name: &str, of_first: &str, of_file: &str| {
        (of_first != of_file).then(|| format!("{name} {of_file}, not {of_first}"))
    };
    let dtype = differs("dtype", first.token_type().name(), file.token_type().name());
    if dtype.is_some() {
        return dtype;
    }
    let mask = match (first.has_mask(), file.has_mask()) {
        (true, false) => {
            "it has no mask of the tokens that are trained on, which the first one has"
        }
        (false, true) => {
            "it has a mask of the tokens that are trained on, which the first one has not"
        }
        _ => "",
    };
    if !mask.is_empty() {
        return Some(format!("{mask}; a recipe takes both as two sources"));
    }
    let (first, file) = match (first.info(), file.info()) {
        (Some(first), Some(file)) => (first, file),
        (None, None) => return None,
        (Some(_), None) => {
            return Some(format!("it has no .json, which the first one has{WITHOUT_RECORD}"));
        }
        (None, Some(_)) => {
            return Some(format!("it has a .json, which the first one has not{WITHOUT_RECORD}"));
        }
    };
    let hash = |info: &TokenFileInfo| info.tokenizer_hash.clone().unwrap_or("none".to_owned());
    let tokenizer = match (&first.tokenizer_content, &file.tokenizer_content) {
        (Some(first), Some(file)) => {
            let part = TokenizerContent::first_difference(first, file);
            part.map(|part| format!("{part} of the tokenizer differs"))
        }
        _ => differs("tokenizer_hash", &hash(first), &hash(file)),
    };
    let size = |info: &TokenFileInfo| info.vocabulary_size.to_string();
    let end = |info: &TokenFileInfo| match &info.eos_token {
        DocumentEnd::Token(token) => format!("{token:?}"),
        DocumentEnd::Nothing => "null".to_owned(),
        DocumentEnd::Unknown => "unknown".to_owned(),
    };
    let splits = |info: &TokenFileInfo| info.split_special_tokens.to_string();
    let chat = |info: &TokenFileInfo| {
        let template = info.mask.as_ref().and_then(|mask| mask.chat_template_blake3.clone());
        template.unwrap_or("none".to_owned())
    };
    tokenizer
        .or_else(|| differs("vocabulary_size", &size(first), &size(file)))
        .or_else(|| differs("eos_token", &end(first), &end(file)))
        .or_else(|| differs("split_special_tokens", &splits(first), &splits(file)))
        .or_else(|| differs("chat_template_blake3", &chat(first), &chat(file)))
}

/// The origin of the documents of all files.
fn provenance(files: &[TokenFile]) -> Provenance {
    let infos = || files.iter().filter_map(TokenFile::info);
    let Some(first) = infos().next() else {
        let sources = files.iter().map(|file| file.prefix().display().to_string()).collect();
        return Provenance { sources, ..Provenance::default() };
    };
    let mut known = BTreeSet::new();
    let sources = infos().flat_map(|info| &info.sources).filter(|&source| known.insert(source));
    let sources = sources.cloned().collect();
    let mut special = Some(BTreeMap::new());
    for info in infos() {
        special = special.zip(info.special_tokens_in_text.as_ref()).map(|(mut all, found)| {
            for (token, count) in found {
                *all.entry(token.clone()).or_default() += count;
            }
            all
        });
    }
    let is_known = infos().all(|info| info.text_bytes > 0 || info.tokens == 0);
    let text_bytes = match is_known {
        true => infos().map(|info| info.text_bytes).fold(0, u64::saturating_add),
        false => 0,
    };
    // The first tokens are those of one file, or their text is not known.
    let mut texts = files.iter().filter(|file| file.num_tokens() > 0);
    let begins = texts
        .next()
        .filter(|file| file.num_tokens() >= BEGINNING_TOKENS as u64 || texts.next().is_none());
    Provenance {
        tokenizer_hash: first.tokenizer_hash.clone(),
        tokenizer_content: infos().find_map(|info| info.tokenizer_content.clone()),
        beginning_blake3: begins.and_then(|file| file.info()?.beginning_blake3.clone()),
        text_bytes,
        sources,
        eos_token: first.eos_token.clone(),
        special_tokens_in_text: special,
        split_special_tokens: first.split_special_tokens,
        chat_template_blake3: first
            .mask
            .as_ref()
            .and_then(|mask| mask.chat_template_blake3.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenFileWriter;
    use crate::pending::with_ending;

    fn write(prefix: &Path, vocabulary: usize, documents: &[&[u32]], provenance: Provenance) {
        let mut writer = TokenFileWriter::replace(prefix, vocabulary).unwrap();
        for document in documents {
            writer.push_document(document).unwrap();
        }
        writer.finish(provenance).unwrap();
    }

    fn origin(source: &str, special: Option<u64>) -> Provenance {
        Provenance {
            tokenizer_hash: Some("abc".to_owned()),
            beginning_blake3: Some(source.to_owned()),
            text_bytes: 10,
            sources: vec![source.to_owned(), "both".to_owned()],
            eos_token: DocumentEnd::Token("</s>".to_owned()),
            special_tokens_in_text: special
                .map(|count| BTreeMap::from([("<s>".to_owned(), count)])),
            ..Provenance::default()
        }
    }

    #[test]
    fn documents_are_those_of_one_writer() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, all, merged] = ["a", "b", "all", "merged"].map(|name| dir.path().join(name));
        let documents: [&[u32]; 4] = [&[1, 2, 9], &[], &[3], &[4, 9]];
        write(&a, 10, &documents[..2], origin("a", Some(2)));
        write(&b, 10, &documents[2..], origin("b", Some(3)));
        write(&all, 10, &documents, origin("a", None));
        let mut last = (0, 0);
        let inputs = [a.clone(), b.clone()];
        let info = merge(&inputs, &merged, false, &mut |done, total| last = (done, total)).unwrap();
        assert_eq!(last, (12, 12));
        for ending in [".bin", ".idx"] {
            let bytes = |prefix: &Path| std::fs::read(with_ending(prefix, ending)).unwrap();
            assert_eq!(bytes(&merged), bytes(&all), "{ending}");
        }
        assert_eq!((info.documents, info.tokens, info.text_bytes), (4, 6, 20));
        assert_eq!(info.sources, ["a", "both", "b"]);
        assert_eq!(info.special_tokens_in_text, Some(BTreeMap::from([("<s>".to_owned(), 5)])));
        // The first 1024 tokens are of both files.
        assert_eq!((info.tokenizer_hash.as_deref(), info.beginning_blake3), (Some("abc"), None));
        assert!(matches!(
            merge(&inputs, &merged, false, &mut |_, _| ()),
            Err(Error::Exists { .. })
        ));
        let failed = merge(&inputs, &b, true, &mut |_, _| ()).unwrap_err();
        assert!(failed.to_string().contains("is both an input and an output"), "{failed}");
        merge(&inputs, &merged, true, &mut |_, _| ()).unwrap();
        let alone = merge(std::slice::from_ref(&a), &merged, true, &mut |_, _| ()).unwrap();
        assert_eq!(alone.beginning_blake3.as_deref(), Some("a"));
        // Of a part of a split, neither number is known.
        write(&b, 10, &documents[2..], Provenance { text_bytes: 0, ..origin("b", None) });
        let info = merge(&inputs, &merged, true, &mut |_, _| ()).unwrap();
        assert_eq!((info.text_bytes, info.special_tokens_in_text), (0, None));
    }

    #[test]
    fn the_first_difference_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, out] = ["a", "b", "out"].map(|name| dir.path().join(name));
        let failure = || {
            let inputs = [a.clone(), b.clone()];
            let failed = merge(&inputs, &out, false, &mut |_, _| ()).unwrap_err().to_string();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 6, "{failed}");
            failed
        };
        let same = || origin("a", None);
        write(&a, 10, &[&[1]], same());
        write(&b, 100_000, &[&[1]], same());
        assert!(failure().contains("b: cannot be merged with "), "{}", failure());
        assert!(failure().contains("a: dtype i32, not u16"), "{}", failure());
        write(&b, 11, &[&[1]], same());
        assert!(failure().contains("vocabulary_size 11, not 10"), "{}", failure());
        let hash = Some("def".to_owned());
        write(&b, 10, &[&[1]], Provenance { tokenizer_hash: hash, ..same() });
        assert!(failure().contains("tokenizer_hash def, not abc"), "{}", failure());
        write(&b, 10, &[&[1]], Provenance { eos_token: DocumentEnd::Nothing, ..same() });
        assert!(failure().contains("eos_token null, not \"</s>\""), "{}", failure());
        write(&b, 10, &[&[1]], Provenance { split_special_tokens: true, ..same() });
        assert!(failure().contains("split_special_tokens true, not false"), "{}", failure());
        write(&b, 10, &[&[1]], same());
        std::fs::rename(with_ending(&b, ".json"), with_ending(&b, ".txt")).unwrap();
        assert!(failure().contains("it has no .json"), "{}", failure());
    }

    #[test]
    fn files_without_a_record_have_the_vocabulary_of_their_ids() {
        let dir = tempfile::tempdir().unwrap();
        let [a, out] = ["a", "out"].map(|name| dir.path().join(name));
        write(&a, 10, &[&[1, 7], &[2]], origin("a", None));
        std::fs::remove_file(with_ending(&a, ".json")).unwrap();
        let info = merge(&[a.clone(), a.clone()], &out, false, &mut |_, _| ()).unwrap();
        assert_eq!((info.vocabulary_size, info.documents, info.tokens), (8, 4, 6));
        assert_eq!((info.eos_token, info.tokenizer_hash), (DocumentEnd::Unknown, None));
        assert_eq!(info.sources, [a.display().to_string(), a.display().to_string()]);
        assert!(merge(&[], &out, true, &mut |_, _| ()).is_err());
    }
}
