//! Converts texts to ids, within limits: the cost of a text grows with the model's context, and not with the text.

use std::sync::Arc;

use moh_text::TextTokenizer;

use super::work::{Kind, off_thread};
use super::{ApiError, Served};

/// A normalizer makes a text at most so many times shorter, as where it composes characters.
const SHORTER: usize = 4;
/// The least value of `longest`, in bytes: a token of a vocabulary of words can stand for any unknown word.
const MIN_LONGEST: usize = 16;
/// Bytes of a text's beginning to tokenize first, for each allowed token: more than the bytes of usual tokens.
const BEGINNING: usize = 10;
/// The most contexts of a text of `/tokenize`, or of ids of `/detokenize`.
const CONTEXTS: usize = 16;

/// Limits of the length of texts in requests.
#[derive(Debug, Clone, Copy)]
pub struct TextLimits {
    context: usize,
    /// Bytes of the longest token.
    longest: usize,
}

impl TextLimits {
    /// Returns the limits of a tokenizer and a model's context.
    pub fn new(tokenizer: &TextTokenizer, context: usize) -> Self {
        let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let longest = ids.filter_map(|id| tokenizer.token(id)).map(|token| token.len()).max();
        TextLimits { context, longest: longest.unwrap_or(0).max(MIN_LONGEST) }
    }

    /// Returns the most tokens of a text of `/tokenize`, or of a list of `/detokenize`.
    pub(super) fn tokens(&self) -> usize {
        self.context.saturating_mul(CONTEXTS)
    }

    /// Returns the ids of a text from the field `name`. Rejects a text with a long beginning of far more than `most`
    /// tokens.
    fn encode(
        &self,
        tokenizer: &TextTokenizer,
        text: &str,
        special: bool,
        most: usize,
        name: &str,
    ) -> Result<Vec<u32>, ApiError> {
        let refuse = |has: String| {
            let message = format!("{name}: the text has {has}, and {most} tokens are the most");
            Err(ApiError::invalid(message, Some(name)))
        };
        if text.len() > most.saturating_mul(SHORTER * self.longest) {
            return refuse(format!("{} bytes", text.len()));
        }
        let mut length = most.saturating_mul(BEGINNING).max(1 << 12);
        while length < text.len() {
            let beginning = &text[..text.floor_char_boundary(length)];
            // The last tokens of the beginning may differ from the whole text's.
            let found = tokenizer.encode_without_special_tokens(beginning)?.len();
            if found > most + most / 2 + 16 {
                return refuse(format!("more than {} tokens", most + most / 2));
            }
            length = length.saturating_mul(4);
        }
        Ok(match special {
            true => tokenizer.encode_prompt(text)?,
            false => tokenizer.encode_without_special_tokens(text)?,
        })
    }
}

impl Served {
    /// Returns the ids of a text from the field `name`, and the text. Rejects texts of far more than `most` tokens.
    pub(super) async fn encode(
        self: &Arc<Self>,
        text: String,
        special: bool,
        most: usize,
        name: &'static str,
    ) -> Result<(Vec<u32>, String), ApiError> {
        let served = Arc::clone(self);
        let bytes = text.len();
        let work = move || {
            let ids = served.limits.encode(&served.tokenizer, &text, special, most, name)?;
            Ok((ids, text))
        };
        off_thread(Kind::Text, bytes, work).await
    }
}
