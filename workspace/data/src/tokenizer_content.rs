//! The content of a tokenizer, whatever the bytes of its file: the content of `tokenizer.json` as the library writes
//! it, with every default filled in. Two files of the same content may differ in the order of keys, in spaces, in
//! omitted defaults, and in old spellings, such as merges of one string. They may also differ in truncation and
//! padding, which are disabled here. Without the library, only the defaults of a BPE model are filled in: a file that
//! omits other defaults has another content here than with the library.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{self, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

const SHOWN_CHARACTERS: usize = 40;
/// The part with the model's tokens and their ids.
const VOCABULARY: &str = "vocabulary";
const MERGES: &str = "merges";
/// Fields of a `tokenizer.json` that do not belong to its content: they are the same for all tokenizers here.
const OTHER_FIELDS: [&str; 3] = ["version", "truncation", "padding"];
/// Optional fields of a BPE model, with the defaults that the library writes.
const BPE_DEFAULTS: [(&str, &RawValue); 7] = [
    ("dropout", RawValue::NULL),
    ("unk_token", RawValue::NULL),
    ("continuing_subword_prefix", RawValue::NULL),
    ("end_of_word_suffix", RawValue::NULL),
    ("fuse_unk", RawValue::FALSE),
    ("byte_fallback", RawValue::FALSE),
    ("ignore_merges", RawValue::FALSE),
];

/// Identifies the content of a tokenizer: the blake3 of each of its parts, in hexadecimal. A part is hashed as JSON
/// without spaces and with sorted keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenizerContent(BTreeMap<String, String>);

impl TokenizerContent {
    /// Returns the first part that differs from `other`, or `None` if the contents are equal.
    pub fn first_difference<'a>(&'a self, other: &'a Self) -> Option<&'a str> {
        let names: BTreeSet<&String> = self.0.keys().chain(other.0.keys()).collect();
        let mut names: Vec<&str> = names.into_iter().map(String::as_str).collect();
        // The vocabulary comes first: it says most.
        names.sort_by_key(|&name| name != VOCABULARY);
        names.into_iter().find(|&name| self.0.get(name) != other.0.get(name))
    }
}

/// A `tokenizer.json` as the library writes it, with a sorted vocabulary. The vocabulary and the merges, nearly all of
/// the file, stay text.
#[derive(Debug)]
pub struct TokenizerJson {
    /// All fields, the model without its vocabulary and its merges.
    pub fields: Value,
    /// The tokens of the model with their ids, sorted by token. Several tokens may have one id.
    pub tokens: Vec<(String, u32)>,
    /// The field `vocab` of the model.
    pub vocabulary: Box<RawValue>,
    /// The field `merges` of the model, an array of pairs of tokens; `null` if the model has no merges.
    pub merges: Box<RawValue>,
}

impl TokenizerJson {
    /// Parses `text`, which the library wrote for a tokenizer with these `tokens` of the model.
    pub fn written(text: &str, mut tokens: Vec<(String, u32)>) -> Result<Self, serde_json::Error> {
        let mut fields = fields_of(text)?;
        let mut model = fields_of(fields.remove("model").map_or("{}", RawValue::get))?;
        tokens.sort_unstable();
        let vocabulary = match model.remove("vocab") {
            Some(list) if !list.get().starts_with('{') => list.to_owned(),
            // If several tokens have one id, the library writes any of them.
            _ => to_raw_value(&Vocabulary(&tokens))?,
        };
        let merges = model.remove("merges").unwrap_or(RawValue::NULL).to_owned();
        Self::of_parts(fields, model, tokens, vocabulary, merges)
    }

    /// Parses a `tokenizer.json`.
    pub fn of_file(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let mut fields: BTreeMap<&str, &RawValue> = serde_json::from_slice(bytes)?;
        let mut model = fields_of(fields.remove("model").map_or("{}", RawValue::get))?;
        let vocabulary = model.remove("vocab").unwrap_or(RawValue::NULL);
        let Tokens(mut tokens) = serde_json::from_str(vocabulary.get())?;
        tokens.sort_unstable();
        let vocabulary = match vocabulary.get().starts_with('{') {
            true => to_raw_value(&Vocabulary(&tokens))?,
            false => to_raw_value(&serde_json::from_str::<Value>(vocabulary.get())?)?,
        };
        let merges =
            model.remove("merges").map(RawValue::get).map(serde_json::from_str::<Vec<Merge>>);
        let merges = merges.transpose()?;
        if merges.is_some() {
            for (name, default) in BPE_DEFAULTS {
                model.entry(name).or_insert(default);
            }
        }
        Self::of_parts(fields, model, tokens, vocabulary, to_raw_value(&merges)?)
    }

    /// Creates the value from the fields except the model, and the model's fields except its vocabulary and its merges.
    fn of_parts(
        fields: BTreeMap<&str, &RawValue>,
        model: BTreeMap<&str, &RawValue>,
        tokens: Vec<(String, u32)>,
        vocabulary: Box<RawValue>,
        merges: Box<RawValue>,
    ) -> Result<Self, serde_json::Error> {
        let mut fields = object(fields)?;
        fields["model"] = object(model)?;
        Ok(Self { fields, tokens, vocabulary, merges })
    }

    /// Returns the hash of each part.
    pub fn content(&self) -> TokenizerContent {
        let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
        let mut hashes: BTreeMap<String, String> =
            self.small_parts().map(|(name, part)| (name, hash(&part.to_string()))).collect();
        hashes.insert(VOCABULARY.to_owned(), hash(self.vocabulary.get()));
        hashes.insert(MERGES.to_owned(), hash(self.merges.get()));
        TokenizerContent(hashes)
    }

    /// Returns the parts except the vocabulary and the merges, with sorted keys.
    fn small_parts(&self) -> impl Iterator<Item = (String, Value)> {
        let fields = self.fields.as_object().into_iter().flatten();
        fields.filter(|(name, _)| !OTHER_FIELDS.contains(&name.as_str())).map(|(name, part)| {
            let mut part = part.clone();
            part.sort_all_objects();
            (name.clone(), part)
        })
    }

    /// Returns the value of a part, or null if no part has this name.
    fn part(&self, name: &str) -> Value {
        let text = match name {
            VOCABULARY => &self.vocabulary,
            MERGES => &self.merges,
            _ => {
                let mut parts = self.small_parts();
                return parts.find(|(part, _)| part == name).unwrap_or_default().1;
            }
        };
        // Valid JSON, as every `RawValue`.
        serde_json::from_str(text.get()).unwrap_or_default()
    }

    /// Returns the first difference from the content of `other`, with both values: `vocabulary."the": 5, not 7`.
    pub(crate) fn first_difference(&self, other: &Self) -> Option<String> {
        let (ours, others) = (self.content(), other.content());
        let name = ours.first_difference(&others)?;
        Some(difference(name, &self.part(name), &other.part(name)))
    }
}

fn fields_of(object: &str) -> Result<BTreeMap<&str, &RawValue>, serde_json::Error> {
    serde_json::from_str(object)
}

fn object(fields: BTreeMap<&str, &RawValue>) -> Result<Value, serde_json::Error> {
    let parse = |(name, text): (&str, &RawValue)| {
        let value: Value = serde_json::from_str(text.get())?;
        Ok((name.to_owned(), value))
    };
    Ok(Value::Object(fields.into_iter().map(parse).collect::<Result<_, serde_json::Error>>()?))
}

struct Vocabulary<'a>(&'a [(String, u32)]);

impl Serialize for Vocabulary<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, id)| (token, id)))
    }
}

/// The tokens of a vocabulary with their ids, in the order of the text. The text is an object of ids, or a list of
/// tokens with their scores.
pub(crate) struct Tokens(pub(crate) Vec<(String, u32)>);

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        reader.deserialize_any(TokensVisitor)
    }
}

struct TokensVisitor;

impl<'de> Visitor<'de> for TokensVisitor {
    type Value = Tokens;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object of ids, or a list of tokens with scores")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Tokens, M::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = map.next_entry()? {
            tokens.push(token);
        }
        Ok(Tokens(tokens))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> Result<Tokens, S::Error> {
        let mut tokens = Vec::new();
        while let Some((token, _)) = list.next_element::<(String, f64)>()? {
            // Ids are below the number of bytes of a file.
            tokens.push((token, tokens.len() as u32));
        }
        Ok(Tokens(tokens))
    }
}

/// Two tokens that become one token, written as a pair, or by older programs as one string with a space.
#[derive(Serialize)]
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        reader.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a pair of tokens")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Merge, E> {
        let pair = text.split_once(' ');
        let (first, second) = pair.ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))?;
        Ok(Merge(first.to_owned(), second.to_owned()))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut pair: S) -> Result<Merge, S::Error> {
        let mut token =
            |index| pair.next_element()?.ok_or_else(|| de::Error::invalid_length(index, &self));
        Ok(Merge(token(0)?, token(1)?))
    }
}

/// Returns the first difference between two values at `place`.
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

fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
