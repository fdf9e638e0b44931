//! Conversations: from their messages to a token file with a mask, with faults, and resumed. `tools/data/chat.py`
//! compares them with transformers, in every format.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use moh_data::{DocumentEnd, TokenFile, with_ending};
use moh_text::prepare::{
    BadRecords, Chat, Observer, Prepare, Prepared, PreparedFile, Progress, Selection, prepare,
};
use moh_text::{ChatTemplate, RenderThreads, TextTokenizer, TrainedTurns};
use serde_json::{Value, json};
use tempfile::TempDir;

use moh_testkit::programs::edit_json;
use moh_testkit::small_tokenizer::{WORDS, write_tokenizer};

const CHAT_ML: &str = "{%- if tools %}{{- '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}\
     {%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + \
     '<|im_end|>\n' }}{%- endfor %}\
     {%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";
const GENERATION: &str = "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}\
     {%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}\
     {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}";

/// Returns a directory with a byte-level tokenizer that has the special tokens of ChatML.
fn workplace() -> (TempDir, TextTokenizer) {
    let dir = tempfile::tempdir().unwrap();
    let tok = dir.path().join("tok");
    write_tokenizer(&tok, &WORDS);
    edit_json(&tok.join("tokenizer.json"), |file| {
        for (id, content) in [(300, "<|im_start|>"), (301, "<|im_end|>")] {
            file["added_tokens"].as_array_mut().unwrap().push(json!({
                "id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false,
            }));
        }
    });
    let tokenizer = TextTokenizer::load(&tok).unwrap();
    (dir, tokenizer)
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(PathBuf::from("t.jinja"), source, BTreeMap::new())
}

fn turns(number: usize) -> Value {
    json!([
        { "role": "user", "content": format!("one {number}") },
        { "role": "assistant", "content": "two" },
        { "role": "user", "content": "one?" },
        { "role": "assistant", "content": "three\u{1f6a2} " },
    ])
}

fn lines(records: &[Value]) -> String {
    records.iter().map(|record| format!("{record}\n")).collect()
}

struct Case<'a> {
    tokenizer: &'a TextTokenizer,
    source: &'a str,
    turns: TrainedTurns,
    field: &'a str,
    bad_records: BadRecords,
}

impl<'a> Case<'a> {
    fn new(tokenizer: &'a TextTokenizer, source: &'a str) -> Self {
        let (turns, bad_records) = (TrainedTurns::All, BadRecords::Refuse);
        Self { tokenizer, source, turns, field: "messages", bad_records }
    }

    fn run(&self, inputs: &[PathBuf], prefix: &Path) -> Result<Vec<PreparedFile>, String> {
        self.prepare(inputs, prefix).map(|prepared| prepared.files)
    }

    fn prepare(&self, inputs: &[PathBuf], prefix: &Path) -> Result<Prepared, String> {
        let template = RenderThreads::new(template(self.source), Duration::MAX)
            .map_err(|error| error.to_string())?;
        let options = Prepare {
            chat: Some(Chat { template: &template, turns: self.turns }),
            field: self.field,
            bad_records: self.bad_records,
            overwrite: true,
            ..Prepare::new(self.tokenizer, inputs, prefix)
        };
        let done = prepare(options, &AtomicBool::new(false), &mut ());
        done.map(Option::unwrap).map_err(|error| error.to_string())
    }
}

/// Returns each document: its text, and the parts of the text that are trained on.
fn read(tokenizer: &TextTokenizer, prefix: &Path) -> Vec<(String, Vec<String>)> {
    let file = TokenFile::open(prefix).unwrap();
    assert!(file.has_mask());
    let read = |number| {
        let range = file.document(number).unwrap();
        let ids = file.ids(range.clone()).unwrap();
        let mut mask = vec![0; ids.len()];
        file.read_mask(range.start, &mut mask).unwrap();
        let mut rest = &ids[..];
        let mut trained = Vec::new();
        for run in mask.chunk_by(|a, b| a == b) {
            let (part, later) = rest.split_at(run.len());
            if run[0] == 1 {
                trained.push(tokenizer.decode(part, false).unwrap());
            }
            rest = later;
        }
        (tokenizer.decode(&ids, false).unwrap(), trained)
    };
    (0..file.num_documents()).map(read).collect()
}

#[test]
fn the_mask_is_that_of_the_answers_with_the_tokens_that_end_them() {
    let (dir, tokenizer) = workplace();
    let (input, prefix) = (dir.path().join("a.jsonl"), dir.path().join("p"));
    let share_gpt =
        json!([{ "from": "human", "value": "one" }, { "from": "gpt", "value": "<|im_end|>" }]);
    fs::write(
        &input,
        lines(&[
            json!({ "messages": turns(1) }),
            json!({ "messages": share_gpt, "tools": [{ "name": "f" }] }),
            json!({ "messages": share_gpt, "tools": "[{\"name\": \"f\"}]" }),
        ]),
    )
    .unwrap();
    for source in [CHAT_ML, GENERATION] {
        let files =
            Case::new(&tokenizer, source).run(std::slice::from_ref(&input), &prefix).unwrap();
        let documents = read(&tokenizer, &prefix);
        assert_eq!(
            documents[0].0,
            "<|im_start|>user\none 1<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n\
             <|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\nthree\u{1f6a2} <|im_end|>\n"
        );
        assert_eq!(documents[0].1, ["two<|im_end|>", "three\u{1f6a2} <|im_end|>"]);
        assert_eq!(documents[1], documents[2]);
        // A special token that a message names is encoded as this token, and counted.
        assert_eq!(documents[1].1, ["<|im_end|><|im_end|>"]);
        assert_eq!(documents[1].0.contains("tools\n[{\"name\": \"f\"}]"), source == CHAT_ML);
        let info = &files[0].info;
        let special = info.special_tokens_in_text.clone().unwrap();
        assert_eq!(special, BTreeMap::from([("<|im_end|>".to_owned(), 2)]));
        let mask = info.mask.clone().unwrap();
        let hash = template(source).blake3().to_owned();
        assert_eq!(mask.chat_template_blake3, Some(hash));
        let bytes = fs::read(with_ending(&prefix, ".mask")).unwrap();
        assert_eq!(mask.trained_tokens, bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>());
        assert_eq!(info.eos_token, DocumentEnd::Unknown);
    }
    let last = Case { turns: TrainedTurns::Last, ..Case::new(&tokenizer, CHAT_ML) };
    last.run(&[input], &prefix).unwrap();
    assert_eq!(read(&tokenizer, &prefix)[0].1, ["three\u{1f6a2} <|im_end|>"]);
}

#[test]
fn conversations_that_nothing_is_learned_from_are_counted() {
    let (dir, tokenizer) = workplace();
    let (input, prefix) = (dir.path().join("a.jsonl"), dir.path().join("p"));
    let question = json!([{ "role": "user", "content": "one" }]);
    let unwanted = json!([{ "role": "assistant", "content": "one", "weight": 0 }]);
    for (records, expected) in
        [(vec![turns(1)], 0), (vec![turns(1), question, unwanted, turns(2)], 2)]
    {
        let records: Vec<_> =
            records.into_iter().map(|messages| json!({ "messages": messages })).collect();
        fs::write(&input, lines(&records)).unwrap();
        let inputs = std::slice::from_ref(&input);
        let prepared = Case::new(&tokenizer, CHAT_ML).prepare(inputs, &prefix).unwrap();
        assert_eq!(prepared.notes.untrained, expected);
        assert_eq!(prepared.files[0].info.documents, records.len() as u64);
    }
}

#[test]
fn a_record_that_is_no_conversation_is_bad_and_says_why() {
    let (dir, tokenizer) = workplace();
    let (input, prefix) = (dir.path().join("a.jsonl"), dir.path().join("p"));
    let failure = |case: &Case<'_>, record: Value| {
        fs::write(&input, lines(&[json!({ "messages": turns(1) }), record])).unwrap();
        let error = case.run(std::slice::from_ref(&input), &prefix).unwrap_err();
        assert!(error.contains("a.jsonl:2: ") && !with_ending(&prefix, ".bin").exists(), "{error}");
        error
    };
    let case = Case::new(&tokenizer, CHAT_ML);
    for (record, expected) in [
        (json!({ "text": "a" }), "no field \"messages\""),
        (json!({ "messages": null }), "\"messages\" is null"),
        (json!({ "messages": "a" }), "\"messages\" is not a list of messages"),
        (json!({ "messages": {} }), "the messages are not a list"),
        (json!({ "messages": [] }), "no message"),
        (json!({ "messages": [{ "role": "user", "content": 3 }] }), "chat template: "),
        (json!({ "messages": turns(1), "tools": 3 }), "the tools are neither a list"),
    ] {
        let error = failure(&case, record);
        assert!(error.contains(expected), "{error}");
    }
    let rewrites =
        "{% for message in messages %}{{ loop.revindex }}{{ message.content }}{% endfor %}";
    let error =
        Case::new(&tokenizer, rewrites).run(std::slice::from_ref(&input), &prefix).unwrap_err();
    assert!(error.contains("a.jsonl:1: ") && error.contains("--chat-train last"), "{error}");
    // Skipped records are listed.
    let skips = BadRecords::Skip { max_share: 0.5 };
    let skipping = Case { bad_records: skips, ..Case::new(&tokenizer, CHAT_ML) };
    skipping.run(std::slice::from_ref(&input), &prefix).unwrap();
    assert!(
        fs::read_to_string(with_ending(&prefix, ".bad.jsonl")).unwrap().contains("neither a list")
    );
    fs::write(&input, lines(&[json!({ "messages": [{ "role": "user", "content": "one" }] })]))
        .unwrap();
    let error = case.run(&[input], &prefix).unwrap_err();
    assert!(error.contains("no token would be trained on"), "{error}");
    let error = Case::new(&tokenizer, "{% for").run(&[], &prefix).unwrap_err();
    assert!(!error.is_empty());
}

#[test]
fn a_stopped_preparation_continues_with_the_same_bytes() {
    let (dir, tokenizer) = workplace();
    let input = dir.path().join("a.jsonl");
    let records: Vec<Value> =
        (0..15_000).map(|number| json!({ "messages": turns(number) })).collect();
    fs::write(&input, lines(&records)).unwrap();
    let inputs = [input];
    let [whole, prefix] = ["whole", "p"].map(|name| dir.path().join(name));
    let template = RenderThreads::new(template(CHAT_ML), Duration::MAX).unwrap();
    let options = |prefix| Prepare {
        chat: Some(Chat { template: &template, turns: TrainedTurns::All }),
        field: "messages",
        split: Some("0.9,0.1".parse().unwrap()),
        selection: Selection { exact_dedup: true, ..Selection::default() },
        sync_every: Duration::ZERO,
        ..Prepare::new(&tokenizer, &inputs, prefix)
    };
    let stop = AtomicBool::new(false);
    prepare(options(&whole), &stop, &mut ()).unwrap().unwrap();
    /// Stops when more documents are written than at the first call.
    struct Stops<'a>(&'a AtomicBool, Option<u64>);
    impl Observer for Stops<'_> {
        fn note(&mut self, _: &str) {}
        fn progress(&mut self, progress: Progress) {
            let first = *self.1.get_or_insert(progress.documents);
            self.0.store(progress.documents > first, Ordering::Relaxed);
        }
    }
    let mut stopped = 0;
    while prepare(options(&prefix), &stop, &mut Stops(&stop, None)).unwrap().is_none() {
        stopped += 1;
    }
    assert!(stopped > 1);
    for part in ["-train", "-validation"] {
        for ending in [".bin", ".idx", ".mask", ".json"] {
            let bytes =
                |prefix: &Path| fs::read(with_ending(&with_ending(prefix, part), ending)).unwrap();
            assert!(bytes(&prefix) == bytes(&whole), "{part}{ending}");
        }
    }
}
