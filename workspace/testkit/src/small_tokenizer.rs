//! A small tokenizer, made from the quickstart's: the special tokens, the bytes, and a few words. It adds
//! [`BEGIN_OF_TEXT`] before a text and nothing after it.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

/// Id 0.
pub const BEGIN_OF_TEXT: &str = "<|begin_of_text|>";
/// Id 1.
pub const END_OF_TEXT: &str = "<|end_of_text|>";
/// The words of most tests.
pub const WORDS: [&str; 6] = [" one", " two", " three", "one", "two", "three"];
/// Ids of the special tokens and the bytes.
const BYTES: u64 = 258;

/// Writes the tokenizer's files to a directory. Each word and each of its prefixes is a token.
pub fn write_tokenizer(dir: &Path, words: &[&str]) {
    let quickstart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/quickstart");
    let read = |name: &str| fs::read(Path::new(quickstart).join(name)).unwrap();
    let mut json: Value = serde_json::from_slice(&read("tokenizer.json")).unwrap();
    let vocabulary = json["model"]["vocab"].as_object_mut().unwrap();
    vocabulary.retain(|_, id| id.as_u64().unwrap() < BYTES);
    let mut merges = Vec::new();
    for word in words {
        // The letter of a byte-level tokenizer for a space.
        let letters: Vec<char> = word.replace(' ', "\u{120}").chars().collect();
        for end in 1..letters.len() {
            let (start, letter) = (String::from_iter(&letters[..end]), letters[end]);
            if !vocabulary.contains_key(&format!("{start}{letter}")) {
                vocabulary.insert(format!("{start}{letter}"), vocabulary.len().into());
                merges.push(json!([start, letter.to_string()]));
            }
        }
    }
    json["model"]["merges"] = merges.into();
    let template = &mut json["post_processor"];
    for kind in ["single", "pair"] {
        let pieces = template[kind].as_array_mut().unwrap();
        pieces.retain(|piece| piece["SpecialToken"]["id"] != END_OF_TEXT);
    }
    template["special_tokens"].as_object_mut().unwrap().remove(END_OF_TEXT);
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        fs::write(dir.join(name), read(name)).unwrap();
    }
}
