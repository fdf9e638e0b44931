//! A tokenizer as the files of its directory describe it together: `tokenizer.json`, and the tokens of other files that
//! transformers 5 adds to it. The added tokens are written into `added_tokens` of the `tokenizer.json` that programs
//! load, so all programs have the same ids. Paired with `added_tokens`, and with `_from_pretrained` of transformers'
//! `tokenization_utils_base.py` and `TokenizersBackend.__init__`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::Result;
use crate::added_tokens::{Added, Others};
use crate::tokenizer_content::Tokens;

const TOKENIZER_FILE: &str = "tokenizer.json";
/// Exclusive upper limit of a tokenizer's ids.
pub const MAX_TOKENS: usize = 1 << 24;
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Files of other tokenizer formats, which transformers converts to a `tokenizer.json`.
const OTHER_FORMS: [&str; 6] =
    ["tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "tiktoken.model", "spiece.model"];

/// The contents of a tokenizer's files.
#[derive(Debug)]
pub struct TokenizerSource {
    /// The path of the `tokenizer.json`.
    pub path: PathBuf,
    /// The bytes of the `tokenizer.json`, with the tokens that other files add.
    pub json: Vec<u8>,
    pub(crate) added: BTreeMap<u32, Added>,
    /// The special tokens by their names, such as `eos_token`.
    pub special: BTreeMap<String, String>,
    /// The settings of `tokenizer_config.json` that are true or false, such as `add_bos_token`.
    pub settings: BTreeMap<String, bool>,
    /// `tokenizer_class` of `tokenizer_config.json`.
    pub class: Option<String>,
    /// Remarks for the user on files that disagree, one sentence each.
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
    /// Parsed because the library panics if the decoder is not JSON.
    #[serde(rename = "decoder")]
    _decoder: Option<Value>,
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
    /// Fails if there is no `tokenizer.json`, if it encodes a text in several ways, or if an id is too large. Also
    /// fails if a file beside it is not JSON, or names a token in a form that transformers does not read.
    pub fn read(path: &Path) -> Result<Self> {
        let path = if path.is_dir() { path.join(TOKENIZER_FILE) } else { path.to_path_buf() };
        let directory = moh_files::parent(&path);
        let is_named = path.file_name().is_some_and(|name| name == TOKENIZER_FILE);
        if is_named && directory.is_dir() && !moh_files::is_file(&path)? {
            return Err(moh_files::unusable(directory, missing(directory)).into());
        }
        let json = moh_files::read_bounded(&path, MAX_FILE_BYTES, "a tokenizer")?;
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
        let own: Vec<Added> = file.added_tokens.iter().filter_map(Added::of_json).collect();
        let listed = tokens.iter().map(|(token, id)| (token, u64::from(*id)));
        let mut listed =
            listed.chain(own.iter().filter_map(|token| Some((&token.content, token.id?))));
        if let Some((token, id)) = listed.find(|(_, id)| *id >= MAX_TOKENS as u64) {
            return Err(fault(format!(
                "the token {token:?} has the id {id}, and {} is the largest that is read: give it an id below the \
                 number of tokens",
                MAX_TOKENS - 1
            ))
            .into());
        }
        let others = Others::read(&path, &own, file.padding.as_ref())?;
        let (ids, new) = ids(&tokens, &own, &others.added);
        if let Some(token) = new.first()
            && tokens.iter().any(|(_, id)| *id as usize >= tokens.len())
        {
            return Err(fault(format!(
                "has no token {:?}, which {} adds, and its ids have gaps, so that a new one depends on the program: \
                 write the tokenizer again with transformers' save_pretrained",
                token.content, token.file
            ))
            .into());
        }
        let (mut added, mut is_changed) = (BTreeMap::<u32, Added>::new(), false);
        for (index, token) in own.iter().chain(&others.added).enumerate() {
            let Some(id) = ids.get(&token.content[..]) else { continue };
            let is_same = added.get(id).is_some_and(|known| known.is_same(token));
            is_changed |= index >= own.len() && !is_same;
            added.insert(*id, token.after(added.get(id)));
        }
        let remarks = remarks(&path, own.iter().chain(&others.added), &new, &ids);
        let json = match is_changed {
            true => with_tokens(&json, &added).map_err(invalid)?,
            false => json,
        };
        let Others { special, settings, class, .. } = others;
        Ok(Self { path, json, added, special, settings, class, remarks })
    }

    /// Returns the tokenizer's blake3, in hexadecimal: of the file's bytes if no other file adds or changes a token.
    pub fn hash(&self) -> String {
        blake3::hash(&self.json).to_hex().to_string()
    }
}

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

/// Returns the ids of added tokens by content, as the library assigns them: the id of the model's token of the same
/// content, or the next id after the model's. Also returns the tokens of `more` that neither the model nor `own` has.
fn ids<'a>(
    tokens: &[(String, u32)],
    own: &'a [Added],
    more: &'a [Added],
) -> (HashMap<&'a str, u32>, Vec<&'a Added>) {
    let wanted: HashSet<&str> = own.iter().chain(more).map(|token| &token.content[..]).collect();
    let known = tokens.iter().filter(|(token, _)| wanted.contains(&token[..]));
    let known: HashMap<&str, u32> = known.map(|(token, id)| (&token[..], *id)).collect();
    let (mut ids, mut new, mut next) = (HashMap::new(), Vec::new(), tokens.len() as u32);
    for (index, token) in own.iter().chain(more).enumerate() {
        let content = &token.content[..];
        if content.is_empty() || ids.contains_key(content) {
            continue;
        }
        let id = known.get(content).copied();
        if id.is_none() && index >= own.len() {
            new.push(token);
        }
        ids.insert(content, id.unwrap_or(next));
        next += u32::from(id.is_none());
    }
    (ids, new)
}

/// Returns one sentence for each file with tokens that `tokenizer.json` does not have, and one for each file that
/// states other ids than its tokens have.
fn remarks<'a>(
    path: &Path,
    tokens: impl Iterator<Item = &'a Added>,
    new: &[&Added],
    ids: &HashMap<&str, u32>,
) -> Vec<String> {
    let mut files: BTreeMap<(&str, bool), String> = BTreeMap::new();
    for token in new {
        let (file, content) = (token.file, &token.content[..]);
        let more = match new.iter().filter(|other| other.file == file).count() {
            1 => String::new(),
            all => format!(" and {} more", all - 1),
        };
        files.entry((file, false)).or_insert_with(|| {
            format!(
                "{}: has no token {content:?}{more}, which {file} beside it adds from id {} on, here as in transformers",
                path.display(),
                ids[content]
            )
        });
    }
    for token in tokens {
        let (file, content) = (token.file, &token.content[..]);
        let Some((said, &id)) = token.id.zip(ids.get(content)) else { continue };
        if said != u64::from(id) {
            files.entry((file, true)).or_insert_with(|| {
                format!(
                    "{}: gives the token {content:?} the id {said}, and it has {id}, here as in transformers, which \
                     counts on after the vocabulary",
                    path.with_file_name(file).display()
                )
            });
        }
    }
    files.into_values().collect()
}

/// Returns a `tokenizer.json` with these added tokens, as the library writes them.
fn with_tokens(json: &[u8], added: &BTreeMap<u32, Added>) -> serde_json::Result<Vec<u8>> {
    let mut fields: BTreeMap<&str, &RawValue> = serde_json::from_slice(json)?;
    let added: Vec<Value> = added.iter().map(|(id, token)| token.to_json(*id)).collect();
    let added = serde_json::value::to_raw_value(&added)?;
    fields.insert("added_tokens", &added);
    serde_json::to_vec(&fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a tokenizer of `a`, `b` and `<s>`, to which `<x>` is added, with these other files.
    fn source(files: &str) -> Result<TokenizerSource> {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = r#"tokenizer.json {"model": {"vocab": {"a": 0, "b": 1, "<s>": 2}, "merges": []},
            "added_tokens": [{"id": 3, "content": "<x>", "special": true}]}"#;
        for file in [tokenizer].into_iter().chain(files.split(" & ")) {
            let (name, contents) = file.split_once(' ').unwrap();
            std::fs::write(dir.path().join(name), contents).unwrap();
        }
        TokenizerSource::read(dir.path())
    }

    #[test]
    fn tokens_are_added_in_the_order_of_transformers() {
        // Results of transformers 5.24: `AutoTokenizer.from_pretrained(D).get_added_vocab()`.
        const CASES: &str = r#"
tokenizer_config.json {"eos_token": "<x>", "add_bos_token": false, "pad_token": null} = 3 <x>
tokenizer_config.json {"bos_token": "<s>"} = 2 <s>, 3 <x>
tokenizer_config.json {"eot_token": "<t>", "eos_token": {"content": "<e>"}, "extra_special_tokens": ["<p>"], "additional_special_tokens": ["<q>"], "added_tokens_decoder": {"9": {"content": "<d>"}, "5": {"content": "<c>"}}} = 3 <x>, 4 <c>, 5 <d>, 6 <e>, 7 <t>, 8 <p>
tokenizer_config.json {"added_tokens_decoder": {}} & special_tokens_map.json {"eos_token": "<e>"} & added_tokens.json {"<y>": 4} = 3 <x>
tokenizer_config.json {"eos_token": "<f>", "extra_special_tokens": {"image_token": "<i>"}} & special_tokens_map.json {"eos_token": {"content": "<e>"}, "additional_special_tokens": ["<q>"]} & added_tokens.json {"<z>": 7, "<y>": 6, "<lost>": 3} = 3 <x>, 4 <y>, 5 <z>, 6 <e>, 7 <i>, 8 <q>"#;
        for case in CASES.trim().lines() {
            let (files, expected) = case.split_once(" = ").unwrap();
            let TokenizerSource { added, json, .. } = source(files).unwrap();
            let shown = added.iter().map(|(id, token)| format!("{id} {}", token.content));
            assert_eq!(shown.collect::<Vec<_>>().join(", "), expected, "{files}");
            let json: Value = serde_json::from_slice(&json).unwrap();
            assert_eq!(json["added_tokens"].as_array().unwrap().len(), added.len());
        }
        let normalized = r#"{"3": {"content": "<x>", "normalized": true}}"#;
        let files = format!("tokenizer_config.json {{\"added_tokens_decoder\": {normalized}}}");
        assert!(source(&files).unwrap().added[&3].is_normalized());
    }

    #[test]
    fn files_that_disagree_are_named_once_each() {
        let remarks = |files: &str| source(files).unwrap().remarks;
        let files = r#"tokenizer_config.json {"added_tokens_decoder": {"9": {"content": "<c>"}, "10": {"content": "<d>"}}}"#;
        let remarks_of = remarks(files);
        let [new, ids] = &remarks_of[..] else { panic!("{remarks_of:?}") };
        assert!(
            new.contains("tokenizer.json: has no token \"<c>\" and 1 more, which tokenizer_c"),
            "{new}"
        );
        assert!(
            ids.contains("tokenizer_config.json: gives the token \"<c>\" the id 9, and it has 4"),
            "{ids}"
        );
        assert!(remarks(r#"tokenizer_config.json {"bos_token": "<s>"}"#).is_empty());
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_file_and_field() {
        const CASES: &str = r#"
tokenizer_config.json {"eos_token": 3} = tokenizer_config.json: eos_token: expected a string
tokenizer_config.json [] = tokenizer_config.json: not a JSON object
tokenizer_config.json {"added_tokens_decoder": {"x": {"content": "y"}}} = added_tokens_decoder: x: expected an id
tokenizer_config.json {"added_tokens_decoder": {"5": "y"}} = added_tokens_decoder: 5: expected an id with an object
tokenizer_config.json {"extra_special_tokens": [3]} = extra_special_tokens: expected a string
tokenizer_config.json {"extra_special_tokens": "<x>"} = extra_special_tokens: expected a list
special_tokens_map.json {"bos_token": ["<s>"]} = special_tokens_map.json: bos_token: expected a string
added_tokens.json {"<y>": "4"} = added_tokens.json: <y>: expected an id
tokenizer.json {"model": {"dropout": 0.1}} = tokenizer.json: model.dropout is 0.1, with which a text
tokenizer.json {"model": {"vocab": {"a": 4294967295}}} = the token "a" has the id 4294967295, and 16777215 is the largest
tokenizer.json {"model": {"vocab": {"a": 99999999999}}} = not a valid tokenizer: invalid value: integer `99999999999`
tokenizer.json {"model": {}, "added_tokens": [{"id": 16777216, "content": "x"}]} = the token "x" has the id 16777216
tokenizer.json {"model": 3} = not a valid tokenizer: invalid type: integer `3`
tokenizer.json {"model": {"vocab": {"a": 0, "b": 9}}} & added_tokens.json {"<c>": 10} = has no token "<c>", which added_tokens.json adds, and its ids have gaps"#;
        for case in CASES.trim().lines() {
            let (files, expected) = case.split_once(" = ").unwrap();
            let message = source(files).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert!(
            source(r#"tokenizer.json {"model": {"vocab": {"a": 0, "b": 9}, "dropout": 0.0}}"#)
                .is_ok()
        );
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
}
