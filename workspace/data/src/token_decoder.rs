//! Decodes ids to text without the library of tokenizers, with the library's result without special tokens. Supports
//! the decoders of Llama, Qwen and similar models. Paired with `TextTokenizer::decode` of crate `text`; tests compare
//! both.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::Value;

use crate::TokenizerJson;
use crate::added_tokens::Added;

/// Decodes ids.
#[derive(Clone, Debug)]
pub struct TokenDecoder {
    /// The tokens that are not special, by their ids.
    tokens: HashMap<u32, String>,
    /// The steps from a list of tokens to a text; `None` if spaces join the tokens.
    steps: Option<Vec<Step>>,
}

/// A step of a decoder, from a list of texts to a list of texts. The texts are joined at the end.
#[derive(Clone, Debug)]
enum Step {
    /// Converts characters of GPT-2's alphabet to bytes.
    ByteLevel,
    Replace {
        pattern: String,
        content: String,
    },
    /// Converts `<0xE5>` to a byte.
    ByteFallback,
    Fuse,
    /// Removes up to `start` of a character from the beginning of each text, and up to `stop` from its end.
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    /// Replaces a mark by a space. With `drops_first`, removes the marks of the first text.
    Metaspace {
        mark: char,
        drops_first: bool,
    },
}

impl TokenDecoder {
    /// Creates the decoder of a tokenizer. Returns `None` if its decoder or its normalizer is not supported.
    pub(crate) fn new(json: &TokenizerJson, added: &BTreeMap<u32, Added>) -> Option<Self> {
        let steps = match &json.fields["decoder"] {
            Value::Null => None,
            decoder => Some(steps(decoder)?),
        };
        let mut tokens: HashMap<u32, String> =
            json.tokens.iter().map(|(token, id)| (*id, token.clone())).collect();
        for (id, token) in added {
            let shown = match token.is_normalized() {
                true => normalized(&token.content, &json.fields["normalizer"])?,
                false => token.content.clone(),
            };
            tokens.insert(*id, shown);
        }
        let special = added.values().filter(|token| token.is_special());
        let special: HashSet<&str> = special.map(|token| &token.content[..]).collect();
        tokens.retain(|_, token| !special.contains(&token[..]));
        Some(Self { tokens, steps })
    }

    /// Counts the UTF-8 bytes of the decoded ids, without special tokens: the divisor of bits per byte, which compares
    /// models with different vocabularies. Ids without a token, as in a padded vocabulary, have no bytes.
    pub fn decoded_bytes(&self, ids: &[u32]) -> u64 {
        self.decode(ids).len() as u64
    }

    /// Returns the text of ids, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> String {
        let tokens: Vec<String> =
            ids.iter().filter_map(|id| self.tokens.get(id).cloned()).collect();
        match &self.steps {
            None => tokens.join(" "),
            Some(steps) => steps.iter().fold(tokens, |texts, step| step.apply(texts)).concat(),
        }
    }
}

impl TokenizerJson {
    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        let place = self.tokens.binary_search_by(|(other, _)| other.as_str().cmp(token)).ok()?;
        Some(self.tokens[place].1)
    }
}

/// Returns the steps of a decoder, or `None` if a step is not supported.
fn steps(decoder: &Value) -> Option<Vec<Step>> {
    let character = |name: &str| {
        let mut characters = decoder[name].as_str()?.chars();
        characters.next().filter(|_| characters.next().is_none())
    };
    let count = |name: &str| usize::try_from(decoder[name].as_u64()?).ok();
    Some(match decoder["type"].as_str()? {
        "Sequence" => {
            let parts: Option<Vec<_>> = decoder["decoders"].as_array()?.iter().map(steps).collect();
            return Some(parts?.concat());
        }
        "ByteLevel" => vec![Step::ByteLevel],
        "Replace" => {
            let (pattern, content) = replacement(decoder)?;
            vec![Step::Replace { pattern: pattern.to_owned(), content: content.to_owned() }]
        }
        "ByteFallback" => vec![Step::ByteFallback],
        "Fuse" => vec![Step::Fuse],
        "Strip" => vec![Step::Strip {
            content: character("content")?,
            start: count("start")?,
            stop: count("stop")?,
        }],
        "Metaspace" => {
            let never =
                decoder["prepend_scheme"] == "never" || decoder["add_prefix_space"] == false;
            vec![Step::Metaspace { mark: character("replacement")?, drops_first: !never }]
        }
        _ => return None,
    })
}

/// Returns the pattern and the content of a `Replace`, or `None` if the pattern is not text, or is empty.
fn replacement(replace: &Value) -> Option<(&str, &str)> {
    let pattern = replace["pattern"]["String"].as_str().filter(|pattern| !pattern.is_empty())?;
    Some((pattern, replace["content"].as_str()?))
}

/// Applies a normalizer to a text. Returns `None` if the normalizer is not supported.
fn normalized(text: &str, normalizer: &Value) -> Option<String> {
    if normalizer.is_null() {
        return Some(text.to_owned());
    }
    match normalizer["type"].as_str()? {
        "Sequence" => {
            let mut parts = normalizer["normalizers"].as_array()?.iter();
            parts.try_fold(text.to_owned(), |text, part| normalized(&text, part))
        }
        "Prepend" if text.is_empty() => Some(String::new()),
        "Prepend" => Some(format!("{}{text}", normalizer["prepend"].as_str()?)),
        "Replace" => {
            let (pattern, content) = replacement(normalizer)?;
            Some(text.replace(pattern, content))
        }
        // These forms do not change ASCII.
        "NFC" | "NFD" | "NFKC" | "NFKD" if text.is_ascii() => Some(text.to_owned()),
        _ => None,
    }
}

impl Step {
    fn apply(&self, texts: Vec<String>) -> Vec<String> {
        match self {
            Step::ByteLevel => {
                let bytes: Vec<u8> = texts.iter().flat_map(|text| bytes_of(text)).collect();
                vec![String::from_utf8_lossy(&bytes).into_owned()]
            }
            Step::Replace { pattern, content } => {
                texts.into_iter().map(|text| text.replace(pattern, content)).collect()
            }
            Step::ByteFallback => without_bytes(texts),
            Step::Fuse => vec![texts.concat()],
            &Step::Strip { content, start, stop } => {
                texts.iter().map(|text| stripped(text, content, [start, stop]).to_owned()).collect()
            }
            &Step::Metaspace { mark, drops_first } => {
                let spaced = |(index, text): (usize, &String)| match drops_first && index == 0 {
                    true => text.replace(mark, ""),
                    false => text.replace(mark, " "),
                };
                texts.iter().enumerate().map(spaced).collect()
            }
        }
    }
}

/// Removes up to `start` of a character from the beginning of a text, and up to `stop` from its end.
fn stripped(mut text: &str, content: char, [start, stop]: [usize; 2]) -> &str {
    for _ in 0..start {
        let Some(rest) = text.strip_prefix(content) else { break };
        text = rest;
    }
    for _ in 0..stop {
        let Some(rest) = text.strip_suffix(content) else { break };
        text = rest;
    }
    text
}

/// Returns the bytes of a token such as `<0x0A>`, or of a token of byte-level BPE. Returns `None` for other tokens.
pub fn bytes_of_token(token: &str) -> Option<Vec<u8>> {
    let byte = byte_token(token).map(|byte| vec![byte]);
    byte.or_else(|| token.chars().map(byte_of).collect())
}

/// Returns the bytes that a text spells in GPT-2's alphabet. If it has another character, returns the text's own bytes.
fn bytes_of(text: &str) -> Vec<u8> {
    text.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| text.as_bytes().to_vec())
}

/// Returns the byte of a character of GPT-2's alphabet. Printable Latin-1 stands for itself. The other bytes have the
/// characters from U+0100 on.
pub fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Replaces each run of byte tokens by its text. If a run is not UTF-8, replaces each of its tokens by U+FFFD.
fn without_bytes(texts: Vec<String>) -> Vec<String> {
    let (mut out, mut bytes) = (Vec::new(), Vec::new());
    for text in texts.into_iter().map(Some).chain([None]) {
        if let Some(byte) = text.as_deref().and_then(byte_token) {
            bytes.push(byte);
            continue;
        }
        if !bytes.is_empty() {
            let count = bytes.len();
            let spelled = String::from_utf8(std::mem::take(&mut bytes));
            out.push(spelled.unwrap_or_else(|_| "\u{fffd}".repeat(count)));
        }
        out.extend(text);
    }
    out
}

/// Returns the byte of a token such as `<0xE5>`.
pub fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_from_the_names_of_tokens() {
        assert_eq!(bytes_of_token("<0x0A>"), Some(vec![10]));
        assert_eq!((byte_token("<0xZZ>"), byte_token("<0x1>")), (None, None));
        for (token, bytes) in [
            ("\u{120}a", Some(b" a".to_vec())),
            ("\u{10a}", Some(b"\n".to_vec())),
            ("\u{e2}\u{122}", Some(vec![0xe2, 0x80])),
            ("\u{143}", Some(vec![0xad])), // The last character.
            ("\u{144}", None),
            (" ", None),
        ] {
            assert_eq!(bytes_of_token(token), bytes, "{token}");
        }
    }
}
