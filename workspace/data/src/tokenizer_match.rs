//! Whether a tokenizer is the one that a token file was prepared with: the same bytes, the same content, or,
//! on request, another one that gives the same ids on a sample of the file.
//!
//! The sample is [`PIECES`] pieces, evenly spaced in the file, of up to [`PIECE_TOKENS`] tokens of one document.
//! Of each, the longest stretch without special tokens is decoded and encoded again, and its ids must be among
//! those of the encoding, one after the other. Where the stretch does not begin or end with its document, the
//! [`CUT_TOKENS`] ids at that end do not count: a cut through a word changes how it is divided. A tokenizer that
//! has the same tokens under other ids could pass, so the text of the file's first [`BEGINNING_TOKENS`] tokens must
//! be the recorded one too.

use std::ops::Range;

use crate::pending::with_ending;
use crate::{Error, Result, TextTokenizer, TokenFile};

/// Pieces of a sample.
const PIECES: u64 = 64;
/// Maximum tokens of a piece.
const PIECE_TOKENS: u64 = 1024;
/// Tokens at the beginning of a token file whose text is recorded.
pub const BEGINNING_TOKENS: usize = 1024;
/// Ids beside a cut that do not count.
const CUT_TOKENS: usize = 128;
/// Characters of a text that an error shows.
const SHOWN_CHARACTERS: usize = 40;

/// How a tokenizer was found to fit a token file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokenizerMatch {
    /// The token file records no tokenizer.
    Unrecorded,
    /// The file has the recorded bytes.
    Same,
    /// The file has other bytes than recorded, and the recorded content.
    Rewritten,
    /// The file is of another tokenizer, or one whose content is not recorded, and gives the same ids on a sample.
    SameIds,
}

impl TokenizerMatch {
    /// What a user should know of it, as a clause about the tokenizer; `None` for the recorded bytes, or without
    /// a record.
    pub fn remark(self) -> Option<&'static str> {
        match self {
            TokenizerMatch::Unrecorded | TokenizerMatch::Same => None,
            TokenizerMatch::Rewritten => Some(
                "has other bytes than the file that the text was prepared with, and the same content",
            ),
            TokenizerMatch::SameIds => Some(
                "is not the one that the text was prepared with, and gives the same ids on a sample of it",
            ),
        }
    }
}

impl TokenFile {
    /// Checks that `PREFIX.json` records no other tokenizer. With `allow_other`, another one is accepted if
    /// it gives the same ids on a sample of the file: evenly spaced pieces, decoded and encoded again.
    ///
    /// # Errors
    /// Fails if another tokenizer is recorded, or, with `allow_other`, gives other ids; without a record the
    /// check passes.
    pub fn check_tokenizer(
        &self,
        tokenizer: &TextTokenizer,
        allow_other: bool,
    ) -> Result<TokenizerMatch> {
        let Some(info) = self.info() else { return Ok(TokenizerMatch::Unrecorded) };
        let Some(recorded) = &info.tokenizer_hash else { return Ok(TokenizerMatch::Unrecorded) };
        if recorded == tokenizer.hash() {
            return Ok(TokenizerMatch::Same);
        }
        let content = tokenizer.content()?;
        let difference = match &info.tokenizer_content {
            None => {
                "other bytes than recorded, and whether the content is the same is not known, because it is \
                 not recorded"
                    .to_owned()
            }
            Some(recorded) => match content.first_difference(recorded) {
                None => return Ok(TokenizerMatch::Rewritten),
                Some("vocabulary") if info.vocabulary_size != tokenizer.vocab_size() as u64 => {
                    format!(
                        "the vocabulary differs, {} ids, not {}",
                        tokenizer.vocab_size(),
                        info.vocabulary_size
                    )
                }
                Some(part) => format!("{part} differs"),
            },
        };
        if allow_other {
            self.check_ids(tokenizer)?;
            return Ok(TokenizerMatch::SameIds);
        }
        Err(Error::TokenizerMismatch {
            path: with_ending(self.prefix(), ".json"),
            tokenizer: tokenizer.path().to_path_buf(),
            difference,
        })
    }

    /// Checks that the tokenizer reads the recorded text at the beginning, and gives the ids of the sample.
    fn check_ids(&self, tokenizer: &TextTokenizer) -> Result<()> {
        let mut beginning = vec![0; BEGINNING_TOKENS.min(self.num_tokens() as usize)];
        self.read(0, &mut beginning)?;
        let recorded = self.info().and_then(|info| info.beginning_blake3.as_deref());
        if let Some(recorded) = recorded
            && recorded != beginning_blake3(tokenizer, &beginning)?
        {
            let text = tokenizer.decode(&beginning, false)?;
            return Err(self
                .other_ids(tokenizer, format!("it reads their beginning as {:?}", shown(&text))));
        }
        let mut compared = 0;
        let pieces = PIECES.min(self.num_tokens());
        for piece in 0..pieces {
            // Below the number of tokens; the product fits 128 bits.
            let start =
                (u128::from(self.num_tokens()) * u128::from(piece) / u128::from(pieces)) as u64;
            compared += self.check_piece(tokenizer, start)?;
        }
        if compared == 0 {
            let place = "no text in it is long enough to compare".to_owned();
            return Err(self.other_ids(tokenizer, place));
        }
        Ok(())
    }

    /// Checks the piece that begins with the token at `start`, or with its document if that is close, and returns
    /// the number of ids that were compared.
    fn check_piece(&self, tokenizer: &TextTokenizer, start: u64) -> Result<usize> {
        let number = self.documents_of(start..start + 1)?.start;
        let document = self.document(number)?;
        let start = if start - document.start < PIECE_TOKENS { document.start } else { start };
        let end = document.end.min(start + PIECE_TOKENS);
        // At most PIECE_TOKENS.
        let mut ids = vec![0; (end - start) as usize];
        self.read(start, &mut ids)?;
        let stretch = longest_text(&ids, tokenizer);
        let begins = start == document.start && is_special(&ids[..stretch.start], tokenizer);
        let ends = end == document.end && is_special(&ids[stretch.end..], tokenizer);
        let stretch = &ids[stretch];
        let cut = |whole: bool| if whole { 0 } else { CUT_TOKENS };
        let inner = cut(begins)..stretch.len().saturating_sub(cut(ends));
        if inner.is_empty() {
            return Ok(0);
        }
        let text = tokenizer.decode(stretch, false)?;
        let encoded = tokenizer.encode_without_special_tokens(&text)?;
        let inner = &stretch[inner];
        let is_same = match begins && ends {
            true => encoded == inner,
            false => encoded.windows(inner.len()).any(|found| found == inner),
        };
        if is_same {
            return Ok(inner.len());
        }
        let shown = shown(&text);
        let place =
            format!("in document {number}, which it reads from token {start} on as {shown:?}");
        Err(self.other_ids(tokenizer, place))
    }

    fn other_ids(&self, tokenizer: &TextTokenizer, place: String) -> Error {
        let (prefix, tokenizer) = (self.prefix().to_path_buf(), tokenizer.path().to_path_buf());
        Error::OtherIds { prefix, tokenizer, place }
    }
}

/// blake3 of the text of a file's first tokens, in hexadecimal.
///
/// # Errors
/// Fails if the tokenizer does.
pub fn beginning_blake3(tokenizer: &TextTokenizer, tokens: &[u32]) -> Result<String> {
    Ok(blake3::hash(tokenizer.decode(tokens, false)?.as_bytes()).to_hex().to_string())
}

/// The beginning of a text.
fn shown(text: &str) -> String {
    text.chars().take(SHOWN_CHARACTERS).collect()
}

/// The longest stretch without special tokens.
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

/// Whether all ids are special tokens.
fn is_special(ids: &[u32], tokenizer: &TextTokenizer) -> bool {
    ids.iter().all(|&id| tokenizer.is_special(id))
}
