//! A tokenizer is identified by its content: a rewritten file is the same tokenizer. Another tokenizer is accepted on
//! request if it returns the same ids.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use moh_data::{TokenFile, TokenizerFile, TokenizerMatch};
use moh_testkit::programs::{edit_json, read_json, repository};
use moh_testkit::small_tokenizer::END_OF_TEXT;
use moh_testkit::texts::prepare_text;
use moh_text::TextTokenizer;
use moh_text::prepare::AppendEos;
use serde_json::{Value, json};

fn quickstart() -> Value {
    read_json(&repository().join("recipes/quickstart/tokenizer.json"))
}

/// Returns a tokenizer with this file, in a separate directory.
fn tokenizer(dir: &Path, name: &str, text: &str) -> TextTokenizer {
    fs::create_dir_all(dir.join(name)).unwrap();
    fs::write(dir.join(name).join("tokenizer.json"), text).unwrap();
    TextTokenizer::load(&dir.join(name)).unwrap()
}

/// Returns the quickstart's tokenizer after a change.
fn changed(dir: &Path, name: &str, change: impl FnOnce(&mut Value)) -> TextTokenizer {
    let mut json = quickstart();
    change(&mut json);
    tokenizer(dir, name, &json.to_string())
}

/// Returns the file of a tokenizer, parsed without the library.
fn read(tokenizer: &TextTokenizer) -> TokenizerFile {
    TokenizerFile::load(tokenizer.path()).unwrap()
}

/// Returns a token file of documents of 10 to 5000 words.
fn token_file(dir: &Path, tokenizer: &TextTokenizer) -> PathBuf {
    let words = ["the", "boat", "of", "Grace", "sailed", "far,", "and", "it's", "12", "o'clock."];
    let text = |length: usize| {
        let words = (0..length).map(|index| words[(index * index + index / 3) % words.len()]);
        words.collect::<Vec<_>>().join(" ")
    };
    let lines: String =
        [10, 5000, 300].map(|length| format!("{}\n", json!({"text": text(length)}))).concat();
    fs::write(dir.join("a.jsonl"), lines).unwrap();
    let (text, prefix, end) = (dir.join("a.jsonl"), dir.join("a"), AppendEos::Token(END_OF_TEXT));
    prepare_text(tokenizer.path(), &text, &prefix, end);
    prefix
}

/// Returns the quickstart's tokenizer, changed as by transformers' `save_pretrained` and versions of the library. The
/// changes are spaces, the order of keys, omitted defaults, the spelling of merges, and padding.
fn rewritten(dir: &Path) -> TextTokenizer {
    let mut json = quickstart();
    json["padding"] = json!({
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<|begin_of_text|>",
    });
    let model = json["model"].as_object_mut().unwrap();
    for default in ["dropout", "fuse_unk", "byte_fallback", "ignore_merges"] {
        model.shift_remove(default);
    }
    let merges = model["merges"].as_array().unwrap().iter();
    let merges = merges.map(|pair| match pair.as_array() {
        Some(pair) => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()).into(),
        None => pair.clone(),
    });
    let merges: Value = merges.collect();
    model.insert("merges".to_owned(), merges);
    json.sort_all_objects();
    tokenizer(dir, "rewritten", &serde_json::to_string_pretty(&json).unwrap())
}

#[test]
fn a_tokenizer_that_was_written_again_has_the_same_content() {
    let dir = tempfile::tempdir().unwrap();
    let original = changed(dir.path(), "original", |_| {});
    let rewritten = rewritten(dir.path());
    assert_ne!(original.hash(), rewritten.hash());
    assert_eq!(original.content().unwrap(), rewritten.content().unwrap());
    for tokenizer in [&original, &rewritten] {
        let file = read(tokenizer);
        assert_eq!(file.hash(), tokenizer.hash());
        assert_eq!(file.content(), tokenizer.content().unwrap());
        assert_eq!(file.vocab_size(), tokenizer.vocab_size());
    }
    assert_eq!(read(&original).first_difference(&read(&rewritten)), None);
    let prefix = token_file(dir.path(), &original);
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!(original.check_file(&file, false).unwrap(), TokenizerMatch::Same);
    assert_eq!(rewritten.check_file(&file, false).unwrap(), TokenizerMatch::Rewritten);
}

#[test]
fn the_content_of_recorded_files_stays_comparable() {
    // The b3sum of the part as compact JSON with sorted keys. If the library ever writes it otherwise, token files of
    // earlier versions are compared only by their bytes.
    let dir = tempfile::tempdir().unwrap();
    let content = changed(dir.path(), "original", |_| {}).content().unwrap();
    let content: Value = serde_json::to_value(content).unwrap();
    let parts: Vec<&str> = content.as_object().unwrap().keys().map(String::as_str).collect();
    let expected =
        "added_tokens decoder merges model normalizer post_processor pre_tokenizer vocabulary";
    assert_eq!(parts.join(" "), expected);
    let null = blake3::hash(b"null").to_hex().to_string();
    assert_eq!(content["normalizer"], null);
    assert_eq!(content["model"], blake3::hash(MODEL.as_bytes()).to_hex().to_string());
}

/// The quickstart's model without its tokens.
const MODEL: &str = "{\"byte_fallback\":false,\"continuing_subword_prefix\":null,\"dropout\":null,\
    \"end_of_word_suffix\":null,\"fuse_unk\":false,\"ignore_merges\":false,\"type\":\"BPE\",\"unk_token\":null}";

#[test]
fn a_token_file_that_records_bytes_alone_accepts_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let original = changed(dir.path(), "original", |_| {});
    let rewritten = rewritten(dir.path());
    let prefix = token_file(dir.path(), &original);
    let path = prefix.with_extension("json");
    edit_json(&path, |info| {
        drop(info.as_object_mut().unwrap().shift_remove("tokenizer_content").unwrap())
    });
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!(original.check_file(&file, false).unwrap(), TokenizerMatch::Same);
    let message = rewritten.check_file(&file, false).unwrap_err().to_string();
    assert!(message.contains("whether the content is the same is not known"), "{message}");
    assert!(message.contains("--allow-other-tokenizer"), "{message}");
    assert_eq!(rewritten.check_file(&file, true).unwrap(), TokenizerMatch::SameIds);
    fs::remove_file(&path).unwrap();
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!(rewritten.check_file(&file, false).unwrap(), TokenizerMatch::Unrecorded);
}

#[test]
fn the_first_difference_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let original = changed(dir.path(), "original", |_| {});
    let file = TokenFile::open(&token_file(dir.path(), &original)).unwrap();
    let check = |name: &str, in_file: &str, between: &str, change: &dyn Fn(&mut Value)| {
        let other = changed(dir.path(), name, change);
        let message = other.check_file(&file, false).unwrap_err().to_string();
        assert!(message.contains("a.json: prepared with another tokenizer than "), "{message}");
        assert!(message.contains(&format!("tokenizer.json: {in_file}: use the ")), "{message}");
        let found = read(&other).first_difference(&read(&original)).unwrap();
        assert!(found.starts_with(between), "{found}");
    };
    check("prefix", "model differs", "model.\"ignore_merges\": true, not false", &|json| {
        json["model"]["ignore_merges"] = true.into();
    });
    check("normal", "normalizer differs", "normalizer: {\"type\":\"NFC\"}, not null", &|json| {
        json["normalizer"] = json!({"type": "NFC"});
    });
    let last = original.vocab_size();
    let larger = format!("the vocabulary differs, {} ids, not {last}", last + 1);
    check("larger", &larger, "vocabulary.\"zzz\" is new", &|json| {
        json["model"]["vocab"]["zzz"] = last.into();
    });
}

#[test]
fn another_tokenizer_is_accepted_only_with_the_same_ids() {
    let dir = tempfile::tempdir().unwrap();
    let original = changed(dir.path(), "original", |_| {});
    let file = TokenFile::open(&token_file(dir.path(), &original)).unwrap();
    let chat = changed(dir.path(), "chat", |json| {
        let token = json!({
            "id": original.vocab_size(), "content": "<|user|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        });
        json["added_tokens"].as_array_mut().unwrap().push(token);
    });
    assert!(chat.check_file(&file, false).is_err());
    assert_eq!(chat.check_file(&file, true).unwrap(), TokenizerMatch::SameIds);
    for (name, merges) in [("without", 0), ("fewer", 100)] {
        let other = changed(dir.path(), name, |json| {
            json["model"]["merges"].as_array_mut().unwrap().truncate(merges);
        });
        let error = other.check_file(&file, true).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json: does not give the ids of "), "{error}");
        assert!(error.contains("in document 0, which it reads from token 0"), "{error}");
    }
    // With other ids for the same tokens, the file reads as another text.
    let turned = changed(dir.path(), "turned", |json| {
        let ids = json["model"]["vocab"].as_object_mut().unwrap().values_mut();
        ids.filter(|id| id.as_u64() >= Some(300)).for_each(|id| {
            *id = (300 + (id.as_u64().unwrap() - 300 + 7) % (original.vocab_size() as u64 - 300))
                .into();
        });
    });
    let message = turned.check_file(&file, true).unwrap_err().to_string();
    assert!(message.contains("it reads their beginning as \""), "{message}");
}

#[test]
fn an_accepted_tokenizer_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let original = changed(dir.path(), "original", |_| {});
    let prefix = token_file(dir.path(), &original);
    changed(dir.path(), "fewer", |json| {
        json["model"]["merges"].as_array_mut().unwrap().truncate(100);
    });
    let other = changed(dir.path(), "other", |json| {
        json["normalizer"] = json!({"type": "NFC"});
    });
    let accept = |tokenizer: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moh-data"));
        command.current_dir(dir.path()).args(["accept", "--tokenizer", tokenizer, "a"]).assert()
    };
    let path = prefix.with_extension("json");
    let before = fs::read(&path).unwrap();
    let file = TokenFile::open(&prefix).unwrap();
    assert!(other.check_file(&file, false).is_err());
    for tokenizer in ["original", "fewer"] {
        let _ = accept(tokenizer);
        assert!(fs::read(&path).unwrap() == before, "{tokenizer}");
    }
    accept("other").success();
    accept("other").success();
    let file = TokenFile::open(&prefix).unwrap();
    assert_eq!(other.check_file(&file, false).unwrap(), TokenizerMatch::SameIds);
    assert_eq!(original.check_file(&file, false).unwrap(), TokenizerMatch::Same);
    let mut json = read_json(&path);
    assert_eq!(json["accepted_tokenizers"], json!([other.hash()]));
    json.as_object_mut().unwrap().shift_remove("accepted_tokenizers");
    assert_eq!(json, serde_json::from_slice::<Value>(&before).unwrap());
}
