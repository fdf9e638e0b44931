//! The two libraries against each other, for every kind of tokenizer.

mod kinds;

use std::collections::HashSet;
use std::sync::LazyLock;

use crate::TextTokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers_1::pipeline::PipelineToken;

use super::shape::PATTERNS;
use super::{Encoder, LoadAhead};

/// Every kind with its name, trained once, as it is and with special tokens encoded as text.
static KINDS: LazyLock<Vec<(&str, TextTokenizer)>> = LazyLock::new(|| {
    let kinds = kinds::all(1500, &kinds::text(200_000, 1));
    let both = |kind: &kinds::Kind| {
        [false, true].map(|split| (kind.name, kind.load().split_special_tokens(split)))
    };
    kinds.iter().flat_map(both).collect()
});
static ENCODERS: LazyLock<Vec<(&str, &TextTokenizer, Encoder<'_>)>> = LazyLock::new(|| {
    let load = |(name, tokenizer): &'static (&'static str, TextTokenizer)| {
        (*name, tokenizer, Encoder::new(tokenizer, &tokenizer.json().unwrap(), None).unwrap())
    };
    KINDS.iter().map(load).collect()
});

/// Returns a text of fragments in which tokenizers are apt to differ.
fn texts() -> impl Strategy<Value = String> {
    let fragment = prop_oneof![
        4 => "[a-zA-Z]{1,12}",
        4 => Just(" ".to_owned()),
        2 => "[a-z]{1,8} [a-z]{1,8}",
        1 => "[ \t\n\r\u{a0}\u{2003}\u{3000}\u{85}\u{200b}]{1,5}",
        1 => "[0-9\u{661}-\u{669}\u{bd}\u{2167}]{1,7}",
        1 => "['\u{2019}](s|S|\u{17f}|t|T|re|Re|ve|m|ll|LL|lL|d|x)?",
        1 => "[\u{300}-\u{36f}\u{591}-\u{5bd}\u{93e}-\u{94d}]{1,3}",
        1 => "[\u{4e00}-\u{4e20}\u{3041}-\u{3060}\u{ac00}-\u{ac20}\u{3001}\u{3002}\u{ff0c}]{1,6}",
        1 => "[\u{5d0}-\u{5ea}\u{627}-\u{64a}\u{430}-\u{44f}\u{391}-\u{3a9}\u{1c5}\u{2b0}\u{212a}]{1,6}",
        1 => "[!-/:-@\\[-`{-~]{1,5}",
        1 => "(\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}|\u{1f600}|\u{2764}\u{fe0f}|\u{1f1e9}\u{1f1ea}|\u{1f3fd})",
        1 => "\u{2581}{1,3}",
        1 => proptest::sample::select(vec![
            "<s>", "</s>", "<unk>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
            "<tool_call>", "[INST]", "<0x41>", "<|eot|>", "na\u{ef}ve", "caf\u{e9}",
        ]).prop_map(str::to_owned),
        2 => any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(fragment, 0..30).prop_map(|fragments| fragments.concat())
}

/// Checks that both libraries and the encoder return the same ids for a text.
fn check(text: &str) {
    for (name, tokenizer, encoder) in ENCODERS.iter() {
        let expected = tokenizer.encode_without_special_tokens(text).unwrap();
        let library = encoder.library.as_ref().unwrap();
        let mut ids = Vec::new();
        assert!(library.append(text, &mut ids), "{name}: fails for {text:?}");
        let ids = PipelineToken::cast_slice(&ids);
        let is_lacking = ids.contains(&u32::MAX);
        assert!(is_lacking || ids == expected, "{name}: {text:?}: {ids:?}, not {expected:?}");
        let encoded = encoder.encode(text).unwrap();
        assert_eq!(encoded.ids, tokenizer.encode(text).unwrap(), "{name}: {text:?}");
        let special: Vec<u32> = tokenizer.special_ids().collect();
        let named: Vec<u32> = expected.into_iter().filter(|id| special.contains(id)).collect();
        assert_eq!(encoded.special_in_text, named, "{name}: {text:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn ids_are_those_of_the_slower_library(text in texts()) {
        check(&text);
    }
}

#[test]
fn every_kind_is_encoded_by_the_faster_library() {
    for (name, _, encoder) in ENCODERS.iter() {
        assert_eq!(encoder.fallback(), None, "{name}");
    }
}

#[test]
fn a_tokenizer_loaded_ahead_is_the_one_that_is_loaded_afterwards() {
    let mut kinds = kinds::all(600, &kinds::text(20_000, 1));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let ahead = |json: &Value| {
        std::fs::write(&path, serde_json::to_string_pretty(json).unwrap()).unwrap();
        LoadAhead::start(&path)
    };
    for kind in &mut kinds {
        let json = kind.load().json().unwrap();
        // As the slower library writes them: added tokens by id, and the last of equal merges.
        let added = kind.json["added_tokens"].as_array_mut().unwrap();
        added.sort_by_key(|token| token["id"].as_u64());
        let merges = kind.json["model"]["merges"].as_array_mut().unwrap();
        let mut known = HashSet::new();
        merges.reverse();
        merges.retain(|merge| known.insert(merge.to_string()));
        merges.reverse();
        assert!(ahead(&kind.json).take(&json).is_some(), "{}", kind.name);
        // As older programs write them.
        let merges = kind.json["model"]["merges"].as_array_mut().unwrap();
        for merge in merges {
            let [before, after] = [0, 1].map(|part| merge[part].as_str().unwrap().to_owned());
            *merge = format!("{before} {after}").into();
        }
        let ahead = ahead(&kind.json);
        assert!(ahead.take(&json).is_some(), "{}", kind.name);
        assert!(ahead.take(&json).is_none(), "{}", kind.name);
    }
    let other = kinds[0].json.clone();
    let json = kinds[0].load().json().unwrap();
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut json = other.clone();
        change(&mut json);
        ahead(&json)
    };
    assert!(changed(&|json| json["model"]["ignore_merges"] = true.into()).take(&json).is_none());
    assert!(changed(&|json| json["added_tokens"] = json!([])).take(&json).is_none());
    assert!(changed(&|json| json["model"]["merges"] = json!([])).take(&json).is_none());
    let exchange = |json: &mut Value| {
        let mut ids = json["model"]["vocab"].as_object_mut().unwrap().values_mut();
        std::mem::swap(ids.next().unwrap(), ids.next().unwrap());
    };
    assert!(changed(&exchange).take(&json).is_none());
    assert!(changed(&|json| json["model"] = json!(null)).take(&json).is_none());
}

#[test]
fn an_unusual_post_processor_leaves_whole_documents_to_the_slower_library() {
    let kinds = kinds::all(1500, &kinds::text(200_000, 1));
    let named = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = |type_id: u32| json!({"Sequence": {"id": "A", "type_id": type_id}});
    let template = |kind: &kinds::Kind, single: Vec<Value>| {
        let tokens = kind.json["added_tokens"].as_array().unwrap();
        let token = tokens.iter().find(|token| token["special"] == true).unwrap();
        let (name, id) = (token["content"].as_str().unwrap(), &token["id"]);
        let single: Vec<Value> = single
            .into_iter()
            .map(|piece| if piece.is_null() { named(name) } else { piece })
            .collect();
        let special = json!({name: {"id": name, "ids": [id], "tokens": [name]}});
        let pair = json!([text(0), {"Sequence": {"id": "B", "type_id": 1}}]);
        json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special})
    };
    let kind = kinds.iter().find(|kind| kind.name == "GPT-2").unwrap();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let twice = template(kind, vec![text(0), Value::Null, text(1)]);
    let in_sequence = json!({"type": "Sequence", "processors": [bytes, twice]});
    let ends = template(kind, vec![Value::Null, text(1), Value::Null]);
    for (processor, is_usual) in [(twice, false), (in_sequence, false), (ends, true)] {
        let mut json = kind.json.clone();
        json["post_processor"] = processor;
        let tokenizer = kinds::Kind { name: kind.name, json }.load();
        let encoder = Encoder::new(&tokenizer, &tokenizer.json().unwrap(), None).unwrap();
        assert_eq!(encoder.fallback().is_none(), is_usual, "{:?}", encoder.fallback());
        for text in ["", "a", "one two <|endoftext|> three", &kinds::text(2000, 5)] {
            let encoded = encoder.encode(text).unwrap();
            assert_eq!(encoded.ids, tokenizer.encode(text).unwrap(), "{text:?}");
            let times = if is_usual { 1 } else { 2 };
            let named = times * text.matches("<|endoftext|>").count();
            assert_eq!(encoded.special_in_text.len(), named, "{text:?}");
        }
    }
}

/// Returns a document with long runs amid words: a letter, spaces, ideographs, line ends, punctuation.
fn long(length: usize) -> String {
    let mut text = kinds::text(length / 2, 2);
    let longest = length / 40;
    for run in
        ["a", " ", "\u{4f60}\u{597d}", "\n", "=", "\u{2581}", "\u{301}", "1", "ab ", "x</s>y "]
    {
        text.push_str(&run.repeat(longest / run.len()));
        text.push_str(&kinds::text(longest, 3));
    }
    text
}

fn check_long(length: usize) {
    let text = long(length);
    let check = |(name, tokenizer, encoder): &(&str, &TextTokenizer, Encoder<'_>)| {
        let encoded = encoder.encode(&text).unwrap();
        assert!(encoded.ids == tokenizer.encode(&text).unwrap(), "{name}");
    };
    // Without the encoders of special tokens as text.
    let encoders = || ENCODERS.iter().step_by(2);
    std::thread::scope(|scope| {
        scope.spawn(|| encoders().step_by(2).for_each(check));
        encoders().skip(1).step_by(2).for_each(check);
    });
}

#[test]
fn long_documents_have_the_ids_of_the_slower_library() {
    check_long(400_000);
}

#[test]
#[ignore = "takes minutes of the slower library"]
fn documents_of_ten_megabytes_have_the_ids_of_the_slower_library() {
    check_long(10_000_000);
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn the_stories_of_the_fixtures_have_the_ids_of_the_slower_library() {
    let fixtures = moh_testkit::programs::fixtures();
    let stories = std::fs::read_to_string(fixtures.join("data/stories-valid.jsonl")).unwrap();
    let tokenizer = TextTokenizer::load(&fixtures.join("stories260K")).unwrap();
    let encoder = Encoder::new(&tokenizer, &tokenizer.json().unwrap(), None).unwrap();
    assert_eq!(encoder.fallback(), None);
    let whole = encoder.encode(&stories).unwrap();
    assert!(whole.ids == tokenizer.encode(&stories).unwrap());
    for line in stories.lines() {
        check(line);
        let encoded = encoder.encode(line).unwrap();
        assert_eq!(encoded.ids, tokenizer.encode(line).unwrap());
    }
}

#[test]
fn documents_have_their_ends_of_the_post_processor() {
    let (_, _, encoder) = ENCODERS.iter().find(|(name, ..)| name.ends_with("with EOS")).unwrap();
    let ids = encoder.encode(" and").unwrap().ids;
    assert_eq!((ids.first(), ids.last()), (Some(&1), Some(&2)));
    assert_eq!(encoder.encode("").unwrap().ids, [1, 2]);
    assert_eq!(encoder.encode("</s>").unwrap().special_in_text, [2]);
}

#[test]
fn threads_get_the_ids_of_one() {
    let text = kinds::text(20_000, 4);
    for (name, _, encoder) in ENCODERS.iter() {
        let alone = encoder.encode(&text).unwrap();
        std::thread::scope(|scope| {
            let encode = || encoder.encode(&text).unwrap();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(encode)).collect();
            for thread in threads {
                assert!(thread.join().unwrap() == alone, "{name}");
            }
        });
    }
}

/// Returns the encoder's reason against the faster library for a changed tokenizer.
fn changed(name: &str, change: impl Fn(&mut Value)) -> String {
    let mut kinds = kinds::all(600, "a b c");
    let kind = kinds.iter_mut().find(|kind| kind.name == name).unwrap();
    change(&mut kind.json);
    let tokenizer = kind.load();
    let encoder = Encoder::new(&tokenizer, &tokenizer.json().unwrap(), None).unwrap();
    for text in ["", "It's na\u{ef}ve,  <s>\n12 \u{1f600}", "one two three", "a b a"] {
        let encoded = encoder.encode(text).unwrap();
        assert_eq!(encoded.ids, tokenizer.encode(text).unwrap(), "{name}");
    }
    encoder.fallback().unwrap_or_default().to_owned()
}

#[test]
fn the_slower_library_encodes_what_the_faster_one_is_not_known_to() {
    let regex = "/pre_tokenizer/pretokenizers/0/pattern/Regex";
    let words = json!({"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1}, "unk_token": "<unk>"});
    for (name, changes, part) in [
        ("Llama 3", &[(regex, json!("[a-z]+|[^a-z]+"))][..], "pre-tokenizer"),
        ("Llama 3", &[("/normalizer", json!({"type": "NFKC"}))], "normalizer"),
        ("Llama 2", &[("/added_tokens/1/single_word", json!(true))], "whole words"),
        ("Llama 2", &[("/model/end_of_word_suffix", json!("</w>"))], "end_of_word_suffix"),
        (
            "Llama 2",
            &[("/model", words), ("/added_tokens", json!([])), ("/post_processor", json!(null))],
            "BPE",
        ),
        // Known here, but not to the faster library.
        ("Qwen", &[(regex, json!(PATTERNS[5]))], "the faster library fails"),
    ] {
        let why = changed(name, |json| {
            for (place, value) in changes {
                *json.pointer_mut(place).unwrap() = value.clone();
            }
        });
        assert!(why.contains(part), "{why}");
    }
}

#[test]
fn added_tokens_of_every_kind_are_left_to_the_faster_library() {
    let added = |name, content: &str, flag: &str| {
        let why = changed(name, |json| {
            let id = json["model"]["vocab"].as_object().unwrap().len() + 100;
            let mut token = json["added_tokens"][0].clone();
            token["id"] = id.into();
            token["content"] = content.into();
            token[flag] = true.into();
            json["added_tokens"].as_array_mut().unwrap().push(token);
        });
        assert_eq!(why, "", "{name} {content}");
    };
    added("Llama 3", "<x>", "rstrip");
    added("Llama 3", "one two", "special");
    added("Llama 3", "<x", "rstrip");
    for content in ["<x>", "<x", "x>"] {
        added("Llama 2", content, "special");
    }
    let joined = changed("Llama 2", |json| {
        let id = json["model"]["vocab"].as_object().unwrap().len();
        json["model"]["vocab"]["a\u{2581}"] = id.into();
        json["model"]["merges"].as_array_mut().unwrap().push(json!(["a", "\u{2581}"]));
    });
    assert_eq!(joined, "");
    let ignoring = changed("Llama 2", |json| json["model"]["ignore_merges"] = true.into());
    assert_eq!(ignoring, "");
}

#[test]
fn a_byte_without_a_token_leaves_its_document_alone_to_the_slower_library() {
    let texts =
        [("one two <|im_start|>x</s> 12", true), ("one\u{4} two", false), ("\u{50000}", false)];
    let lacking = |name: &str| name == "SmolLM" || name == "lacking";
    let encoders = ENCODERS.iter().filter(|(name, ..)| lacking(name));
    assert_eq!(encoders.clone().count(), 4);
    for ((name, _, encoder), (text, is_fast)) in
        encoders.flat_map(|it| texts.map(|text| (it, text)))
    {
        let library = encoder.library.as_ref().unwrap();
        assert_eq!(library.encode(text, &mut Vec::new()), is_fast, "{name}: {text:?}");
        check(text);
    }
}

#[test]
fn ids_that_do_not_spell_the_text_are_recognised() {
    for (name, tokenizer, encoder) in ENCODERS.iter() {
        let text = "Anna's kite, and ten more.";
        let spelling = &encoder.library.as_ref().unwrap().spelling;
        let mut ids = tokenizer.encode_without_special_tokens(text).unwrap();
        assert!(spelling.is_of(text, &ids), "{name}");
        assert!(!spelling.is_of(text, &ids[..ids.len() - 1]), "{name}");
        assert!(!spelling.is_of(&text[..text.len() - 1], &ids), "{name}");
        for place in 0..ids.len() {
            let right = std::mem::replace(&mut ids[place], 300);
            assert!(right == 300 || !spelling.is_of(text, &ids), "{name}: {place}");
            ids[place] = right;
        }
        ids[0] = u32::MAX;
        assert!(!spelling.is_of(text, &ids), "{name}");
    }
}
