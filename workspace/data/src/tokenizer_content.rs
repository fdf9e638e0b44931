//! What a tokenizer is, whatever the bytes of its file: the content of `tokenizer.json` as the library reads
//! it, with every default filled in. Two files of the same content differ in the order of keys, in spaces, in
//! defaults that one of them leaves out, in old spellings such as merges of one string, or in truncation and
//! padding, which are disabled here.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::Tokenizer;

/// Characters of a value that a difference shows.
const SHOWN_CHARACTERS: usize = 40;

/// Identifies the content of a tokenizer: the blake3 of each of its parts, in hexadecimal. A part is hashed as
/// JSON without spaces whose keys are sorted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenizerContent(BTreeMap<String, String>);

/// The content of a tokenizer, by part: `vocabulary`, `merges` and the rest of the `model`, and the other fields
/// of a `tokenizer.json` by their names.
pub(crate) struct Parts(BTreeMap<String, Value>);

impl TokenizerContent {
    /// The first part that another content has otherwise; `None` if they are equal.
    pub fn first_difference<'a>(&'a self, other: &'a Self) -> Option<&'a str> {
        let names: BTreeSet<&String> = self.0.keys().chain(other.0.keys()).collect();
        let mut names: Vec<&str> = names.into_iter().map(String::as_str).collect();
        // The vocabulary says most.
        names.sort_by_key(|&name| name != VOCABULARY);
        names.into_iter().find(|&name| self.0.get(name) != other.0.get(name))
    }
}

/// The part that is the tokens of the model with their ids.
const VOCABULARY: &str = "vocabulary";

/// A tokenizer as the library writes it, but with every token of its vocabulary: of several tokens of one id the
/// library writes any one.
///
/// # Errors
/// Fails if the library cannot write the tokenizer.
pub(crate) fn json(tokenizer: &Tokenizer) -> Result<Value, serde_json::Error> {
    let mut json = serde_json::to_value(tokenizer)?;
    if let Some(vocabulary @ Value::Object(_)) = json.pointer_mut("/model/vocab") {
        let tokens = tokenizer.get_vocab(false).into_iter();
        *vocabulary = Value::Object(tokens.map(|(token, id)| (token, id.into())).collect());
    }
    Ok(json)
}

impl Parts {
    /// The parts of a tokenizer without truncation and padding.
    ///
    /// # Errors
    /// Fails if the library cannot write the tokenizer.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self, serde_json::Error> {
        let mut parts = BTreeMap::new();
        if let Value::Object(fields) = json(tokenizer)? {
            parts.extend(fields);
        }
        // The same for all tokenizers here.
        parts.retain(|name, _| !["version", "truncation", "padding"].contains(&name.as_str()));
        if let Some(Value::Object(model)) = parts.get_mut("model") {
            let merges = model.remove("merges").unwrap_or_default();
            let vocabulary = model.remove("vocab").unwrap_or_default();
            parts.insert("merges".to_owned(), merges);
            parts.insert(VOCABULARY.to_owned(), vocabulary);
        }
        parts.values_mut().for_each(Value::sort_all_objects);
        Ok(Parts(parts))
    }

    /// The hash of each part.
    pub(crate) fn content(&self) -> TokenizerContent {
        let hash = |part: &Value| blake3::hash(part.to_string().as_bytes()).to_hex().to_string();
        TokenizerContent(self.0.iter().map(|(name, part)| (name.clone(), hash(part))).collect())
    }

    /// The first place where these parts are not `other`'s, with both values: `vocabulary."the": 5, not 7`.
    pub(crate) fn first_difference(&self, other: &Self) -> Option<String> {
        let (ours, others) = (self.content(), other.content());
        let name = ours.first_difference(&others)?;
        let part = |parts: &Self| parts.0.get(name).cloned().unwrap_or_default();
        Some(difference(name, &part(self), &part(other)))
    }
}

/// The first place in which two values that lie at `place` differ.
fn difference(place: &str, ours: &Value, others: &Value) -> String {
    let deeper = match (ours, others) {
        (Value::Object(ours), Value::Object(others)) => {
            let names: BTreeSet<&String> = ours.keys().chain(others.keys()).collect();
            let differs = names.into_iter().find(|&name| ours.get(name) != others.get(name));
            differs.map(|name| (format!("{place}.{name:?}"), ours.get(name), others.get(name)))
        }
        (Value::Array(ours), Value::Array(others)) => {
            let mut places = 0..ours.len().max(others.len());
            let differs = places.find(|&index| ours.get(index) != others.get(index));
            differs.map(|index| (format!("{place}.{index}"), ours.get(index), others.get(index)))
        }
        _ => None,
    };
    match deeper {
        Some((place, Some(ours), Some(others))) => difference(&place, ours, others),
        Some((place, Some(_), None)) => format!("{place} is new"),
        Some((place, ..)) => format!("{place} is missing"),
        None => format!("{place}: {}, not {}", shown(ours), shown(others)),
    }
}

/// The beginning of a value.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
