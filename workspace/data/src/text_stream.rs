//! Incremental decoding. One id may be a part of a character, and how a token reads can depend on
//! its neighbours, so a few ids are decoded together and only what is certain is handed out. The
//! pieces joined are the decoded text, for every well-formed sequence of ids; ill-formed bytes
//! never fail, they read as U+FFFD.

use std::collections::VecDeque;

use crate::{Result, TextTokenizer};

/// What stands for bytes that are no character, or not yet one.
const REPLACEMENT: char = '\u{fffd}';
/// Pieces decoded again with each new id, so that the tokenizer sees what goes before it. Pieces
/// rather than ids: cut inside a character, the rest of it would read as ill-formed.
const CONTEXT_PIECES: usize = 4;
/// Ids of the prompt that serve as context.
const CONTEXT_IDS: usize = 16;
/// A character has at most four bytes: more ids without one are ill-formed bytes, or characters
/// that really are U+FFFD. They are shown when something else follows, or after so many.
const LONGEST_WAIT: usize = 64;

/// Text that appears id by id; made by [`TextTokenizer::stream`].
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    skip_special: bool,
    ids: Vec<u32>,
    /// How many of `ids` each shown piece has; those behind wait.
    pieces: VecDeque<usize>,
}

impl<'a> TextStream<'a> {
    pub(crate) fn new(tokenizer: &'a TextTokenizer, context: &[u32], skip_special: bool) -> Self {
        let ids = context[context.len().saturating_sub(CONTEXT_IDS)..].to_vec();
        let pieces = VecDeque::from([ids.len()]);
        Self { tokenizer, skip_special, ids, pieces }
    }

    /// Adds an id and returns the text that is new; empty while a character is incomplete.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        self.advance(false)
    }

    /// The rest: what an incomplete character at the end reads as.
    pub fn finish(mut self) -> Result<String> {
        self.advance(true)
    }

    fn advance(&mut self, last: bool) -> Result<String> {
        let shown: usize = self.pieces.iter().sum();
        let before = self.tokenizer.decode(&self.ids[..shown], self.skip_special)?;
        let now = self.tokenizer.decode(&self.ids, self.skip_special)?;
        let waiting = self.ids.len() - shown;
        if now.ends_with(REPLACEMENT) && waiting < LONGEST_WAIT && !last {
            return Ok(String::new());
        }
        // Ill-formed bytes can change how the ids before them read: keep what was shown, and go
        // on behind it.
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
