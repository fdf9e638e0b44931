//! Splits texts into words if the whole text is one word for the tokenizer (`Words::None` of `shape`). A text can be
//! split between two characters that stand side by side in no token of the vocabulary:
//!
//! 1. No merge ever joins the two sides of such a place.
//! 2. Merges are applied by rank and then from left to right, so the merges of one side change neither the pairs nor
//!    the order of the other side.
//! 3. No unknown token spans both sides: the bytes of unknown characters are tokens, which no merge joins, and whole
//!    words are not looked up in the vocabulary.

use moh_data::{TokenizerJson, byte_token};
use tokenizers_1::pipeline::Span;

use super::shape::SPACE_MARK;

/// The pairs of characters that stand side by side in a token, by the last byte of the first character and the first
/// byte of the second. Other characters with these bytes also count as joined. A byte that continues a character is
/// joined with every byte.
#[derive(Debug)]
pub(super) struct Joints {
    /// By the byte before: a bit for each byte after.
    joined: Box<[[u64; 4]; 256]>,
}

/// The first byte of [`SPACE_MARK`] here. Its first byte in UTF-8 also begins other characters.
const SPACE: u8 = b' ';
/// The first byte of [`SPACE_MARK`] in UTF-8, and its other bytes.
const MARK: (u8, [u8; 2]) = (0xE2, [0x96, 0x81]);

impl Joints {
    /// Returns the joints of a tokenizer, or `None` if any characters may be joined.
    pub(super) fn new(json: &TokenizerJson) -> Option<Self> {
        let mut joints = Self { joined: Box::new([[0; 4]; 256]) };
        let model = &json.fields["model"];
        let is_byte = |token: &str| byte_token(token).is_some();
        let vocabulary = || json.tokens.iter().map(|(token, _)| token.as_str());
        let bytes = vocabulary().filter(|token| is_byte(token)).count();
        let merges: Vec<[String; 2]> = serde_json::from_str(json.merges.get()).ok()?;
        let joins_bytes = merges.iter().flatten().any(|token| is_byte(token));
        if model["ignore_merges"] == true
            || model["byte_fallback"] != true
            || bytes != 256
            || joins_bytes
        {
            return None;
        }
        for continuing in 0x80..0xC0 {
            (0..=255).for_each(|before| joints.join(before, continuing));
        }
        for token in vocabulary().filter(|token| !is_byte(token)) {
            let mut before = None;
            for character in token.chars() {
                let mut bytes = [0; 4];
                let bytes = character.encode_utf8(&mut bytes).as_bytes();
                if let Some(before) = before {
                    let is_mark = bytes == SPACE_MARK.as_bytes();
                    joints.join(before, if is_mark { SPACE } else { bytes[0] });
                }
                before = bytes.last().copied();
            }
        }
        Some(joints)
    }

    fn join(&mut self, before: u8, after: u8) {
        self.joined[usize::from(before)][usize::from(after / 64)] |= 1 << (after % 64);
    }

    fn are_joined(&self, before: u8, after: u8) -> bool {
        self.joined[usize::from(before)][usize::from(after / 64)] >> (after % 64) & 1 == 1
    }

    /// Splits a text with [`SPACE_MARK`] for spaces into `words`, which start where no token joins two characters.
    pub(super) fn words(&self, text: &str, words: &mut Vec<Span>) {
        words.clear();
        let text = text.as_bytes();
        let mut start = 0;
        for (place, pair) in (1_usize..).zip(text.windows(2)) {
            let is_mark = pair[1] == MARK.0 && text[place + 1..].starts_with(&MARK.1);
            if !self.are_joined(pair[0], if is_mark { SPACE } else { pair[1] }) {
                words.push(Span::new(start, place as u32));
                start = place as u32;
            }
        }
        if !text.is_empty() {
            words.push(Span::new(start, text.len() as u32));
        }
    }
}
