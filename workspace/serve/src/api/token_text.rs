//! The texts of single tokens in lists of log-probabilities.

use std::collections::HashMap;

use moh_text::{TextTokenizer, bytes_of_token};

/// The value that stands for minus infinity, which JSON does not have.
const LEAST_LOGPROB: f64 = -9999.0;

/// The texts of tokens, each decoded once.
#[derive(Debug)]
pub(super) struct TokenTexts<'a> {
    pub tokenizer: &'a TextTokenizer,
    /// Whether a token is written as `token_id:N`.
    as_ids: bool,
    known: HashMap<u32, (String, Vec<u8>)>,
}

impl<'a> TokenTexts<'a> {
    pub fn new(tokenizer: &'a TextTokenizer, as_ids: bool) -> Self {
        TokenTexts { tokenizer, as_ids, known: HashMap::new() }
    }

    /// Returns the text of a token that follows others, and its bytes. Bytes that are not text are written as
    /// `bytes:\xe2\x80`.
    pub fn of(&mut self, id: u32) -> &(String, Vec<u8>) {
        let (tokenizer, as_ids) = (self.tokenizer, self.as_ids);
        self.known.entry(id).or_insert_with(|| {
            let (text, bytes) = text_and_bytes(tokenizer, id);
            (if as_ids { format!("token_id:{id}") } else { text }, bytes)
        })
    }
}

/// Computes the positions of tokens in a text.
#[derive(Debug, Default)]
pub(super) struct Offsets {
    characters: usize,
    /// Whether the tokens so far end within a character.
    is_open: bool,
}

impl Offsets {
    /// Returns the number of characters before a token that completes the text `new`. If tokens before it turned out to
    /// be no character, their text is before it.
    pub fn next(&mut self, new: &str) -> usize {
        let count = new.chars().count();
        let broken = new.chars().take_while(|&character| character == '\u{fffd}').count();
        let before = self.characters + if self.is_open && broken < count { broken } else { 0 };
        self.characters += count;
        self.is_open = new.is_empty();
        before
    }
}

/// Returns a log-probability as a number that JSON can have.
pub(super) fn finite(logprob: f64) -> f64 {
    logprob.max(LEAST_LOGPROB)
}

fn text_and_bytes(tokenizer: &TextTokenizer, id: u32) -> (String, Vec<u8>) {
    let decode = |ids: &[u32]| tokenizer.decode(ids, false).unwrap_or_default();
    // Decoded twice, because decoders drop a space at the beginning of a text.
    let (once, twice) = (decode(&[id]), decode(&[id, id]));
    let text = twice.strip_prefix(&once).map_or(once.clone(), str::to_owned);
    if !text.contains('\u{fffd}') {
        return (text.clone(), text.into_bytes());
    }
    let token = tokenizer.token(id).unwrap_or_default();
    let Some(bytes) = bytes_of_token(&token) else {
        return (text.clone(), text.into_bytes());
    };
    let shown = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    (format!("bytes:{shown}"), bytes)
}
