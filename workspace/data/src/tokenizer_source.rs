//! A tokenizer as the files of its directory describe it together: `tokenizer.json`, and the tokens that other files
//! name, which transformers 5 adds to it. What is added is written into `added_tokens` of the `tokenizer.json` that
//! programs load, so all of them have the same ids. Paired with `added_tokens`, and with `_from_pretrained` of
//! transformers' `tokenization_utils_base.py` and `TokenizersBackend.__init__`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::Result;
use crate::added_tokens::{Added, Others};
use crate::tokenizer_content::Tokens;

/// The file that holds a tokenizer.
const TOKENIZER_FILE: &str = "tokenizer.json";
/// Tokens of a tokenizer, and one more than its largest id.
pub const MAX_TOKENS: usize = 1 << 24;
/// Maximum bytes of a `tokenizer.json`.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Files of tokenizers of other forms, from which transformers makes a `tokenizer.json`.
const OTHER_FORMS: [&str; 6] =
    ["tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "tiktoken.model", "spiece.model"];

/// A tokenizer's files, read.
#[derive(Debug)]
pub struct TokenizerSource {
    /// The `tokenizer.json`.
    pub path: PathBuf,
    /// Its bytes, with the tokens that other files add.
    pub json: Vec<u8>,
    /// The special tokens by their names, such as `eos_token`, and the file that names each.
    pub special: BTreeMap<String, (String, &'static str)>,
    /// The settings of `tokenizer_config.json` that are true or false, such as `add_bos_token`.
    pub settings: BTreeMap<String, bool>,
    /// What a user should know of files that disagree, in a sentence each.
    pub remarks: Vec<String>,
}

/// The part of a `tokenizer.json` that is checked here.
#[derive(Deserialize)]
struct File<'a> {
    #[serde(default)]
    added_tokens: Vec<Value>,
    padding: Option<Value>,
    #[serde(borrow)]
    model: Model<'a>,
}

#[derive(Deserialize)]
struct Model<'a> {
    dropout: Option<f64>,
    #[serde(borrow)]
    vocab: Option<&'a RawValue>,
}

impl TokenizerSource {
    /// Reads `path/tokenizer.json`, or `path` itself if it is a file, and the files beside it.
    ///
    /// # Errors
    /// Fails if there is none, if it encodes a text in several ways, or has an id that is too large, and if a file beside
    /// it is no JSON, or names a token in a way that transformers does not read.
    pub fn read(path: &Path) -> Result<Self> {
        let path = if path.is_dir() { path.join(TOKENIZER_FILE) } else { path.to_path_buf() };
        let directory = moh_files::parent(&path);
        let is_named = path.file_name().is_some_and(|name| name == TOKENIZER_FILE);
        if is_named && directory.is_dir() && !moh_files::is_file(&path)? {
            return Err(moh_files::unusable(directory, missing(directory)).into());
        }
        let json = moh_files::read_bounded(&path, MAX_FILE_BYTES, "a tokenizer")?;
        Self::of_bytes(path, json, true)
    }

    /// Checks a `tokenizer.json` of these bytes, which errors name `path`; `beside`, with what the files beside it add.
    pub fn of_bytes(path: PathBuf, json: Vec<u8>, beside: bool) -> Result<Self> {
        let fault = |reason: String| moh_files::unusable(&path, reason);
        let invalid = |error| fault(format!("not a valid tokenizer: {error}"));
        let file: File<'_> = serde_json::from_slice(&json).map_err(invalid)?;
        if let Some(dropout) = file.model.dropout.filter(|&dropout| dropout != 0.0) {
            return Err(fault(format!(
                "model.dropout is {dropout}, with which a text has other ids each time: set it to null, as it is for \
                 training a tokenizer alone"
            ))
            .into());
        }
        let tokens = match file.model.vocab {
            Some(vocab) => serde_json::from_str::<Tokens>(vocab.get()).map_err(invalid)?.0,
            None => Vec::new(),
        };
        let too_large = |token: &str, id: u64| {
            fault(format!(
                "the token {token:?} has the id {id}, and {} is the largest that is read: give it an id below the \
                 number of tokens",
                MAX_TOKENS - 1
            ))
        };
        let largest = tokens.iter().max_by_key(|(_, id)| *id);
        if let Some((token, id)) = largest.filter(|(_, id)| *id as usize >= MAX_TOKENS) {
            return Err(too_large(token, u64::from(*id)).into());
        }
        let own: Vec<Added> = file.added_tokens.iter().filter_map(Added::of_json).collect();
        for token in &own {
            if let Some(id) = token.id.filter(|&id| id >= MAX_TOKENS as u64) {
                return Err(too_large(&token.content, id).into());
            }
        }
        let others = match beside {
            true => Others::read(&path, &own, file.padding.as_ref())?,
            false => Others::default(),
        };
        let more = changes(&own, others.added);
        let vocabulary = Vocabulary::new(&tokens, own.iter().chain(&more));
        let mut ids = HashMap::new();
        vocabulary.assign(&own, &mut ids);
        let at_once = {
            let mut ids = HashMap::new();
            let all: Vec<Added> = own.iter().chain(&more).cloned().collect();
            vocabulary.assign(&all, &mut ids);
            ids
        };
        let known = ids.clone();
        vocabulary.assign(&more, &mut ids);
        if let Some(token) =
            more.iter().find(|token| at_once.get(&token.content) != ids.get(&token.content))
        {
            let file = token.file;
            return Err(fault(format!(
                "has no token {:?}, which {file} adds, and its ids have gaps, so that its id depends on the program: \
                 write the tokenizer again with transformers' save_pretrained",
                token.content
            ))
            .into());
        }
        let is_new = |token: &&Added| {
            !known.contains_key(&token.content) && !vocabulary.ids.contains_key(&token.content[..])
        };
        let mut remarks = new_tokens(&path, more.iter().filter(is_new), &ids);
        remarks.extend(other_ids(&path, own.iter().chain(&more), &ids));
        let json = match more.is_empty() {
            true => json,
            false => with_tokens(&json, own.iter().chain(&more), &ids).map_err(invalid)?,
        };
        let Others { special, settings, .. } = others;
        Ok(Self { path, json, special, settings, remarks })
    }

    /// blake3 of the tokenizer, in hexadecimal: of the bytes of the file if no other adds a token.
    pub fn hash(&self) -> String {
        blake3::hash(&self.json).to_hex().to_string()
    }
}

/// What is wrong with a directory without a `tokenizer.json`.
fn missing(directory: &Path) -> String {
    let form = OTHER_FORMS.into_iter().find(|name| directory.join(name).exists());
    let Some(form) = form else {
        return format!("contains no {TOKENIZER_FILE}, which text requires");
    };
    let shown = directory.display();
    format!(
        "contains {form} and no {TOKENIZER_FILE}, the form of a tokenizer that is read: write it with transformers and \
         sentencepiece: python -c \"from transformers import AutoTokenizer; \
         AutoTokenizer.from_pretrained('{shown}').save_pretrained('{shown}')\""
    )
}

/// What has an effect of tokens that are added one after the other to `own`: those that are no repetitions.
fn changes(own: &[Added], added: Vec<Added>) -> Vec<Added> {
    let mut known: HashMap<String, Added> =
        own.iter().map(|token| (token.content.clone(), token.clone())).collect();
    let mut is_change = |token: &Added| {
        let before = known.insert(token.content.clone(), token.clone());
        !token.content.is_empty() && !before.is_some_and(|before| before.is_same(token))
    };
    added.into_iter().filter(|token| is_change(token)).collect()
}

/// What decides on the ids of added tokens.
struct Vocabulary<'a> {
    /// The tokens of the model.
    size: u32,
    /// The ids of the model's tokens that are added as well.
    ids: HashMap<&'a str, u32>,
}

impl<'a> Vocabulary<'a> {
    fn new<'t>(tokens: &'a [(String, u32)], added: impl Iterator<Item = &'t Added>) -> Self {
        let added: HashMap<&str, ()> = added.map(|token| (&token.content[..], ())).collect();
        let ids = tokens.iter().filter(|(token, _)| added.contains_key(&token[..]));
        // A file has fewer bytes than that.
        let size = tokens.len() as u32;
        Self { size, ids: ids.map(|(token, id)| (&token[..], *id)).collect() }
    }

    /// Adds the ids that the library gives to tokens which are added together.
    fn assign(&self, added: &[Added], ids: &mut HashMap<String, u32>) {
        let largest = ids.values().max().copied().filter(|&id| id >= self.size);
        let mut next = largest.map_or(self.size, |id| id + 1);
        for token in added.iter().filter(|token| !token.content.is_empty()) {
            let known =
                ids.get(&token.content).or_else(|| self.ids.get(&token.content[..])).copied();
            let id = known.unwrap_or_else(|| {
                next += 1;
                next - 1
            });
            ids.insert(token.content.clone(), id);
        }
    }
}

/// A sentence for each file that names tokens which `tokenizer.json` does not have.
fn new_tokens<'a>(
    path: &Path,
    tokens: impl Iterator<Item = &'a Added>,
    ids: &HashMap<String, u32>,
) -> Vec<String> {
    let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    tokens.for_each(|token| files.entry(token.file).or_default().push(&token.content));
    let sentence = |(file, tokens): (&str, Vec<&str>)| {
        let others = match tokens.len() {
            1 => String::new(),
            all => format!(" and {} more", all - 1),
        };
        let (first, id) = (tokens[0], ids[tokens[0]]);
        format!(
            "{}: has no token {first:?}{others}, which {file} beside it adds from id {id} on, here as in transformers",
            path.display()
        )
    };
    files.into_iter().map(sentence).collect()
}

/// A sentence for each file that gives tokens other ids than they have.
fn other_ids<'a>(
    path: &Path,
    tokens: impl Iterator<Item = &'a Added>,
    ids: &HashMap<String, u32>,
) -> Vec<String> {
    let mut files: BTreeMap<&str, String> = BTreeMap::new();
    for token in tokens {
        let Some((said, id)) = token.id.zip(ids.get(&token.content)) else { continue };
        if said != u64::from(*id) {
            files.entry(token.file).or_insert_with(|| {
                format!(
                    "{}: gives the token {:?} the id {said}, and it has {id}, here as in transformers, which counts on \
                     after the vocabulary",
                    path.with_file_name(token.file).display(),
                    token.content
                )
            });
        }
    }
    files.into_values().collect()
}

/// A `tokenizer.json` with these added tokens, of which the last of several with one content counts, as the library
/// writes it.
fn with_tokens<'a>(
    json: &[u8],
    added: impl Iterator<Item = &'a Added>,
    ids: &HashMap<String, u32>,
) -> serde_json::Result<Vec<u8>> {
    let mut fields: BTreeMap<&str, &RawValue> = serde_json::from_slice(json)?;
    let by_id: BTreeMap<u32, &Added> =
        added.filter_map(|token| Some((*ids.get(&token.content)?, token))).collect();
    let added: Vec<Value> = by_id.into_iter().map(|(id, token)| token.to_json(id)).collect();
    let added = serde_json::value::to_raw_value(&added)?;
    fields.insert("added_tokens", &added);
    serde_json::to_vec(&fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn token(id: u64, content: &str, normalized: bool) -> Value {
        let flags = json!({"single_word": false, "lstrip": false, "rstrip": false});
        let mut token =
            json!({"id": id, "content": content, "normalized": normalized, "special": true});
        flags.as_object().unwrap().iter().for_each(|(flag, value)| token[flag] = value.clone());
        token
    }

    /// What becomes of a tokenizer of `a`, `b` and `<s>` with these other files.
    fn source(files: &[(&str, Value)]) -> Result<TokenizerSource> {
        let dir = tempfile::tempdir().unwrap();
        let model = json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "<s>": 2}, "merges": []});
        let tokenizer =
            json!({"version": "1.0", "added_tokens": [token(3, "<x>", false)], "model": model});
        let write = |name: &str, contents: &Value| {
            std::fs::write(dir.path().join(name), contents.to_string()).unwrap();
        };
        write("tokenizer.json", &tokenizer);
        files.iter().for_each(|(name, contents)| write(name, contents));
        TokenizerSource::read(dir.path())
    }

    /// The added tokens, each with its id.
    fn added(files: &[(&str, Value)]) -> Vec<(String, u64)> {
        let json: Value = serde_json::from_slice(&source(files).unwrap().json).unwrap();
        let tokens = json["added_tokens"].as_array().unwrap().iter();
        let shown = |token: &Value| token["content"].as_str().unwrap().to_owned();
        tokens.map(|token| (shown(token), token["id"].as_u64().unwrap())).collect()
    }

    const CONFIG: &str = "tokenizer_config.json";
    const MAP: &str = "special_tokens_map.json";
    const ADDED: &str = "added_tokens.json";

    #[test]
    fn tokens_are_added_in_the_order_of_transformers() {
        let decoder =
            json!({"9": {"content": "<d>"}, "5": {"content": "<c>"}, "3": token(3, "<x>", false)});
        // The pairs are what transformers 5.24 gives: `AutoTokenizer.from_pretrained(D).get_added_vocab()`.
        for (files, expected) in [
            (vec![], vec![("<x>", 3)]),
            (
                vec![(
                    CONFIG,
                    json!({"eos_token": "<x>", "add_bos_token": false, "pad_token": null}),
                )],
                vec![("<x>", 3)],
            ),
            (vec![(CONFIG, json!({"bos_token": "<s>"}))], vec![("<s>", 2), ("<x>", 3)]),
            (
                vec![(
                    CONFIG,
                    json!({"eot_token": "<t>", "eos_token": {"content": "<e>"}, "extra_special_tokens": ["<p>"],
                    "additional_special_tokens": ["<q>"], "added_tokens_decoder": decoder}),
                )],
                vec![("<x>", 3), ("<c>", 4), ("<d>", 5), ("<e>", 6), ("<t>", 7), ("<p>", 8)],
            ),
            // A decoder leaves out the older files.
            (
                vec![
                    (CONFIG, json!({"added_tokens_decoder": {}})),
                    (MAP, json!({"eos_token": "<e>"})),
                    (ADDED, json!({"<y>": 4})),
                ],
                vec![("<x>", 3)],
            ),
            (
                vec![
                    (
                        CONFIG,
                        json!({"eos_token": "<f>", "extra_special_tokens": {"image_token": "<i>"}}),
                    ),
                    (
                        MAP,
                        json!({"eos_token": {"content": "<e>"}, "additional_special_tokens": ["<q>"]}),
                    ),
                    (ADDED, json!({"<z>": 7, "<y>": 6, "<lost>": 3})),
                ],
                vec![("<x>", 3), ("<y>", 4), ("<z>", 5), ("<e>", 6), ("<i>", 7), ("<q>", 8)],
            ),
            // Another property of a token that is there.
            (
                vec![(CONFIG, json!({"added_tokens_decoder": {"3": token(3, "<x>", true)}}))],
                vec![("<x>", 3)],
            ),
        ] {
            let expected: Vec<(String, u64)> =
                expected.into_iter().map(|(token, id)| (token.to_owned(), id)).collect();
            assert_eq!(added(&files), expected, "{files:?}");
        }
    }

    #[test]
    fn files_that_disagree_are_named_once_each() {
        let config =
            json!({"added_tokens_decoder": {"9": {"content": "<c>"}, "10": {"content": "<d>"}}});
        let remarks = source(&[(CONFIG, config)]).unwrap().remarks;
        let [new, ids] = &remarks[..] else { panic!("{remarks:?}") };
        assert!(
            new.contains(
                "tokenizer.json: has no token \"<c>\" and 1 more, which tokenizer_config.json"
            ),
            "{new}"
        );
        assert!(
            ids.contains("tokenizer_config.json: gives the token \"<c>\" the id 9, and it has 4"),
            "{ids}"
        );
        let one = source(&[(CONFIG, json!({"bos_token": "<s>"}))]).unwrap();
        assert!(one.remarks.is_empty(), "{:?}", one.remarks);
        assert_eq!(one.special["bos_token"], ("<s>".to_owned(), CONFIG));
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_file_and_field() {
        for (file, contents, expected) in [
            (
                CONFIG,
                json!({"eos_token": 3}),
                "tokenizer_config.json: eos_token: expected a string",
            ),
            (CONFIG, json!([]), "tokenizer_config.json: not a JSON object"),
            (
                CONFIG,
                json!({"added_tokens_decoder": {"x": {"content": "y"}}}),
                "added_tokens_decoder: \"x\" is no id",
            ),
            (
                CONFIG,
                json!({"added_tokens_decoder": {"5": "y"}}),
                "added_tokens_decoder: 5: expected an object",
            ),
            (
                CONFIG,
                json!({"extra_special_tokens": [3]}),
                "extra_special_tokens: expected a string",
            ),
            (
                CONFIG,
                json!({"extra_special_tokens": "<x>"}),
                "extra_special_tokens: expected a list",
            ),
            (
                MAP,
                json!({"bos_token": ["<s>"]}),
                "special_tokens_map.json: bos_token: expected a string",
            ),
            (ADDED, json!({"<y>": "4"}), "added_tokens.json: <y>: expected an id"),
        ] {
            let message = source(&[(file, contents)]).unwrap_err().to_string();
            assert!(message.contains(expected) && message.ends_with(": correct it"), "{message}");
        }
        let of = |json: Value| {
            let path = PathBuf::from("tokenizer.json");
            TokenizerSource::of_bytes(path, json.to_string().into_bytes(), false)
                .unwrap_err()
                .to_string()
        };
        let model = |model: Value| of(json!({"model": model}));
        for (message, expected) in [
            (
                model(json!({"dropout": 0.1, "vocab": {}})),
                "tokenizer.json: model.dropout is 0.1, with which a text",
            ),
            (
                model(json!({"vocab": {"a": u32::MAX}})),
                "the token \"a\" has the id 4294967295, and 16777215 is",
            ),
            (
                model(json!({"vocab": {"a": u64::MAX}})),
                "not a valid tokenizer: invalid value: integer",
            ),
            (
                of(json!({"added_tokens": [token(1 << 24, "x", false)], "model": {}})),
                "the token \"x\" has the id 16777216",
            ),
            (of(json!({"model": 3})), "not a valid tokenizer: invalid type: integer `3`"),
        ] {
            assert!(message.contains(expected), "{message}");
        }
        assert!(source(&[]).is_ok());
        let dir = tempfile::tempdir().unwrap();
        let read = || TokenizerSource::read(dir.path()).unwrap_err().to_string();
        assert!(read().ends_with("contains no tokenizer.json, which text requires"), "{}", read());
        std::fs::write(dir.path().join("tokenizer.model"), "x").unwrap();
        assert!(
            read().contains("contains tokenizer.model and no tokenizer.json, the form"),
            "{}",
            read()
        );
    }

    #[test]
    fn a_token_of_another_file_is_refused_where_ids_have_gaps() {
        let model = json!({"vocab": {"a": 0, "b": 9}, "merges": []});
        let json = json!({"added_tokens": [token(9, "b", false)], "model": model});
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        assert!(TokenizerSource::read(dir.path()).is_ok());
        std::fs::write(dir.path().join(ADDED), json!({"<c>": 10}).to_string()).unwrap();
        let message = TokenizerSource::read(dir.path()).unwrap_err().to_string();
        assert!(
            message.contains(
                "has no token \"<c>\", which added_tokens.json adds, and its ids have gaps"
            ),
            "{message}"
        );
    }
}
