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
//! [`Words::None`]: the whole text is one word. If no token of the vocabulary holds a character and then
//! [`SPACE_MARK`], then no merge ever joins that character and a space after it. Merges are applied by rank and
//! then from left to right, and the merges of one side change neither the pairs nor the order of the other's. The
//! mark is a token, so that no unknown token spans both sides, and the vocabulary is not consulted for whole words.
//! For the same reason the text falls into words there, which [`Joints::words`] lists for the faster library.
//!
//! A piece that begins at a cut begins with a space, before which Metaspace puts no other. [`Prepends::Always`] puts
//! one before every piece, so that the piece's own is left out instead; then no added token begins or ends with a
//! letter, so that text without an added token stands around the cut.

use serde_json::Value;
use tokenizers_1::pipeline::Span;

use super::shape::{Prepends, SPACE_MARK, Shape, Words};

/// The places of a tokenizer's cuts.
#[derive(Debug)]
pub(super) struct Cuts {
    joints: Joints,
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
                && !self.joints.joined[usize::from(window[0])]
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

/// The characters that a token can join with a space after them.
#[derive(Debug)]
pub(super) struct Joints {
    /// By the last byte of a character.
    joined: [bool; 256],
}

impl Joints {
    /// The joints of a tokenizer; `None` if any character may be joined.
    pub(super) fn new(json: &Value, shape: Shape) -> Option<Self> {
        let mut joined = [false; 256];
        if shape.words == Words::None {
            let model = &json["model"];
            let vocabulary = model["vocab"].as_object()?;
            if model["ignore_merges"] == true || !vocabulary.contains_key(SPACE_MARK) {
                return None;
            }
            for token in vocabulary.keys() {
                for (end, _) in token.match_indices(SPACE_MARK) {
                    if let Some(&before) = token.as_bytes()[..end].last() {
                        joined[usize::from(before)] = true;
                    }
                }
            }
        }
        Some(Self { joined })
    }

    /// The words of a text whose spaces are [`SPACE_MARK`]: they begin with those that nothing joins with what is
    /// before them.
    pub(super) fn words(&self, text: &str, words: &mut Vec<Span>) {
        words.clear();
        let mut start = 0;
        for place in memchr::memmem::find_iter(text.as_bytes(), SPACE_MARK) {
            if place > start && !self.joined[usize::from(text.as_bytes()[place - 1])] {
                words.push(Span::new(start as u32, place as u32));
                start = place;
            }
        }
        if start < text.len() {
            words.push(Span::new(start as u32, text.len() as u32));
        }
    }
}
