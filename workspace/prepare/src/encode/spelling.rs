//! What each id stands for in a text, to check that ids spell the text that they were encoded from.

use std::collections::HashMap;

use serde_json::Value;

use super::shape::{Prepends, SPACE_MARK, Shape};

/// The bytes of every id.
pub(super) struct Spelling {
    /// By id.
    tokens: Vec<Token>,
    /// The bytes of all tokens.
    bytes: Vec<u8>,
    prepends: Prepends,
}

/// The bytes of an id, of which most have sixteen or fewer.
#[derive(Clone, Copy, Default)]
struct Token {
    /// The first sixteen, as a little-endian number.
    head: u128,
    start: u32,
    length: u16,
    is_added: bool,
}

/// By length: the bytes of a token in its [`Token::head`].
const MASKS: [u128; 17] = {
    let mut masks = [u128::MAX; 17];
    let mut length = 0;
    while length < 16 {
        masks[length] = (1 << (8 * length)) - 1;
        length += 1;
    }
    masks
};

impl Spelling {
    pub(super) fn new(json: &Value, shape: Shape) -> Self {
        let alphabet = shape.is_byte_level().then(byte_level_alphabet);
        let falls_back = json["model"]["byte_fallback"] == true;
        let (mut tokens, mut bytes) = (Vec::new(), Vec::new());
        let mut set = |id: &Value, spelling: Vec<u8>, is_added: bool| {
            let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
            let length = u16::try_from(spelling.len());
            let (Some(id), Ok(length)) = (id, length) else { return };
            if id >= tokens.len() {
                tokens.resize(id + 1, Token::default());
            }
            let mut head = [0; 16];
            head.iter_mut().zip(&spelling).for_each(|(byte, &spelt)| *byte = spelt);
            let head = u128::from_le_bytes(head);
            tokens[id] = Token { head, start: bytes.len() as u32, length, is_added };
            bytes.extend(spelling);
        };
        for (token, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
            let spelling = match &alphabet {
                Some(bytes) => {
                    token.chars().filter_map(|shown| bytes.get(&shown).copied()).collect()
                }
                None if falls_back && let Some(byte) = fallback_byte(token) => vec![byte],
                None => token.replace(SPACE_MARK, " ").into_bytes(),
            };
            set(id, spelling, false);
        }
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let content = token["content"].as_str().unwrap_or_default();
            set(&token["id"], content.as_bytes().to_vec(), true);
        }
        Self { tokens, bytes, prepends: shape.prepends }
    }

    fn bytes_of(&self, token: &Token) -> &[u8] {
        &self.bytes[token.start as usize..][..usize::from(token.length)]
    }

    /// The characters beyond ASCII that are tokens.
    pub(super) fn characters(&self) -> impl Iterator<Item = String> + '_ {
        let texts = self.tokens.iter().map(|token| std::str::from_utf8(self.bytes_of(token)));
        let is_character = |text: &&str| !text.is_ascii() && text.chars().nth(1).is_none();
        texts.flatten().filter(is_character).map(str::to_owned)
    }

    /// Whether ids spell a text. A text that the tokenizer changes, by NFC or by stripping white space, is not
    /// spelt by its ids, and neither is one with characters unknown to the vocabulary. `first` says whether a
    /// document begins with the text.
    pub(super) fn is_of(&self, text: &str, first: bool, ids: &[u32]) -> bool {
        let mut rest = text.as_bytes();
        let (mut begins, mut may_prepend) = (true, first || self.prepends == Prepends::Always);
        for &id in ids {
            let Some(token) = self.tokens.get(id as usize) else { return false };
            if begins && !token.is_added && may_prepend && self.prepends_to(rest) {
                let others = self.bytes_of(token).strip_prefix(b" ");
                match others.and_then(|others| rest.strip_prefix(others)) {
                    Some(others) => rest = others,
                    None => return false,
                }
            } else {
                match self.strip(token, rest) {
                    Some(others) => rest = others,
                    None => return false,
                }
            }
            begins = token.is_added;
            may_prepend = self.prepends != Prepends::FirstUnlessSpace;
        }
        rest.is_empty()
    }

    /// What follows a token in a text that begins with it.
    fn strip<'t>(&self, token: &Token, text: &'t [u8]) -> Option<&'t [u8]> {
        match (text.first_chunk::<16>(), MASKS.get(usize::from(token.length))) {
            // A call of memcmp would take longer.
            (Some(&head), Some(mask)) => {
                let differences = (u128::from_le_bytes(head) ^ token.head) & mask;
                (differences == 0).then(|| &text[usize::from(token.length)..])
            }
            _ => text.strip_prefix(self.bytes_of(token)),
        }
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
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}
