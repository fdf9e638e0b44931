//! Spells a string with a tokenizer's tokens, without the additions of encoding.
//!
//! A vocabulary's entries are not text: byte-level BPE writes each byte as a printable character
//! (a leading space is U+0120), sentencepiece writes a space as U+2581. If an entry is decoded to text
//! and encoded again, a leading space is added or lost. The tokenizer's model, which follows the normalizer
//! and the pre-tokenizer, uses exactly the alphabet of the vocabulary. So an entry of another vocabulary
//! over the same alphabet is passed to the model directly.

use tokenizers::{Model, PreTokenizerWrapper, Tokenizer};

/// U+2581, which represents a space in sentencepiece's vocabularies.
const METASPACE: char = '\u{2581}';

/// Spells strings with one tokenizer's tokens.
pub(crate) struct Speller<'a> {
    tokenizer: &'a Tokenizer,
    byte_level: bool,
    /// The token for unknown characters.
    unknown: Option<u32>,
}

impl<'a> Speller<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer) -> Self {
        let unknown = match tokenizer.get_model() {
            tokenizers::ModelWrapper::BPE(bpe) => bpe.get_unk_token().clone(),
            tokenizers::ModelWrapper::WordPiece(model) => Some(model.unk_token.clone()),
            tokenizers::ModelWrapper::WordLevel(model) => Some(model.unk_token.clone()),
            tokenizers::ModelWrapper::Unigram(_) => Some("<unk>".to_string()),
        };
        Speller {
            tokenizer,
            byte_level: tokenizer.get_pre_tokenizer().is_some_and(is_byte_level),
            unknown: unknown.and_then(|token| tokenizer.token_to_id(&token)),
        }
    }

    /// Spells an entry of a vocabulary over the same alphabet. Returns no tokens if it cannot be spelled.
    pub(crate) fn spell_token(&self, entry: &str) -> Vec<u32> {
        // Sentencepiece's byte tokens represent a byte, not their six characters.
        if !self.byte_level
            && let Some(byte) = byte_token(entry)
        {
            return match char::from(byte) {
                ' ' => self.tokenize(&METASPACE.to_string()),
                character if character.is_ascii() => self.tokenize(&character.to_string()),
                _ => Vec::new(),
            };
        }
        self.tokenize(entry)
    }

    /// Spells a text unchanged, without a leading space: added tokens are not part of the model's
    /// alphabet.
    pub(crate) fn spell_text(&self, text: &str) -> Vec<u32> {
        if self.byte_level {
            // Its pre-tokenizer maps bytes to the alphabet, and splits words.
            let encoding = self.tokenizer.encode_fast(text, false);
            return encoding.map_or_else(|_| Vec::new(), |encoding| self.known(encoding.get_ids()));
        }
        self.tokenize(&text.replace(' ', &METASPACE.to_string()))
    }

    fn tokenize(&self, entry: &str) -> Vec<u32> {
        let tokens = self.tokenizer.get_model().tokenize(entry).unwrap_or_default();
        let ids: Vec<u32> = tokens.into_iter().map(|token| token.id).collect();
        self.known(&ids)
    }

    fn known(&self, ids: &[u32]) -> Vec<u32> {
        ids.iter().copied().filter(|id| Some(*id) != self.unknown).collect()
    }
}

fn is_byte_level(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_) => true,
        PreTokenizerWrapper::Sequence(sequence) => sequence.as_ref().iter().any(is_byte_level),
        _ => false,
    }
}

fn byte_token(entry: &str) -> Option<u8> {
    let digits = entry.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}
