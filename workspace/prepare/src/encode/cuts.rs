//! Where a document can be cut so that the ids of its pieces are those of the whole: between an ASCII letter and
//! a space before another letter. The argument, for each form of a tokenizer (`shape`):
//!
//! Added tokens are found first. None holds a space, so that none reaches across a cut, and none that strips the
//! white space after it ends with a letter. Qwen's NFC does not reach across either: a space never combines with
//! what is before it, and an ASCII letter stays itself there.
//!
//! [`Words::Pattern`]: in no pattern can a match hold a letter and then a space, so that the words before and after
//! a cut are words of their own; what ends before a cut does so at a letter, for every pattern that looks ahead
//! looks past white space alone; and nothing looks behind. [`Words::Spaces`]: a space begins a word.
//!
//! [`Words::None`]: the whole text is one word. If no token of the vocabulary holds two characters side by side,
//! then no merge ever joins what is before and after a place between two such characters. Merges are applied by
//! rank and then from left to right, and the merges of one side change neither the pairs nor the order of the
//! other's. No token spans both sides for being unknown, because the bytes of unknown characters are tokens, which
//! no merge joins, and the vocabulary is not consulted for whole words. So the text falls into words at all such
//! places ([`Joints`]), of which a letter before a space is one that allows a cut.
//!
//! A piece that begins at a cut begins with a space, before which Metaspace puts no other. [`Prepends::Always`] puts
//! one before every piece, so that the piece's own is left out instead; then no added token begins or ends with a
//! letter, so that text without an added token stands around the cut.

use moh_data::TokenizerJson;
use serde_json::Value;
use tokenizers_1::pipeline::Span;

use super::shape::{Prepends, SPACE_MARK, Shape, Words};
use super::spelling::fallback_byte;

/// The places of a tokenizer's cuts.
#[derive(Debug)]
pub(super) struct Cuts {
    joints: Joints,
    /// Whether the space of a piece that begins at a cut is put there by the tokenizer.
    leaves_out_space: bool,
}

impl Cuts {
    /// The cuts of a tokenizer; `None` if it allows none.
    pub(super) fn new(json: &TokenizerJson, shape: Shape) -> Option<Self> {
        let added = json.fields["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
        let is_letter = |character: char| character.is_ascii_alphabetic();
        let reaches_across = |token: &Value| {
            let Some(content) = token["content"].as_str() else { return true };
            let holds_space = content.contains(' ')
                || !shape.is_byte_level()
                    && content.contains(SPACE_MARK)
                    && content.chars().any(|character| !SPACE_MARK.contains(character));
            let puts_space = shape.prepends == Prepends::Always && content.starts_with(is_letter);
            let changes = shape.nfc && token["normalized"] == true && !content.is_ascii();
            let takes_space = token["rstrip"] == true || shape.prepends == Prepends::Always;
            holds_space || puts_space || changes || takes_space && content.ends_with(is_letter)
        };
        if added.iter().any(reaches_across) {
            return None;
        }
        let joints = Joints::new(json, shape)?;
        let leaves_out_space = shape.prepends == Prepends::Always;
        Some(Self { joints, leaves_out_space })
    }

    /// The last cut of a text.
    pub(super) fn last(&self, text: &str) -> Option<usize> {
        let is_cut = |window: &[u8]| {
            window[1] == b' '
                && window[0].is_ascii_alphabetic()
                && window[2].is_ascii_alphabetic()
                && !self.joints.are_joined(window[0], SPACE)
        };
        text.as_bytes().windows(3).rposition(is_cut).map(|before| before + 1)
    }

    /// What is encoded of a piece that begins at a cut.
    pub(super) fn beginning_at<'t>(&self, piece: &'t str) -> &'t str {
        match piece.strip_prefix(' ') {
            Some(rest) if self.leaves_out_space => rest,
            _ => piece,
        }
    }
}

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
    /// The joints of a tokenizer; `None` if any characters may be joined.
    pub(super) fn new(json: &TokenizerJson, shape: Shape) -> Option<Self> {
        let mut joints = Self { joined: Box::new([[0; 4]; 256]) };
        if shape.words != Words::None {
            return Some(joints);
        }
        let model = &json.fields["model"];
        let is_byte = |token: &str| fallback_byte(token).is_some();
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
