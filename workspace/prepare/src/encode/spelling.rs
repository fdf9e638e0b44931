//! What each id stands for in a text, to check that ids spell the text that they were encoded from.

use std::collections::HashMap;

use serde_json::Value;

use super::shape::{Prepends, SPACE_MARK, Shape};

/// The bytes of every id.
pub(super) struct Spelling {
    /// By id: where its bytes end in `bytes`. They begin where the last id's end.
    ends: Vec<u32>,
    bytes: Vec<u8>,
    /// By id: whether it is an added token.
    added: Vec<bool>,
    prepends: Prepends,
}

impl Spelling {
    pub(super) fn new(json: &Value, shape: Shape) -> Self {
        let alphabet = shape.is_byte_level().then(byte_level_alphabet);
        let falls_back = json["model"]["byte_fallback"] == true;
        let mut tokens: Vec<Vec<u8>> = Vec::new();
        let mut added = Vec::new();
        let mut set = |id: &Value, spelling: Vec<u8>, is_added: bool| {
            let Some(id) = id.as_u64().and_then(|id| usize::try_from(id).ok()) else { return };
            if id >= tokens.len() {
                tokens.resize(id + 1, Vec::new());
                added.resize(id + 1, false);
            }
            tokens[id] = spelling;
            added[id] = is_added;
        };
        for (token, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
            let spelling = match &alphabet {
                Some(bytes) => token.chars().filter_map(|c| bytes.get(&c).copied()).collect(),
                None if falls_back && let Some(byte) = fallback_byte(token) => vec![byte],
                None => token.replace(SPACE_MARK, " ").into_bytes(),
            };
            set(id, spelling, false);
        }
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let content = token["content"].as_str().unwrap_or_default();
            set(&token["id"], content.as_bytes().to_vec(), true);
        }
        let (mut ends, mut bytes) = (Vec::with_capacity(tokens.len()), Vec::new());
        for token in tokens {
            bytes.extend(token);
            ends.push(bytes.len() as u32);
        }
        Self { ends, bytes, added, prepends: shape.prepends }
    }

    fn bytes_of(&self, id: usize) -> &[u8] {
        let start = id.checked_sub(1).map_or(0, |last| self.ends[last]);
        &self.bytes[start as usize..self.ends[id] as usize]
    }

    /// The characters beyond ASCII that are tokens.
    pub(super) fn characters(&self) -> impl Iterator<Item = String> + '_ {
        let texts =
            (0..self.ends.len()).filter_map(|id| std::str::from_utf8(self.bytes_of(id)).ok());
        let is_character = |text: &&str| !text.is_ascii() && text.chars().nth(1).is_none();
        texts.filter(is_character).map(str::to_owned)
    }

    /// Whether ids spell a text. A text that the tokenizer changes, by NFC or by stripping white space, is not
    /// spelt by its ids, and neither is one with characters unknown to the vocabulary. `first` says whether a
    /// document begins with the text.
    pub(super) fn is_of(&self, text: &str, first: bool, ids: &[u32]) -> bool {
        let mut rest = text.as_bytes();
        let (mut begins, mut may_prepend) = (true, first || self.prepends == Prepends::Always);
        for &id in ids {
            let id = id as usize;
            if id >= self.ends.len() {
                return false;
            }
            let mut token = self.bytes_of(id);
            if begins && !self.added[id] && may_prepend && self.prepends_to(rest) {
                match token.split_first() {
                    Some((b' ', others)) => token = others,
                    _ => return false,
                }
            }
            match rest.strip_prefix(token) {
                Some(others) => rest = others,
                None => return false,
            }
            begins = self.added[id];
            may_prepend = self.prepends != Prepends::FirstUnlessSpace;
        }
        rest.is_empty()
    }

    /// Whether the tokenizer puts a space before a text.
    fn prepends_to(&self, text: &[u8]) -> bool {
        match self.prepends {
            Prepends::Never => false,
            Prepends::Always => true,
            Prepends::UnlessSpace | Prepends::FirstUnlessSpace => {
                !text.starts_with(b" ") && !text.starts_with(SPACE_MARK.as_bytes())
            }
        }
    }
}

/// The byte of each character in GPT-2's alphabet, in which every byte is a printable character.
fn byte_level_alphabet() -> HashMap<char, u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let printed = (0..=255).filter(printable).map(|byte| (char::from(byte), byte));
    let others = (0..=255u8).filter(|byte| !printable(byte));
    printed.chain(('\u{100}'..).zip(others)).collect()
}

/// The byte of a token such as `<0x0A>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}
