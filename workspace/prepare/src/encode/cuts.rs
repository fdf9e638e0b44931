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
//! [`Words::None`]: the whole text is one word. If no token of the vocabulary holds a letter and then
//! [`SPACE_MARK`], then no merge ever joins what is before and after a cut. Merges are applied by rank and then
//! from left to right, and the merges of one side change neither the pairs nor the order of the other's. Letter and
//! mark are tokens, so that no unknown token spans them, and the vocabulary is not consulted for whole words.
//!
//! A piece that begins at a cut begins with a space, before which Metaspace puts no other. [`Prepends::Always`] puts
//! one before every piece, so that the piece's own is left out instead; then no added token begins or ends with a
//! letter, so that text without an added token stands around the cut.

use serde_json::Value;

use super::shape::{Prepends, SPACE_MARK, Shape, Words};

/// The places of a tokenizer's cuts.
#[derive(Debug)]
pub(super) struct Cuts {
    /// By character: whether a cut can follow it.
    letters: [bool; 128],
    /// Whether the space of a piece that begins at a cut is put there by the tokenizer.
    leaves_out_space: bool,
}

impl Cuts {
    /// The cuts of a tokenizer; `None` if it allows none.
    pub(super) fn new(json: &Value, shape: Shape) -> Option<Self> {
        let added = json["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
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
        let mut letters: [bool; 128] =
            std::array::from_fn(|byte| (byte as u8).is_ascii_alphabetic());
        if shape.words == Words::None {
            let vocabulary = json["model"]["vocab"].as_object()?;
            if json["model"]["ignore_merges"] == true || !vocabulary.contains_key(SPACE_MARK) {
                return None;
            }
            for (byte, is_letter) in letters.iter_mut().enumerate() {
                *is_letter &= vocabulary.contains_key(&char::from(byte as u8).to_string());
            }
            for token in vocabulary.keys() {
                for (end, _) in token.match_indices(SPACE_MARK) {
                    if let Some(before @ ..128) = token[..end].bytes().next_back() {
                        letters[usize::from(before)] = false;
                    }
                }
            }
        }
        let leaves_out_space = shape.prepends == Prepends::Always;
        letters.contains(&true).then_some(Self { letters, leaves_out_space })
    }

    /// The last cut of a text.
    pub(super) fn last(&self, text: &str) -> Option<usize> {
        let is_cut = |window: &[u8]| {
            window[1] == b' '
                && self.letters.get(usize::from(window[0])) == Some(&true)
                && window[2].is_ascii_alphabetic()
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
