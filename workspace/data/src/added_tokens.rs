//! The tokens that the files beside a `tokenizer.json` add to it, and the names of special tokens, in the order and with
//! the properties that transformers 5 gives them.
//!
//! `added_tokens_decoder` of `tokenizer_config.json` comes first, by id; without it, `special_tokens_map.json` adds to and
//! replaces the fields of that file, and `added_tokens.json` comes first. Then come the special tokens with names
//! (`bos_token` and its kin, then fields that end in `_token`, then those of an `extra_special_tokens` with names), then
//! `extra_special_tokens`, or `additional_special_tokens` if there are none.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::{Error, Result};

const CONFIG_FILE: &str = "tokenizer_config.json";
const MAP_FILE: &str = "special_tokens_map.json";
const ADDED_FILE: &str = "added_tokens.json";
/// Maximum bytes of each.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// The special tokens that every tokenizer may have, in this order.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const EXTRA: &str = "extra_special_tokens";
const ADDITIONAL: &str = "additional_special_tokens";
/// Special tokens of one model with their names.
const OF_MODEL: &str = "model_specific_special_tokens";
const DECODER: &str = "added_tokens_decoder";

/// A token that a file adds.
#[derive(Clone, Debug)]
pub(crate) struct Added {
    pub content: String,
    /// Whether it is a whole word, strips white space to its left and right, is normalized, and is special.
    properties: [bool; 5],
    /// Whether the file names it without its properties.
    is_text: bool,
    /// Its id by the file.
    pub id: Option<u64>,
    pub file: &'static str,
}

const PROPERTIES: [&str; 5] = ["single_word", "lstrip", "rstrip", "normalized", "special"];
const SPECIAL: usize = 4;

impl Added {
    fn new(content: &str, special: bool, file: &'static str) -> Self {
        let properties = [false, false, false, !special, special];
        Self { content: content.to_owned(), properties, is_text: true, id: None, file }
    }

    /// Of a text, which is special, or an object with its `content`; `None` if it is neither.
    fn of_value(value: &Value, file: &'static str) -> Option<Self> {
        let content = value.as_str().or_else(|| value["content"].as_str())?;
        let mut token = Self::new(content, value.is_string() || value["special"] == true, file);
        token.is_text = value.is_string();
        for (property, name) in token.properties.iter_mut().zip(PROPERTIES) {
            *property = value[name].as_bool().unwrap_or(*property);
        }
        Some(token)
    }

    /// Of an entry of `added_tokens` in `tokenizer.json`.
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

    /// Whether adding one after the other changes nothing.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (&self.content, self.properties) == (&other.content, other.properties)
    }
}

/// What the files beside a `tokenizer.json` say.
#[derive(Default)]
pub(crate) struct Others {
    /// The tokens that are added, one after the other.
    pub added: Vec<Added>,
    pub special: BTreeMap<String, (String, &'static str)>,
    pub settings: BTreeMap<String, bool>,
}

impl Others {
    /// Reads the files beside `path`, a `tokenizer.json` with these tokens and this padding.
    pub(crate) fn read(path: &Path, own: &[Added], padding: Option<&Value>) -> Result<Self> {
        let mut fields = Fields::read(path)?;
        let is_listed = match fields.values.get(EXTRA) {
            Some(Value::Array(list)) => !list.is_empty(),
            Some(Value::Object(names)) => !names.is_empty(),
            _ => false,
        };
        if !is_listed && let Some(additional) = fields.values.shift_remove(ADDITIONAL) {
            fields.values.insert(EXTRA.to_owned(), additional);
        }
        let mut names = fields.take_names(path)?;
        let (first, by_content) = match fields.values.shift_remove(DECODER) {
            Some(decoder) => decoded(path, &decoder)?,
            None => fields.legacy(path, own, &mut names)?,
        };
        if let Some(token) = padding.and_then(|padding| padding.get("pad_token")) {
            fields.values.entry("pad_token").or_insert_with(|| token.clone());
        }
        let special = fields.special(path, names, &by_content)?;
        let named: HashSet<String> =
            special.iter().map(|(_, token)| token.content.clone()).collect();
        let known = own.iter().chain(&first).map(|token| token.content.clone());
        let known: HashSet<String> = known.collect();
        let mut added = first;
        let mut more: Vec<Added> = Vec::new();
        for token in special.iter().map(|(_, token)| token.clone()).chain(fields.extra(path)?) {
            let is_again = |other: &Added| other.is_text == token.is_text && other.is_same(&token);
            if !known.contains(&token.content) && !more.iter().any(is_again) {
                more.push(token);
            }
        }
        added.extend(more);
        for token in added.iter_mut().filter(|token| named.contains(&token.content)) {
            token.properties[SPECIAL] = true;
        }
        let setting = |(name, value): (String, Value)| Some((name, value.as_bool()?));
        Ok(Self {
            added,
            settings: fields.values.into_iter().filter_map(setting).collect(),
            special: special
                .into_iter()
                .map(|(name, token)| (name, (token.content, token.file)))
                .collect(),
        })
    }
}

/// Tokens in the order of their ids, and the tokens of a file by their contents.
type Decoded = (Vec<Added>, HashMap<String, Added>);

/// The tokens of an `added_tokens_decoder`.
fn decoded(path: &Path, decoder: &Value) -> Result<Decoded> {
    let fault = |reason: String| fault(path, CONFIG_FILE, DECODER, &reason);
    let entries =
        decoder.as_object().ok_or_else(|| fault("expected an object of tokens".to_owned()))?;
    let mut tokens = BTreeMap::new();
    for (id, token) in entries {
        let number: u64 =
            id.parse().map_err(|_| fault(format!("{id:?} is no id: expected a number")))?;
        let token = Added::of_value(token, CONFIG_FILE).filter(|_| token.is_object());
        let token = token
            .ok_or_else(|| fault(format!("{id}: expected an object with the string content")))?;
        tokens.insert(number, Added { id: Some(number), ..token });
    }
    Ok(with_contents(tokens))
}

fn with_contents(tokens: BTreeMap<u64, Added>) -> Decoded {
    let by_content = tokens.values().map(|token| (token.content.clone(), token.clone())).collect();
    (tokens.into_values().collect(), by_content)
}

/// The fields of `tokenizer_config.json`, and those that `special_tokens_map.json` adds or replaces.
struct Fields {
    values: Map<String, Value>,
    /// Those of `special_tokens_map.json`.
    of_map: HashSet<String>,
}

/// Special tokens with their names.
type Names = Vec<(String, Added)>;

impl Fields {
    fn read(path: &Path) -> Result<Self> {
        Ok(Self { values: read(path, CONFIG_FILE)?, of_map: HashSet::new() })
    }

    fn file(&self, name: &str) -> &'static str {
        if self.of_map.contains(name) { MAP_FILE } else { CONFIG_FILE }
    }

    /// The token of a field.
    fn token(&self, path: &Path, name: &str, value: &Value) -> Result<Added> {
        let file = self.file(name);
        Added::of_value(value, file).ok_or_else(|| {
            fault(path, file, name, "expected a string, or an object with the string content")
        })
    }

    /// Takes out the special tokens with other names than [`NAMED`].
    fn take_names(&mut self, path: &Path) -> Result<Names> {
        let is_name = |(name, value): &(&String, &Value)| {
            name.ends_with("_token") && !NAMED.contains(&&name[..]) && value.is_string()
        };
        let names = self.values.iter().filter(is_name);
        let names: Map<String, Value> =
            names.map(|(name, value)| (name.clone(), value.clone())).collect();
        names.keys().for_each(|name| drop(self.values.shift_remove(name)));
        let of_model = self.values.shift_remove(OF_MODEL);
        let mut all = Names::new();
        self.add_names(path, names, &mut all)?;
        self.take_extra_names(path, &mut all)?;
        if let Some(Value::Object(names)) = of_model.filter(|_| all.is_empty()) {
            self.add_names(path, names, &mut all)?;
        }
        Ok(all)
    }

    /// Takes out `extra_special_tokens` if they have names.
    fn take_extra_names(&mut self, path: &Path, all: &mut Names) -> Result<()> {
        match self.values.shift_remove(EXTRA) {
            Some(Value::Object(names)) => self.add_names(path, names, all),
            Some(other) => {
                self.values.insert(EXTRA.to_owned(), other);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn add_names(&self, path: &Path, names: Map<String, Value>, all: &mut Names) -> Result<()> {
        for (name, value) in names {
            let token = self.token(path, &name, &value)?;
            match all.iter_mut().find(|(other, _)| *other == name) {
                Some(known) => known.1 = token,
                None => all.push((name, token)),
            }
        }
        Ok(())
    }

    /// Adds the fields of `special_tokens_map.json`, and returns the tokens of `added_tokens.json` and of `own`.
    fn legacy(&mut self, path: &Path, own: &[Added], names: &mut Names) -> Result<Decoded> {
        for (name, mut value) in read(path, MAP_FILE)? {
            let tokens = match &mut value {
                Value::Array(list) if name == EXTRA => &mut list[..],
                token if name != EXTRA => std::slice::from_mut(token),
                _ => &mut [],
            };
            for token in tokens.iter_mut().filter_map(Value::as_object_mut) {
                token.insert("special".to_owned(), true.into());
            }
            if let (Value::Array(more), Some(Value::Array(list))) =
                (&mut value, self.values.get(&name))
                && name == EXTRA
            {
                more.splice(0..0, list.iter().cloned());
            }
            self.of_map.insert(name.clone());
            self.values.insert(name, value);
        }
        self.take_extra_names(path, names)?;
        let named = NAMED.iter().filter_map(|name| self.values.get(*name));
        let extra = self.values.get(EXTRA).and_then(Value::as_array).into_iter().flatten();
        let special: HashSet<String> = named
            .chain(extra)
            .filter_map(|value| Some(Added::of_value(value, "")?.content))
            .collect();
        let mut tokens = BTreeMap::new();
        for (content, id) in read(path, ADDED_FILE)? {
            let id = id.as_u64();
            let number = id.ok_or_else(|| fault(path, ADDED_FILE, &content, "expected an id"))?;
            let token = Added::new(&content, special.contains(&content), ADDED_FILE);
            tokens.insert(number, Added { id, ..token });
        }
        let own = own.iter().filter_map(|token| Some((token.id?, token.clone())));
        tokens.extend(own);
        Ok(with_contents(tokens))
    }

    /// The special tokens with their names, those of [`NAMED`] with the properties of the tokens of the same content.
    fn special(&self, path: &Path, names: Names, known: &HashMap<String, Added>) -> Result<Names> {
        let mut all = Names::new();
        for name in NAMED {
            let Some(value) = self.values.get(name).filter(|value| !value.is_null()) else {
                continue;
            };
            let token = self.token(path, name, value)?;
            all.push((name.to_owned(), known.get(&token.content).cloned().unwrap_or(token)));
        }
        for (name, value) in &self.values {
            let is_token = value.is_string()
                || value.is_object()
                    && (self.of_map.contains(name) || value["__type"] == "AddedToken");
            if is_token && name.ends_with("_token") && !NAMED.contains(&&name[..]) {
                all.push((name.clone(), self.token(path, name, value)?));
            }
        }
        for (name, token) in names {
            match all.iter_mut().find(|(other, _)| *other == name) {
                Some(known) => known.1 = token,
                None => all.push((name, token)),
            }
        }
        Ok(all)
    }

    /// The special tokens without names.
    fn extra(&self, path: &Path) -> Result<Vec<Added>> {
        let name = if self.values.contains_key(EXTRA) { EXTRA } else { ADDITIONAL };
        match self.values.get(name) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(list)) => {
                list.iter().map(|value| self.token(path, name, value)).collect()
            }
            Some(_) => Err(fault(path, self.file(name), name, "expected a list of tokens")),
        }
    }
}

/// The fields of the file `name` beside `path`; none if it does not exist.
fn read(path: &Path, name: &str) -> Result<Map<String, Value>> {
    let path = path.with_file_name(name);
    let bytes = moh_files::read_bounded_if_any(&path, MAX_FILE_BYTES, "a file of a tokenizer")?;
    let Some(bytes) = bytes else { return Ok(Map::new()) };
    serde_json::from_slice(&bytes).map_err(|error| {
        moh_files::unusable(&path, format!("not a JSON object: {error}: correct it")).into()
    })
}

fn fault(path: &Path, file: &str, name: &str, reason: &str) -> Error {
    moh_files::unusable(&path.with_file_name(file), format!("{name}: {reason}: correct it")).into()
}
