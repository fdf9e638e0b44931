//! The bytes of each id, to check that ids spell the text that they were encoded from.

use moh_data::{TokenizerJson, byte_of, byte_token};

use super::shape::{Prepends, SPACE_MARK, Shape};

/// The bytes of every id. For a frequent id few bytes of memory are read, because the tables of the library share the
/// processor's caches.
pub(super) struct Spelling {
    heads: Vec<Head>,
    /// By id: the start of its bytes. The last entry is the end of the last id's bytes.
    starts: Vec<u32>,
    bytes: Vec<u8>,
    is_added: Vec<bool>,
    prepends: Prepends,
}

/// The first bytes of an id. The last byte is the number of all its bytes, at most [`MANY`].
type Head = [u8; 16];

/// Maximum bytes of an id in its head.
const HEAD_BYTES: usize = size_of::<Head>() - 1;
/// So many bytes, or more.
const MANY: usize = 0xFF;
/// Bytes that ids spell before they are compared with the text.
const BATCH_BYTES: usize = 1 << 10;

fn head_of(bytes: &[u8]) -> Head {
    let mut head = Head::default();
    head.iter_mut().zip(bytes).take(HEAD_BYTES).for_each(|(byte, &spelt)| *byte = spelt);
    // At most MANY, the maximum of a byte.
    head[HEAD_BYTES] = bytes.len().min(MANY) as u8;
    head
}

impl Spelling {
    pub(super) fn new(json: &TokenizerJson, shape: Shape) -> Self {
        let falls_back = json.fields["model"]["byte_fallback"] == true;
        let spelt = |token: &str| match byte_token(token).filter(|_| falls_back) {
            _ if shape.is_byte_level() => token.chars().filter_map(byte_of).collect(),
            Some(byte) => vec![byte],
            None => token.replace(SPACE_MARK, " ").into_bytes(),
        };
        let mut sources: Vec<Option<(&str, bool)>> = Vec::new();
        let mut set = |id: usize, token, is_added| {
            if id >= sources.len() {
                sources.resize(id + 1, None);
            }
            sources[id] = Some((token, is_added));
        };
        for (token, id) in &json.tokens {
            set(*id as usize, token.as_str(), false);
        }
        for token in json.fields["added_tokens"].as_array().into_iter().flatten() {
            let id = token["id"].as_u64().and_then(|id| u32::try_from(id).ok());
            if let Some(id) = id {
                set(id as usize, token["content"].as_str().unwrap_or_default(), true);
            }
        }
        let mut spelling = Self {
            heads: Vec::with_capacity(sources.len()),
            starts: Vec::with_capacity(sources.len() + 1),
            bytes: Vec::new(),
            is_added: sources.iter().map(|source| matches!(source, Some((_, true)))).collect(),
            prepends: shape.prepends,
        };
        for source in sources {
            let bytes = match source {
                Some((token, true)) => token.as_bytes().to_vec(),
                Some((token, false)) => spelt(token),
                None => Vec::new(),
            };
            spelling.heads.push(head_of(&bytes));
            spelling.starts.push(spelling.bytes.len() as u32);
            spelling.bytes.extend(bytes);
        }
        spelling.starts.push(spelling.bytes.len() as u32);
        spelling
    }

    fn bytes_of(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let (start, end) = (*self.starts.get(id)?, *self.starts.get(id + 1)?);
        self.bytes.get(start as usize..end as usize)
    }

    /// Returns the characters beyond ASCII that are tokens.
    pub(super) fn characters(&self) -> impl Iterator<Item = String> + '_ {
        let ids = 0..self.heads.len() as u32;
        let texts = ids.filter_map(|id| std::str::from_utf8(self.bytes_of(id)?).ok());
        let is_character = |text: &&str| !text.is_ascii() && text.chars().nth(1).is_none();
        texts.filter(is_character).map(str::to_owned)
    }

    /// Returns whether ids spell a text. Ids do not spell a text that the tokenizer changes, by NFC or by stripping
    /// white space. They also do not spell characters unknown to the vocabulary.
    pub(super) fn is_of(&self, text: &str, ids: &[u32]) -> bool {
        let text = text.as_bytes();
        let rest = match self.prepends {
            Prepends::Never => self.strip_all(ids, text),
            _ => self.strip_with_spaces(text, ids),
        };
        rest.is_some_and(<[u8]>::is_empty)
    }

    /// Returns the rest of a text that starts with `ids`, except for the spaces that the tokenizer has put there.
    fn strip_with_spaces<'t>(&self, text: &'t [u8], ids: &[u32]) -> Option<&'t [u8]> {
        let is_added = |id: &u32| self.is_added.get(*id as usize) == Some(&true);
        let (mut rest, mut may_prepend) = (text, true);
        // Each chunk begins the text, or follows an added token.
        for ids in ids.chunk_by(|before, _| !is_added(before)) {
            let prepends = may_prepend && !ids.first().is_some_and(is_added);
            rest = match ids.split_first() {
                Some((id, others)) if prepends && self.prepends_to(rest) => {
                    let bytes = self.bytes_of(*id)?.strip_prefix(b" ")?;
                    self.strip_all(others, rest.strip_prefix(bytes)?)?
                }
                _ => self.strip_all(ids, rest)?,
            };
            may_prepend = self.prepends != Prepends::FirstUnlessSpace;
        }
        Some(rest)
    }

    /// Returns the rest of a text that starts with `ids`.
    fn strip_all<'t>(&self, ids: &[u32], text: &'t [u8]) -> Option<&'t [u8]> {
        let (mut spelt, mut length, mut rest) = ([0; BATCH_BYTES], 0, text);
        for &id in ids {
            let head = self.heads.get(id as usize)?;
            let bytes = usize::from(head[HEAD_BYTES]);
            if bytes <= HEAD_BYTES
                && let Some(place) = spelt[length..].first_chunk_mut()
            {
                // The head's further bytes are overwritten, or not compared.
                *place = *head;
                length += bytes;
                continue;
            }
            rest = rest.strip_prefix(&spelt[..length])?.strip_prefix(self.bytes_of(id)?)?;
            length = 0;
        }
        rest.strip_prefix(&spelt[..length])
    }

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

/// Returns the characters of GPT-2's alphabet, each as a token.
pub(super) fn alphabet() -> impl Iterator<Item = String> {
    let characters = ('\0'..='\u{143}').filter(|character| byte_of(*character).is_some());
    characters.map(String::from)
}
