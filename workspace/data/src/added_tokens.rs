//! The tokens that the files beside a `tokenizer.json` add to it, and the names of special tokens. Order and properties
//! are as in transformers 5.
//!
//! 1. The tokens of `added_tokens_decoder` of `tokenizer_config.json`, by id. Without this field, the tokens of
//!    `added_tokens.json`, by id; `special_tokens_map.json` then adds and replaces fields of `tokenizer_config.json`.
//! 2. The special tokens with names: `bos_token` and the like, then other fields that end in `_token`, then an
//!    `extra_special_tokens` with names.
//! 3. The list `extra_special_tokens`, or `additional_special_tokens` if that list is absent or empty.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::{Error, Result};

const CONFIG_FILE: &str = "tokenizer_config.json";
const MAP_FILE: &str = "special_tokens_map.json";
const ADDED_FILE: &str = "added_tokens.json";
/// Maximum bytes of each of these files.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// The special tokens that every tokenizer may have, in this order.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const EXTRA: &str = "extra_special_tokens";
const ADDITIONAL: &str = "additional_special_tokens";
/// The field of one model's special tokens, by name.
const OF_MODEL: &str = "model_specific_special_tokens";
const DECODER: &str = "added_tokens_decoder";

#[derive(Clone, Debug)]
pub(crate) struct Added {
    pub content: String,
    /// The values of `PROPERTIES`: whole word, strips white space on its left, on its right, normalized, special.
    properties: [bool; 5],
    /// Whether the file gives only the token's text, without properties.
    is_text: bool,
    /// The id that the file gives.
    pub id: Option<u64>,
    pub file: &'static str,
}

const PROPERTIES: [&str; 5] = ["single_word", "lstrip", "rstrip", "normalized", "special"];
const NORMALIZED: usize = 3;
const SPECIAL: usize = 4;

impl Added {
    fn new(content: &str, special: bool, file: &'static str) -> Self {
        let properties = [false, false, false, !special, special];
        Self { content: content.to_owned(), properties, is_text: true, id: None, file }
    }

    /// Creates a token from a string, which is special, or from an object with `content`. Returns `None` for other
    /// values.
    fn of_value(value: &Value, file: &'static str) -> Option<Self> {
        let content = value.as_str().or_else(|| value["content"].as_str())?;
        let mut token = Self::new(content, value.is_string() || value["special"] == true, file);
        token.is_text = value.is_string();
        for (property, name) in token.properties.iter_mut().zip(PROPERTIES) {
            *property = value[name].as_bool().unwrap_or(*property);
        }
        Some(token)
    }

    /// Creates a token from an entry of `added_tokens` in `tokenizer.json`.
    pub(crate) fn of_json(value: &Value) -> Option<Self> {
        let token = Self::of_value(value, "tokenizer.json").filter(|_| value.is_object())?;
        Some(Self { id: value["id"].as_u64(), ..token })
    }

    pub(crate) fn to_json(&self, id: u32) -> Value {
        let mut token = json!({"id": id, "content": self.content});
        for (name, property) in PROPERTIES.iter().zip(self.properties) {
            token[*name] = property.into();
        }
        token
    }

    /// Returns whether normalizers change the token, as any text.
    pub(crate) fn is_normalized(&self) -> bool {
        self.properties[NORMALIZED]
    }

    pub(crate) fn is_special(&self) -> bool {
        self.properties[SPECIAL]
    }

    /// Returns the token as added after `before`, a token of the same content. A special token stays special.
    pub(crate) fn after(&self, before: Option<&Self>) -> Self {
        let mut token = self.clone();
        token.properties[SPECIAL] |= before.is_some_and(Self::is_special);
        token
    }

    /// Returns whether content and properties are the same, so that adding both tokens changes nothing.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (&self.content, self.properties) == (&other.content, other.properties)
    }
}

/// The contents of the files beside a `tokenizer.json`.
pub(crate) struct Others {
    /// The added tokens, in order.
    pub added: Vec<Added>,
    pub special: BTreeMap<String, String>,
    pub settings: BTreeMap<String, bool>,
    pub class: Option<String>,
}

impl Others {
    /// Reads the files beside `path`, a `tokenizer.json` with these tokens and this padding.
    pub(crate) fn read(path: &Path, own: &[Added], padding: Option<&Value>) -> Result<Self> {
        let mut fields = Fields { path, values: read(path, CONFIG_FILE)?, of_map: HashSet::new() };
        if !fields.values.get(EXTRA).is_some_and(is_listed)
            && let Some(additional) = fields.values.shift_remove(ADDITIONAL)
        {
            fields.values.insert(EXTRA.to_owned(), additional);
        }
        let mut names = fields.take_names();
        let mut first = BTreeMap::new();
        match fields.values.shift_remove(DECODER) {
            Some(decoder) => fields.decoded(&decoder, &mut first)?,
            None => fields.legacy(own, &mut names, &mut first)?,
        }
        if let Some(token) = padding.and_then(|padding| padding.get("pad_token")) {
            fields.values.entry("pad_token").or_insert_with(|| token.clone());
        }
        let special = fields.special(names, &first)?;
        let mut added: Vec<Added> = first.into_values().collect();
        let known: HashSet<String> =
            own.iter().chain(&added).map(|token| token.content.clone()).collect();
        let begin = added.len();
        for token in special.iter().map(|(_, token)| token.clone()).chain(fields.extra()?) {
            let is_again = |other: &Added| other.is_text == token.is_text && other.is_same(&token);
            if !known.contains(&token.content) && !added[begin..].iter().any(is_again) {
                added.push(token);
            }
        }
        for token in &mut added {
            token.properties[SPECIAL] |=
                special.iter().any(|(_, other)| other.content == token.content);
        }
        let class = fields.values.get("tokenizer_class").and_then(Value::as_str);
        let class = class.map(str::to_owned);
        let setting = |(name, value): (String, Value)| Some((name, value.as_bool()?));
        let settings = fields.values.into_iter().filter_map(setting).collect();
        let special = special.into_iter().map(|(name, token)| (name, token.content));
        Ok(Self { added, settings, class, special: special.collect() })
    }
}

fn is_listed(value: &Value) -> bool {
    value.as_array().is_some_and(|list| !list.is_empty())
        || value.as_object().is_some_and(|names| !names.is_empty())
}

/// Returns whether the field `name` is a special token of one model, not of every tokenizer.
fn is_of_model(name: &str) -> bool {
    name.ends_with("_token") && !NAMED.contains(&name)
}

/// The fields of `tokenizer_config.json`, as `special_tokens_map.json` extends and replaces them.
struct Fields<'a> {
    /// The `tokenizer.json`.
    path: &'a Path,
    values: Map<String, Value>,
    /// The names of the fields from `special_tokens_map.json`.
    of_map: HashSet<String>,
}

impl Fields<'_> {
    fn fault(&self, file: &str, name: &str, reason: &str) -> Error {
        let path = self.path.with_file_name(file);
        moh_files::unusable(&path, format!("{name}: {reason}: correct it")).into()
    }

    fn token(&self, name: &str, value: &Value) -> Result<Added> {
        let file = if self.of_map.contains(name) { MAP_FILE } else { CONFIG_FILE };
        let reason = "expected a string, or an object with the string content";
        Added::of_value(value, file).ok_or_else(|| self.fault(file, name, reason))
    }

    /// Removes and returns the special tokens with names outside [`NAMED`].
    fn take_names(&mut self) -> Map<String, Value> {
        let is_name = |(name, value): &(&String, &Value)| is_of_model(name) && value.is_string();
        let names = self.values.iter().filter(is_name);
        let mut names: Map<String, Value> =
            names.map(|(name, value)| (name.clone(), value.clone())).collect();
        names.keys().for_each(|name| drop(self.values.shift_remove(name)));
        self.take_extra_names(&mut names);
        match self.values.shift_remove(OF_MODEL) {
            Some(Value::Object(of_model)) if names.is_empty() => of_model,
            _ => names,
        }
    }

    /// Moves `extra_special_tokens` into `names` if they have names.
    fn take_extra_names(&mut self, names: &mut Map<String, Value>) {
        if let Some(Value::Object(extra)) = self.values.get_mut(EXTRA) {
            names.extend(std::mem::take(extra));
            self.values.shift_remove(EXTRA);
        }
    }

    /// Adds the tokens of `added_tokens_decoder` to `tokens`, by id.
    fn decoded(&self, decoder: &Value, tokens: &mut BTreeMap<u64, Added>) -> Result<()> {
        let fault = |name: &str| {
            let reason =
                format!("{name}: expected an id with an object, which has the string content");
            self.fault(CONFIG_FILE, DECODER, &reason)
        };
        for (name, token) in decoder.as_object().ok_or_else(|| fault("not an object"))? {
            let id = name.parse().map_err(|_| fault(name))?;
            let token = Added::of_value(token, CONFIG_FILE).filter(|_| token.is_object());
            tokens.insert(id, Added { id: Some(id), ..token.ok_or_else(|| fault(name))? });
        }
        Ok(())
    }

    /// Adds the fields of `special_tokens_map.json`, and the tokens of `added_tokens.json` and of `own` by their ids.
    fn legacy(
        &mut self,
        own: &[Added],
        names: &mut Map<String, Value>,
        tokens: &mut BTreeMap<u64, Added>,
    ) -> Result<()> {
        for (name, mut value) in read(self.path, MAP_FILE)? {
            let listed = match &mut value {
                Value::Array(list) if name == EXTRA => &mut list[..],
                token if name != EXTRA => std::slice::from_mut(token),
                _ => &mut [],
            };
            for token in listed.iter_mut().filter_map(Value::as_object_mut) {
                token.insert("special".to_owned(), true.into());
            }
            let before = self.values.get(&name).filter(|_| name == EXTRA);
            if let (Value::Array(list), Some(Value::Array(before))) = (&mut value, before) {
                list.splice(0..0, before.iter().cloned());
            }
            self.of_map.insert(name.clone());
            self.values.insert(name, value);
        }
        self.take_extra_names(names);
        let extra = self.values.get(EXTRA).and_then(Value::as_array).into_iter().flatten();
        let special = NAMED.iter().filter_map(|name| self.values.get(*name)).chain(extra);
        let special: Vec<Added> = special.filter_map(|value| Added::of_value(value, "")).collect();
        for (content, id) in read(self.path, ADDED_FILE)? {
            let number = id.as_u64();
            let number =
                number.ok_or_else(|| self.fault(ADDED_FILE, &content, "expected an id"))?;
            let is_special = special.iter().any(|token| token.content == content);
            let token = Added::new(&content, is_special, ADDED_FILE);
            tokens.insert(number, Added { id: Some(number), ..token });
        }
        tokens.extend(own.iter().filter_map(|token| Some((token.id?, token.clone()))));
        Ok(())
    }

    /// Returns the special tokens with their names. A token of [`NAMED`] has the properties of the known token of the
    /// same content.
    fn special(
        &self,
        names: Map<String, Value>,
        known: &BTreeMap<u64, Added>,
    ) -> Result<Vec<(String, Added)>> {
        let named = NAMED.iter().filter_map(|name| self.values.get_key_value(*name));
        let is_token = |(name, value): &(&String, &Value)| {
            let is_object = self.of_map.contains(*name) || value["__type"] == "AddedToken";
            is_of_model(name) && (value.is_string() || value.is_object() && is_object)
        };
        let named = named.filter(|(_, value)| !value.is_null());
        let all = named.chain(self.values.iter().filter(is_token));
        let mut all: Map<String, Value> =
            all.map(|(name, value)| (name.clone(), value.clone())).collect();
        all.extend(names);
        let token = |(name, value): (String, Value)| {
            let token = self.token(&name, &value)?;
            let same = known.values().rev().find(|other| other.content == token.content);
            let same = same.filter(|_| !is_of_model(&name)).cloned();
            Ok((name, same.unwrap_or(token)))
        };
        all.into_iter().map(token).collect()
    }

    /// Returns the special tokens without names.
    fn extra(&self) -> Result<Vec<Added>> {
        let name = if self.values.contains_key(EXTRA) { EXTRA } else { ADDITIONAL };
        match self.values.get(name) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(|value| self.token(name, value)).collect(),
            Some(_) => Err(self.fault(CONFIG_FILE, name, "expected a list of tokens")),
        }
    }
}

/// Reads the fields of the file `name` beside `path`. A missing file has no fields.
fn read(path: &Path, name: &str) -> Result<Map<String, Value>> {
    let path = path.with_file_name(name);
    let bytes = moh_files::read_bounded_if_any(&path, MAX_FILE_BYTES, "a file of a tokenizer")?;
    let Some(bytes) = bytes else { return Ok(Map::new()) };
    let fields = serde_json::from_slice(&bytes);
    Ok(fields.map_err(|error| {
        moh_files::unusable(&path, format!("not a JSON object: {error}: correct it"))
    })?)
}
