//! Incremental decoding. One id may be a fraction of a character, and a token's text can depend on its neighbours. A
//! few ids are therefore decoded together, and only final text is returned. The concatenated pieces are the decoded
//! text, for every well-formed sequence of ids. Ill-formed bytes never fail and decode as U+FFFD.

use std::collections::VecDeque;

use crate::{Result, TextTokenizer};

/// Represents bytes that are not a character, or not yet a character.
const REPLACEMENT: char = '\u{fffd}';
/// Pieces decoded again with each new id, so that the tokenizer has their context. Pieces instead
/// of ids: a cut inside a character would make the rest of it ill-formed.
const CONTEXT_PIECES: usize = 4;
/// Ids of the prompt used as context.
const CONTEXT_IDS: usize = 16;
/// Maximum ids without final text. A character has at most four bytes: a longer run of ids without
/// a character is ill-formed bytes, or literal U+FFFD. It is returned when other text follows, or
/// after this many ids.
const MAX_PENDING_IDS: usize = 64;

/// Text decoded id by id; created by [`TextTokenizer::stream`].
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    skip_special: bool,
    ids: Vec<u32>,
    /// The number of ids of each returned piece. Later ids are pending.
    pieces: VecDeque<usize>,
}

impl<'a> TextStream<'a> {
    pub(crate) fn new(tokenizer: &'a TextTokenizer, context: &[u32], skip_special: bool) -> Self {
        let ids = context[context.len().saturating_sub(CONTEXT_IDS)..].to_vec();
        let pieces = VecDeque::from([ids.len()]);
        Self { tokenizer, skip_special, ids, pieces }
    }

    /// Adds an id and returns the new text; empty while a character is incomplete.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        self.advance(false)
    }

    /// Returns the remaining text. An incomplete character at the end decodes as U+FFFD.
    pub fn finish(mut self) -> Result<String> {
        self.advance(true)
    }

    fn advance(&mut self, last: bool) -> Result<String> {
        let shown: usize = self.pieces.iter().sum();
        let before = self.tokenizer.decode(&self.ids[..shown], self.skip_special)?;
        let now = self.tokenizer.decode(&self.ids, self.skip_special)?;
        let waiting = self.ids.len() - shown;
        if now.ends_with(REPLACEMENT) && waiting < MAX_PENDING_IDS && !last {
            return Ok(String::new());
        }
        // Ill-formed bytes can change the decoding of earlier ids: keep the returned text, and
        // continue after it.
        let common: usize = before
            .chars()
            .zip(now.chars())
            .take_while(|(old, new)| old == new)
            .map(|(same, _)| same.len_utf8())
            .sum();
        let new = now[common..].to_owned();
        self.pieces.push_back(waiting);
        while self.pieces.len() > CONTEXT_PIECES {
            self.ids.drain(..self.pieces.pop_front().unwrap_or(0));
        }
        Ok(new)
    }
}
