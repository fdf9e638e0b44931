//! Checks whether a tokenizer is the tokenizer of a token file: the same bytes, or the same content. On request,
//! another tokenizer is accepted if it gives the same ids on a sample of the file.
//!
//! The sample is [`PIECES`] pieces, evenly spaced in the file, of up to [`PIECE_TOKENS`] tokens of one document. The
//! longest stretch of a piece without special tokens is decoded and encoded again. The new ids must contain the ids of
//! the stretch in one run. If the stretch does not start or end with its document, the [`CUT_TOKENS`] ids at that end
//! do not count: a cut through a word changes its ids. A tokenizer that has the same tokens under other ids could pass,
//! so the text of the file's first [`BEGINNING_TOKENS`] tokens must also be the recorded text.

use std::ops::Range;

use moh_data::{BEGINNING_TOKENS, TokenFile, TokenizerMatch, with_ending};

use crate::{Error, Result, TextTokenizer};

const PIECES: u64 = 64;
const PIECE_TOKENS: u64 = 1024;
/// Ids beside a cut that do not count.
const CUT_TOKENS: usize = 128;
const SHOWN_CHARACTERS: usize = 40;

impl TextTokenizer {
    /// Checks that a token file records no other tokenizer. With `allow_other`, another tokenizer is accepted if it
    /// gives the same ids on a sample of the file: evenly spaced pieces, decoded and encoded again.
    ///
    /// # Errors
    /// Fails if another tokenizer is recorded, or, with `allow_other`, if this tokenizer gives other ids. Without a
    /// record the check passes.
    pub fn check_file(&self, file: &TokenFile, allow_other: bool) -> Result<TokenizerMatch> {
        let content = || self.content();
        let difference = match file.compare_tokenizer(self.hash(), self.vocab_size(), content)? {
            Ok(found) => return Ok(found),
            Err(difference) => difference,
        };
        if allow_other {
            self.check_ids(file)?;
            return Ok(TokenizerMatch::SameIds);
        }
        Err(Error::Invalid(format!(
            "{}: prepared with another tokenizer than {}: {difference}: use the tokenizer of the token file, \
             prepare the text again with this one, or accept it, if it gives the same ids on a sample of the \
             file, with --allow-other-tokenizer, or for all programs with moh-data accept",
            with_ending(file.prefix(), ".json").display(),
            self.path().display()
        )))
    }

    /// Checks that the tokenizer reads the recorded text at the beginning, and gives the ids of the sample.
    fn check_ids(&self, file: &TokenFile) -> Result<()> {
        let beginning = file.ids(0..file.num_tokens().min(BEGINNING_TOKENS as u64))?;
        let recorded = file.info().and_then(|info| info.beginning_blake3.as_deref());
        if let Some(recorded) = recorded
            && recorded != beginning_blake3(self, &beginning)?
        {
            let text = shown(&self.decode(&beginning, false)?);
            return Err(self.other_ids(file, &format!("it reads their beginning as {text:?}")));
        }
        let mut compared = 0;
        let pieces = PIECES.min(file.num_tokens());
        for piece in 0..pieces {
            // Below the number of tokens. The product fits 128 bits.
            let start =
                (u128::from(file.num_tokens()) * u128::from(piece) / u128::from(pieces)) as u64;
            compared += self.check_piece(file, start)?;
        }
        if compared == 0 {
            return Err(self.other_ids(file, "no text in it is long enough to compare"));
        }
        Ok(())
    }

    /// Checks the piece that starts with the token at `start`, or with its document if the document starts close
    /// before. Returns the number of compared ids.
    fn check_piece(&self, file: &TokenFile, start: u64) -> Result<usize> {
        let number = file.documents_of(start..start + 1)?.start;
        let document = file.document(number)?;
        let start = if start - document.start < PIECE_TOKENS { document.start } else { start };
        let end = document.end.min(start + PIECE_TOKENS);
        let ids = file.ids(start..end)?;
        let stretch = longest_text(&ids, self);
        let begins = start == document.start && is_special(&ids[..stretch.start], self);
        let ends = end == document.end && is_special(&ids[stretch.end..], self);
        let stretch = &ids[stretch];
        let cut = |whole: bool| if whole { 0 } else { CUT_TOKENS };
        let inner = cut(begins)..stretch.len().saturating_sub(cut(ends));
        if inner.is_empty() {
            return Ok(0);
        }
        let text = self.decode(stretch, false)?;
        let encoded = self.encode_without_special_tokens(&text)?;
        let inner = &stretch[inner];
        let is_same = match begins && ends {
            true => encoded == inner,
            false => encoded.windows(inner.len()).any(|found| found == inner),
        };
        if is_same {
            return Ok(inner.len());
        }
        let text = shown(&text);
        let place =
            format!("in document {number}, which it reads from token {start} on as {text:?}");
        Err(self.other_ids(file, &place))
    }

    fn other_ids(&self, file: &TokenFile, place: &str) -> Error {
        Error::Invalid(format!(
            "{}: does not give the ids of {}: {place}: use the tokenizer of the token file, or prepare the \
             text again with this one",
            self.path().display(),
            file.prefix().display()
        ))
    }
}

/// Returns the blake3 of the text of a file's first tokens, in hexadecimal.
pub fn beginning_blake3(tokenizer: &TextTokenizer, tokens: &[u32]) -> Result<String> {
    Ok(blake3::hash(tokenizer.decode(tokens, false)?.as_bytes()).to_hex().to_string())
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN_CHARACTERS).collect()
}

fn longest_text(ids: &[u32], tokenizer: &TextTokenizer) -> Range<usize> {
    let (mut longest, mut start) = (0..0, 0);
    for end in 0..=ids.len() {
        if ids.get(end).is_none_or(|&id| tokenizer.is_special(id)) {
            if end - start > longest.len() {
                longest = start..end;
            }
            start = end + 1;
        }
    }
    longest
}

fn is_special(ids: &[u32], tokenizer: &TextTokenizer) -> bool {
    ids.iter().all(|&id| tokenizer.is_special(id))
}
