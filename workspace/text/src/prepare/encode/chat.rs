//! Converts conversations to ids and the mask of tokens that a model is trained on. The whole text that the chat
//! template renders is encoded at once, as by transformers' `apply_chat_template`. The slower library encodes it,
//! because it also returns the bytes of each id. Nothing is put before or after the text: the template writes BOS and
//! the ends of turns.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::prepare::preparation::Chat;
use crate::prepare::{Error, Result};
use crate::{Conversation, TextTokenizer, TrainingText};

/// Renders and encodes conversations from any number of threads.
pub(crate) struct ChatEncoder<'a> {
    tokenizer: &'a TextTokenizer,
    chat: Chat<'a>,
    special: SpecialNames,
}

pub(crate) struct Rendered {
    pub(crate) text: TrainingText,
    /// The ids of the special tokens that messages name.
    pub(crate) special: Vec<u32>,
}

/// An id with the bytes of the text that it stands for.
type Token = (u32, Range<usize>);

impl<'a> ChatEncoder<'a> {
    pub(crate) fn new(tokenizer: &'a TextTokenizer, chat: Chat<'a>) -> Result<Self> {
        if tokenizer.splits_special_tokens() {
            return Err(Error::Invalid(
                "--split-special-tokens: the chat template's own special tokens would be text: leave it out".to_owned(),
            ));
        }
        Ok(Self { tokenizer, chat, special: SpecialNames::new(tokenizer) })
    }

    /// Renders a record of the fields of conversations: an object with `messages` and `tools`. Errors are the record's,
    /// except [`Error::Interrupted`], soon after `stop` is set.
    pub(crate) fn render(&self, record: &str, stop: &AtomicBool) -> Result<Rendered> {
        let conversation = Arc::new(Conversation::parse(record)?);
        let text = self.chat.template.training_text(&conversation, self.chat.turns, stop)?;
        let mut special = Vec::new();
        conversation.visit_texts(&mut |text| self.special.find(text, &mut special));
        Ok(Rendered { text, special })
    }

    /// Returns the ids of a rendered conversation, and its mask: 1 for each id that is trained on, otherwise 0.
    pub(crate) fn encode(&self, rendered: &Rendered) -> Result<(Vec<u32>, Vec<u8>)> {
        let TrainingText { text, trained, is_exact, .. } = &rendered.text;
        let tokens = self.tokenizer.encode_with_ranges(text)?;
        let is_special = |id: u32| self.tokenizer.is_special(id);
        let mut mask = vec![0; tokens.len()];
        let mut next = 0;
        for range in trained {
            let mut range = range.clone();
            if !is_exact {
                range.end = end_of_turn(text, &tokens[next..], &range, is_special);
            }
            // Trains on all ids from the first to the last with bytes in the range.
            let overlaps = |(_, token): &Token| token.start < range.end && token.end > range.start;
            let Some(first) = tokens[next..].iter().position(overlaps) else { continue };
            let first = next + first;
            let behind = tokens[first..].iter().position(|(_, token)| token.start >= range.end);
            let end = behind.map_or(tokens.len(), |behind| first + behind);
            let last = tokens[first..end].iter().rposition(overlaps).unwrap_or(0);
            mask[first..=first + last].fill(1);
            next = first;
        }
        Ok((tokens.into_iter().map(|(id, _)| id).collect(), mask))
    }
}

/// Returns the end of a turn within the range of its text. If only white space follows the last special token, the turn
/// ends with this token: no model has to generate the newline after <|im_end|>.
fn end_of_turn(
    text: &str,
    tokens: &[Token],
    range: &Range<usize>,
    is_special: impl Fn(u32) -> bool,
) -> usize {
    let within = tokens
        .iter()
        .skip_while(|(_, token)| token.end <= range.start)
        .take_while(|(_, token)| token.start < range.end);
    let last = within.filter(|(id, _)| is_special(*id)).last();
    match last {
        Some((_, token))
            if text.get(token.end..range.end).is_some_and(|rest| rest.trim().is_empty()) =>
        {
            token.end
        }
        _ => range.end,
    }
}

/// The special tokens, to find their names in texts.
struct SpecialNames {
    /// By the first byte of their names.
    names: BTreeMap<u8, Vec<(String, u32)>>,
}

impl SpecialNames {
    fn new(tokenizer: &TextTokenizer) -> Self {
        let mut names: BTreeMap<u8, Vec<(String, u32)>> = BTreeMap::new();
        for id in tokenizer.special_ids() {
            let Some(name) = tokenizer.token(id).filter(|name| !name.is_empty()) else { continue };
            names.entry(name.as_bytes()[0]).or_default().push((name, id));
        }
        // The longest name that matches counts.
        names.values_mut().for_each(|names| names.sort_by_key(|(name, _)| usize::MAX - name.len()));
        Self { names }
    }

    /// Appends the ids of the tokens that a text names, in order.
    fn find(&self, text: &str, found: &mut Vec<u32>) {
        let mut at = 0;
        while let Some(&byte) = text.as_bytes().get(at) {
            let here = self.names.get(&byte).into_iter().flatten();
            let mut here =
                here.filter(|(name, _)| text.as_bytes()[at..].starts_with(name.as_bytes()));
            match here.next() {
                Some((name, id)) => {
                    found.push(*id);
                    at += name.len();
                }
                None => at += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_ends_with_its_last_special_token() {
        let text = "ab<e>\n \ncd";
        let tokens = [(1, 0..2), (9, 2..5), (2, 5..8), (3, 8..10)];
        let end = |range: Range<usize>| end_of_turn(text, &tokens, &range, |id| id == 9);
        assert_eq!((end(0..8), end(1..6), end(0..5)), (5, 5, 5));
        // Text follows, or there is no special token.
        assert_eq!((end(0..10), end(5..8), end(0..2)), (10, 8, 2));
    }
}
