//! The decoder without the library returns the library's text, for any ids.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use moh_data::{TokenDecoder, TokenizerFile};
use moh_text::TextTokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};

struct Both {
    name: &'static str,
    library: TextTokenizer,
    decoder: TokenDecoder,
}

fn tokenizer(model: Value, decoder: Value, normalizer: Value, added: Value) -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": normalizer, "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": model,
    })
}

fn added(content: &str, special: bool, normalized: bool) -> Value {
    json!({
        "id": 0, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": normalized, "special": special,
    })
}

fn bpe(tokens: impl IntoIterator<Item = String>) -> Value {
    let ids: serde_json::Map<String, Value> =
        tokens.into_iter().zip(0..).map(|(token, id)| (token, json!(id))).collect();
    json!({"type": "BPE", "vocab": ids, "merges": []})
}

/// Returns all bytes as tokens, and some words.
fn sentencepiece() -> Vec<String> {
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let words =
        ["<unk>", "<s>", "\u{2581}", "\u{2581}\u{2581}the", "\u{e9}", "<0xZZ>", "<0x1>", ""];
    words.map(str::to_owned).into_iter().chain(bytes).collect()
}

/// Returns the decoder of Llama 2 and similar models.
fn llama(stripped: usize) -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": stripped, "stop": 0},
    ]})
}

fn quickstart() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/quickstart/tokenizer.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Returns a tokenizer for each decoder of Llama, Qwen and similar models.
fn kinds() -> Vec<(&'static str, Value)> {
    let mut byte_level = quickstart();
    // Characters that are not bytes, and tokens with such characters.
    let more = ["\u{20ac}", "a\u{20ac}", "\u{120}\u{144}", "caf\u{e9}"];
    for (index, token) in more.iter().enumerate() {
        byte_level["model"]["vocab"][token] = json!(1024 + index);
    }
    byte_level["added_tokens"].as_array_mut().unwrap().push(added("<|x|>\u{20ac}", false, false));
    let mut sequence = byte_level.clone();
    sequence["decoder"] = json!({"type": "Sequence", "decoders": [byte_level["decoder"]]});
    // Qwen's normalizer changes no added token.
    let mut nfc = byte_level.clone();
    nfc["normalizer"] = json!({"type": "NFC"});
    nfc["added_tokens"].as_array_mut().unwrap().push(added("<tool>", false, true));
    let prepend = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u{2581}"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
    ]});
    // One token is special, and the normalizer changes it.
    let tokens = json!([
        added("<unk>", true, false),
        added("<s>", true, true),
        added("new one", false, true),
        added("", true, false),
        added("new", true, false),
        added("new", false, false),
    ]);
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true});
    let words = ["\u{2581}a", "b", "\u{2581}", "c\u{2581}d"].map(|word| json!([word, -1.5]));
    let unigram = json!({"type": "Unigram", "unk_id": 1, "vocab": words, "byte_fallback": false});
    let word_level = json!({
        "type": "WordLevel", "vocab": {"w0": 0, "w1": 1, "w 2": 3}, "unk_token": "w0",
    });
    let llama_2 = |stripped| {
        tokenizer(bpe(sentencepiece()), llama(stripped), prepend.clone(), tokens.clone())
    };
    vec![
        ("byte level", byte_level),
        ("byte level in a sequence", sequence),
        ("byte level after NFC", nfc),
        ("Llama 2", llama_2(1)),
        ("Llama 2, two spaces", llama_2(2)),
        ("metaspace", tokenizer(unigram.clone(), metaspace("always"), json!(null), tokens.clone())),
        ("metaspace, never", tokenizer(unigram, metaspace("never"), json!(null), tokens.clone())),
        ("none", tokenizer(word_level, json!(null), json!(null), tokens)),
    ]
}

fn load(dir: &Path, json: &Value) -> (TextTokenizer, TokenizerFile) {
    fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
    (TextTokenizer::load(dir).unwrap(), TokenizerFile::load(dir).unwrap())
}

static KINDS: LazyLock<Vec<Both>> = LazyLock::new(|| {
    let both = |(name, json): (&'static str, Value)| {
        let dir = tempfile::tempdir().unwrap();
        let (library, file) = load(dir.path(), &json);
        assert_eq!(file.vocab_size(), library.vocab_size(), "{name}");
        Both { name, library, decoder: file.decoder().unwrap() }
    };
    kinds().into_iter().map(both).collect()
});

proptest! {
    #[test]
    fn any_ids_have_the_text_of_the_library(numbers in prop::collection::vec(any::<u32>(), 0..60)) {
        for Both { name, library, decoder } in KINDS.iter() {
            // Some ids have no token.
            let limit = library.vocab_size() as u32 + 5;
            let ids: Vec<u32> = numbers.iter().map(|number| number % limit).collect();
            let expected = library.decode(&ids, true).unwrap();
            prop_assert_eq!(decoder.decode(&ids), expected, "{}: {:?}", name, ids);
            prop_assert_eq!(decoder.decoded_bytes(&ids), library.decoded_bytes(&ids).unwrap());
        }
    }
}

#[test]
fn each_id_has_the_text_of_the_library() {
    for Both { name, library, decoder } in KINDS.iter() {
        for id in 0..library.vocab_size() as u32 + 2 {
            for ids in [&[id][..], &[id, id], &[0, id, 1]] {
                assert_eq!(
                    decoder.decode(ids),
                    library.decode(ids, true).unwrap(),
                    "{name} {ids:?}"
                );
            }
        }
    }
}

#[test]
fn a_decoder_of_another_kind_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut json = quickstart();
        change(&mut json);
        load(dir.path(), &json).1.decoder().is_some()
    };
    assert!(with(&|_| {}));
    for decoder in [
        json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        json!({"type": "BPEDecoder", "suffix": "</w>"}),
        json!({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}),
        json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "WordPiece", "prefix": "", "cleanup": false}]}),
    ] {
        assert!(!with(&|json| json["decoder"] = decoder.clone()), "{decoder}");
    }
    // A normalizer that may change an added token.
    assert!(!with(&|json| {
        json["normalizer"] = json!({"type": "Lowercase"});
        json["added_tokens"].as_array_mut().unwrap().push(added("<Tool>", false, true));
    }));
}
