//! The words of a tokenizer for which the whole text is one word (`Words::None` of `shape`). If no token of the
//! vocabulary holds two characters side by side, then no merge ever joins what is before and after a place between two
//! such characters. Merges are applied by rank and then from left to right, and the merges of one side change neither
//! the pairs nor the order of the other's. No token spans both sides for being unknown, because the bytes of unknown
//! characters are tokens, which no merge joins, and the vocabulary is not consulted for whole words. So the text falls
//! into words at all such places.

use moh_data::{TokenizerJson, byte_token};
use tokenizers_1::pipeline::Span;

use super::shape::SPACE_MARK;

/// The pairs of characters that stand side by side in a token, by the last byte of the first character and the
/// first of the second. Other characters with those bytes count as joined too, and a byte that continues a character
/// is joined with all.
#[derive(Debug)]
pub(super) struct Joints {
    /// By the byte before: a bit for each byte after.
    joined: Box<[[u64; 4]; 256]>,
}

/// The first byte of [`SPACE_MARK`] here; in UTF-8 that of other characters as well.
const SPACE: u8 = b' ';
/// The first bytes of [`SPACE_MARK`] in UTF-8, and the others.
const MARK: (u8, [u8; 2]) = (0xE2, [0x96, 0x81]);

impl Joints {
    /// Returns the joints of a tokenizer; `None` if any characters may be joined.
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

    /// The words of a text whose spaces are [`SPACE_MARK`]: they begin where no token joins two characters.
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
