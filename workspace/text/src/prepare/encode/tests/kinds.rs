//! Small tokenizers in the form of the models in their names: the same normalizer, pre-tokenizer, post-processor and
//! added tokens, and a vocabulary that is trained on the spot.

use std::collections::BTreeSet;

use crate::TextTokenizer;
use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainerBuilder;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::prepare::encode::shape::PATTERNS;

/// Training text besides the given text: every script of the probes, some of it often enough for merges.
const SCRIPTS: &str = "na\u{ef}ve caf\u{e9} na\u{ef}ve caf\u{e9} \u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002}\u{4f60}\u{597d} \
    \u{43f}\u{440}\u{438}\u{432}\u{435}\u{442} \u{43f}\u{440}\u{438}\u{432}\u{435}\u{442} \u{645}\u{631}\u{62d}\u{628}\u{627} \u{645}\u{631}\u{62d}\u{628}\u{627} \
    \u{1f600} \u{1f600} \u{1f468}\u{200d}\u{1f469} \u{1f468}\u{200d}\u{1f469} e\u{301} e\u{301} \u{915}\u{94d}\u{937} \u{915}\u{94d}\u{937} 1234 12 1999 2024 \
    It's they're we'll I'm HERE'S don't\n\n\n    def f(x):\n        return x\n\n\t\tif (a == b) { c(); }\r\n";

/// Returns English-like text of at least `length` bytes: words of a made-up vocabulary, by Zipf's law, in sentences and
/// paragraphs. The same seed gives the same text.
pub(crate) fn text(length: usize, seed: u64) -> String {
    let mut number = 0;
    let mut below = |limit: usize| {
        number += 1;
        (moh_data::key_of(&[seed, number]) % limit as u64) as usize
    };
    let syllables =
        ["th", "e", "an", "in", "er", "on", "re", "st", "at", "ing", "o", "ly", "con", "s"];
    let mut text = String::with_capacity(length + 32);
    let (mut word, mut in_sentence) = (String::new(), 0);
    while text.len() < length {
        // The rank of a word is about its number: rarer words are longer.
        let mut rank = 1 << below(17);
        rank += below(rank);
        word.clear();
        while rank > 0 {
            word.push_str(syllables[rank % syllables.len()]);
            rank /= syllables.len();
        }
        if in_sentence == 0 {
            word[..1].make_ascii_uppercase();
        }
        text.push_str(&word);
        in_sentence += 1;
        match below(40) {
            0 => text.push_str(", "),
            1 => text.push_str("'s "),
            2 => text.push_str(&format!(" {} ", below(3000))),
            3 if in_sentence > 4 => {
                text.push_str(".\n\n");
                in_sentence = 0;
            }
            4 | 5 if in_sentence > 4 => {
                text.push_str(". ");
                in_sentence = 0;
            }
            _ => text.push(' '),
        }
    }
    text
}

pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) json: Value,
}

impl Kind {
    /// Returns the tokenizer as the slower library loads it.
    pub(crate) fn load(&self) -> TextTokenizer {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), self.json.to_string()).unwrap();
        TextTokenizer::load(dir.path()).unwrap()
    }
}

/// Returns every kind, with a vocabulary of about `size` tokens trained on `text`.
pub(crate) fn all(size: usize, text: &str) -> Vec<Kind> {
    let byte_level =
        |name, pattern: Option<&str>, rest| byte_level(name, pattern, rest, size, text);
    let metaspace = |scheme: &str, split: bool| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split});
    let isolated = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    // SentencePiece splits scripts, digits and lines for Llama. Other tokens join parts of a word, or words.
    let scripts = "\u{2581}?[\\p{L}\\p{M}]+|\\p{N}|\\s|[^\\p{L}\\p{M}\\p{N}\\s]+";
    let pieces = Pieces::train(size, text, &[metaspace("always", true), isolated(scripts)]);
    let joined = Pieces::train(size, text, &[metaspace("always", true)]);
    let sentences = &text[..text.floor_char_boundary(1 << 18)];
    let spanning =
        Pieces::train(size, sentences, &[metaspace("always", false), isolated("[.\n]+")]);
    let llama = added(&["<unk>", "<s>", "</s>"], 0, &[]);
    let prepended = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u{2581}"}, spaces(),
    ]});
    let framed = json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]);
    vec![
        byte_level("GPT-2", None, json!({"post_processor": bytes(true)})),
        lacking(digits(byte_level("SmolLM", None, json!({"special": ["<|endoftext|>", "<|im_start|>"]})))),
        byte_level("Llama 3", Some(PATTERNS[1]), json!({
            "model": {"ignore_merges": true},
            "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>"],
            "post_processor": {"type": "Sequence", "processors": [
                bytes(true), template("<|begin_of_text|>", json!([{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}])),
            ]},
        })),
        byte_level("Llama 4", Some(PATTERNS[4]), json!({
            "special": ["<|begin_of_text|>", "<|eot|>", "<|image|>"],
        })),
        byte_level("Qwen", Some(PATTERNS[2]), json!({
            "normalizer": {"type": "NFC"},
            "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            "plain": ["<tool_call>", "</tool_call>", "<think>"],
            "post_processor": bytes(false),
        })),
        byte_level("tekken", Some(PATTERNS[3]), json!({
            "special": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
            "model": {"ignore_merges": true},
            "post_processor": template("<s>", json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}])),
        })),
        joined.kind("Llama 1", json!({
            "normalizer": prepended, "added_tokens": added(&["<unk>", "<s>", "</s>"], 0, &["normalized"]),
        })),
        pieces.kind("Llama 2", json!({"normalizer": prepended, "added_tokens": llama})),
        pieces.kind("Llama 2, with EOS", json!({
            "normalizer": prepended, "added_tokens": llama, "post_processor": template_of(framed),
        })),
        pieces.kind("Llama 2, not legacy", json!({
            "pre_tokenizer": metaspace("first", false), "added_tokens": llama,
        })),
        joined.kind("Phi 3", json!({
            "normalizer": prepended,
            "added_tokens": added(&["<unk>", "<s>", "</s>"], 0, &["rstrip"]),
        })),
        joined.kind("left-stripping", json!({
            "normalizer": prepended,
            "added_tokens": added(&["<unk>", "<s>", "</s>"], 0, &["lstrip"]),
        })),
        pieces.kind("Metaspace, always", json!({
            "pre_tokenizer": metaspace("always", true), "added_tokens": llama,
        })),
        joined.kind("Metaspace, never", json!({
            "pre_tokenizer": metaspace("never", false), "added_tokens": llama,
        })),
        spanning.kind("spanning", json!({"normalizer": prepended, "added_tokens": llama})),
        lacking(pieces.kind("lacking", json!({"normalizer": prepended, "added_tokens": llama}))),
        joined.kind("Gemma", json!({
            "normalizer": spaces(),
            "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
            "added_tokens": added(&["<unk>", "<s>", "</s>"], 0, &[]).as_array().unwrap().iter().cloned()
                .chain(joined.runs.iter().map(|(run, id)| described(run, *id, &[], false))).collect::<Vec<_>>(),
        })),
    ]
}

/// Removes the tokens of some bytes, and closes the gaps in the ids.
fn lacking(mut kind: Kind) -> Kind {
    let vocabulary = kind.json["model"]["vocab"].as_object_mut().unwrap();
    let bytes = ["\u{104}", "\u{106}", "\u{f1}", "\u{ff}", "<0x04>", "<0xF1>"];
    let removed: Vec<u64> =
        bytes.iter().filter_map(|byte| vocabulary.remove(*byte)?.as_u64()).collect();
    assert!(removed.len() > 1);
    let moved = |id: &Value| {
        let id = id.as_u64().unwrap();
        json!(id - removed.iter().filter(|&&removed| removed < id).count() as u64)
    };
    vocabulary.values_mut().for_each(|id| *id = moved(id));
    let added = kind.json["added_tokens"].as_array_mut().unwrap();
    added.iter_mut().for_each(|token| token["id"] = moved(&token["id"]));
    kind
}

fn digits(mut kind: Kind) -> Kind {
    kind.json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true}, bytes(true),
    ]});
    kind
}

fn spaces() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"})
}

fn bytes(splits: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits})
}

fn described(content: &str, id: u32, flags: &[&str], special: bool) -> Value {
    let has = |flag: &str| flags.contains(&flag);
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": has("lstrip"),
        "rstrip": has("rstrip"), "normalized": has("normalized"), "special": special,
    })
}

fn added(contents: &[&str], first: u32, flags: &[&str]) -> Value {
    contents.iter().zip(first..).map(|(content, id)| described(content, id, flags, true)).collect()
}

/// Returns a post-processor with ids that are filled in when the tokens are known.
fn template(token: &str, single: Value) -> Value {
    json!({"type": "TemplateProcessing", "single": single, "pair": [
        {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}},
    ], "special_tokens": {token: {"id": token, "ids": [0], "tokens": [token]}}})
}

fn template_of(single: Value) -> Value {
    let mut template = template("<s>", single);
    template["special_tokens"]["<s>"]["ids"] = json!([1]);
    template["special_tokens"]["</s>"] = json!({"id": "</s>", "ids": [2], "tokens": ["</s>"]});
    template
}

/// Trains with a pre-tokenizer. Returns the model of the JSON.
fn train(pre_tokenizer: &Value, byte_level: bool, size: usize, text: &str) -> Value {
    let untrained = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": pre_tokenizer,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    });
    let mut tokenizer = Tokenizer::from_bytes(untrained.to_string()).unwrap();
    let alphabet = match byte_level {
        true => ByteLevel::alphabet().into_iter().collect(),
        false => ('!'..='~').collect(),
    };
    let builder = BpeTrainerBuilder::new().vocab_size(size).show_progress(false);
    let mut trainer: TrainerWrapper = builder.initial_alphabet(alphabet).build().into();
    let texts = [SCRIPTS, text].into_iter();
    tokenizer.train(&mut trainer, texts).unwrap();
    serde_json::to_value(&tokenizer).unwrap()["model"].take()
}

fn byte_level(
    name: &'static str,
    pattern: Option<&str>,
    rest: Value,
    size: usize,
    text: &str,
) -> Kind {
    let pre_tokenizer = match pattern {
        None => bytes(true),
        Some(pattern) => json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            bytes(false),
        ]}),
    };
    let mut model = train(&pre_tokenizer, true, size, text);
    if let Some(fields) = rest["model"].as_object() {
        fields.iter().for_each(|(field, value)| model[field] = value.clone());
    }
    let first = model["vocab"].as_object().unwrap().len() as u32;
    let list = |name: &str, ids: std::ops::RangeFrom<u32>, special: bool| -> Vec<Value> {
        let contents = rest[name].as_array().into_iter().flatten();
        contents.zip(ids).map(|(c, id)| described(c.as_str().unwrap(), id, &[], special)).collect()
    };
    let mut added = list("special", first.., true);
    if added.is_empty() {
        added.push(described("<|endoftext|>", first, &["normalized"], true));
    }
    added.extend(list("plain", first + added.len() as u32.., false));
    let mut post_processor = rest["post_processor"].clone();
    let place = if post_processor["processors"].is_array() { "/processors/1" } else { "" };
    let tokens = post_processor.pointer_mut(&format!("{place}/special_tokens"));
    for token in tokens.and_then(Value::as_object_mut).into_iter().flatten() {
        let id = added.iter().find(|added| added["content"] == **token.0).unwrap()["id"].clone();
        token.1["ids"] = json!([id]);
    }
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": rest["normalizer"], "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor, "decoder": bytes(true), "model": model,
    });
    Kind { name, json }
}

/// A vocabulary like SentencePiece's: three special tokens, the bytes, characters and merges, and runs of spaces.
struct Pieces {
    model: Value,
    runs: Vec<(String, u32)>,
}

impl Pieces {
    fn train(size: usize, text: &str, splits: &[Value]) -> Self {
        let words = json!({"type": "Sequence", "pretokenizers": splits});
        let mut model = train(&words, false, size, text);
        let trained = model["vocab"].as_object().unwrap().clone();
        let names = ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter();
        let mut tokens: Vec<String> =
            names.chain((0..256).map(|byte| format!("<0x{byte:02X}>"))).collect();
        let mut by_id: Vec<(u64, &String)> =
            trained.iter().map(|(token, id)| (id.as_u64().unwrap(), token)).collect();
        by_id.sort();
        // The trained characters come last, as SentencePiece's do.
        let (characters, merged): (Vec<_>, Vec<_>) =
            by_id.into_iter().partition(|(_, token)| token.chars().count() == 1);
        tokens.extend(merged.into_iter().chain(characters).map(|(_, token)| token.clone()));
        let known: BTreeSet<String> = tokens.iter().cloned().collect();
        let runs: Vec<String> = [2, 4, 8].map(|length| "\u{2581}".repeat(length)).to_vec();
        let lines = ["\n\n".to_owned(), "\t\t".to_owned()];
        let more = runs.iter().chain(&lines).filter(|run| !known.contains(*run));
        tokens.extend(more.cloned());
        let mut merges = model["merges"].as_array().unwrap().clone();
        for run in &runs {
            let half = &run[..run.len() / 2];
            merges.push(json!([half, half]));
        }
        model["merges"] = merges.into();
        let ids = tokens.iter().zip(0_u32..);
        model["vocab"] = ids.map(|(token, id)| (token.clone(), json!(id))).collect();
        model["unk_token"] = "<unk>".into();
        model["byte_fallback"] = true.into();
        model["fuse_unk"] = true.into();
        let id = |token: &String| tokens.iter().position(|other| other == token).unwrap() as u32;
        let runs = runs.iter().chain(&lines).map(|run| (run.clone(), id(run))).collect();
        Self { model, runs }
    }

    fn kind(&self, name: &'static str, rest: Value) -> Kind {
        let single = json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
        let mut json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "pre_tokenizer": null, "post_processor": template_of(single),
            "decoder": null, "model": self.model,
        });
        for (field, value) in rest.as_object().unwrap() {
            json[field] = value.clone();
        }
        Kind { name, json }
    }
}
