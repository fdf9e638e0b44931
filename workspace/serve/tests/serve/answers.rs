//! Answers to good requests.

use std::fs;
use std::path::Path;

use moh_kernels::{Cpu, ElementType};
use moh_model::{Generator, LogProbabilities, Model};
use serde_json::{Value, json};

use crate::client::{Server, moh_serve, prepared, served};
use moh_testkit::programs::WORDS;

fn model(dir: &Path) -> Model<Cpu> {
    moh_program::models::load(Cpu, ElementType::F32, &dir.join("moh"), 64).unwrap()
}

fn best(logits: &[f32]) -> u32 {
    let ids = 0..logits.len().min(WORDS);
    ids.rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

/// Returns the likeliest tokens after a prompt, with their log-probabilities and heads.
fn likeliest(model: &Model<Cpu>, prompt: &[u32], count: usize) -> Vec<(u32, LogProbabilities)> {
    let mut generator = Generator::new(model, 64).unwrap();
    let mut logits = generator.extend(prompt).unwrap();
    let mut found = Vec::new();
    for _ in 0..count {
        let token = best(&logits);
        found.push((token, LogProbabilities::new(&logits, token, 1)));
        logits = generator.extend(&[token]).unwrap();
    }
    found
}

#[test]
fn completions_are_the_models() {
    let dir = prepared();
    let (server, model) = (Server::start(dir.path(), &[]), model(dir.path()));
    let body = json!({
        "prompt": "w1 w2 w3", "max_tokens": 9, "temperature": 0, "logprobs": 1, "seed": 1,
    });
    let answer = server.completion(&body);
    let choice = &answer["choices"][0];
    let lists = &choice["logprobs"];
    let expected = likeliest(&model, &[1, 2, 3], 9);
    for (index, (id, expected)) in expected.iter().enumerate() {
        let token = format!(" w{id}");
        assert_eq!(lists["tokens"][index], token.as_str());
        let found = lists["token_logprobs"][index].as_f64().unwrap();
        assert!((found - expected.of_token).abs() < 1e-5, "{found} {expected:?}");
        assert_eq!(lists["top_logprobs"][index][&token], lists["token_logprobs"][index]);
    }
    let text = choice["text"].as_str().unwrap();
    for (token, offset) in texts(&lists["tokens"]).zip(offsets(lists)) {
        assert!(text[offset..].starts_with(token), "{offset}: {token}");
    }
    assert_eq!(text, texts(&lists["tokens"]).collect::<String>());
    assert_eq!(choice["finish_reason"], "length");
    let usage = json!({
        "prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12,
        "prompt_tokens_details": { "cached_tokens": 0 },
    });
    assert_eq!(answer["usage"], usage);

    // The same prompt by ids, and as the second of two prompts.
    let with = |key: &str, value: Value| {
        let mut body = body.clone();
        body[key] = value;
        body
    };
    assert_eq!(server.texts(&with("prompt", json!([1, 2, 3]))), [text]);
    let both = server.texts(&with("prompt", json!(["w7", "w1 w2 w3"])));
    assert_eq!(both[1], text);
    assert_eq!(server.texts(&with("prompt", json!([[7], [1, 2, 3]]))), both);
    assert_eq!(server.texts(&with("echo", json!(true))), [format!("w1 w2 w3{text}")]);
    assert_eq!(server.texts(&with("max_tokens", json!(0))), [""]);
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().unwrap().iter().map(|text| text.as_str().unwrap())
}

fn offsets(lists: &Value) -> impl Iterator<Item = usize> {
    let list = lists["text_offset"].as_array().unwrap();
    list.iter().map(|offset| offset.as_u64().unwrap() as usize)
}

#[test]
fn offsets_are_those_of_the_text() {
    let quickstart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/quickstart");
    let dir = tempfile::tempdir().unwrap();
    let server = Server::of(quickstart, dir.path(), &[]);
    for as_ids in [false, true] {
        // The hidden token at the beginning, bytes that are not text alone, and tokens that are sampled almost evenly.
        let body = json!({
            "prompt": "one caf\u{e9} \u{1f642} two", "echo": true, "logprobs": 0, "max_tokens": 200, "seed": 1,
            "temperature": 2, "return_tokens_as_token_ids": as_ids, "ignore_eos": true,
        });
        let choice = server.completion(&body)["choices"][0].clone();
        let text: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
        let found: Vec<_> = offsets(&choice["logprobs"]).collect();
        assert_eq!(found[..2], [0, 0]);
        assert!(found.is_sorted() && *found.last().unwrap() <= text.len(), "{found:?}");
        let tokens: Vec<_> = texts(&choice["logprobs"]["tokens"]).collect();
        assert!(as_ids || tokens.iter().any(|token| token.starts_with("bytes:")));
        for (token, offset) in tokens.into_iter().zip(found) {
            let is_shown = !["bytes:", "<|", "token_id:"].iter().any(|it| token.starts_with(it));
            let here: String = text[offset..].iter().take(token.chars().count()).collect();
            assert!(!is_shown || here == token, "{offset}: {here:?} {token:?}");
        }
    }
}

#[test]
fn prompts_are_scored() {
    let dir = prepared();
    let (server, mut model) = (Server::start(dir.path(), &[]), model(dir.path()));
    let prompt: Vec<u32> = (0..40).map(|n| (n * n + 3) % 30).collect();
    let scored = |max_tokens: usize| {
        let body = json!({
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "echo": true,
        });
        server.completion(&body)["choices"][0]["logprobs"].clone()
    };
    let lists = scored(1);
    assert_eq!(lists["token_logprobs"][0], Value::Null);
    assert_eq!(lists["top_logprobs"][0], Value::Null);
    assert_eq!(lists["tokens"].as_array().unwrap().len(), 41);
    let output = model.run(std::slice::from_ref(&prompt)).unwrap();
    for position in 1..prompt.len() {
        let row = &output.logits[(position - 1) * output.vocab_size..][..output.vocab_size];
        let expected = LogProbabilities::new(row, prompt[position], 2);
        let found = lists["token_logprobs"][position].as_f64().unwrap();
        assert!((found - expected.of_token).abs() < 1e-5, "{position}: {found}");
        let top = lists["top_logprobs"][position].as_object().unwrap();
        assert!(top.len() == 2 || top.len() == 3, "the two likeliest and the token: {top:?}");
    }
    let alone = scored(0);
    assert_eq!(alone["tokens"].as_array().unwrap()[..], lists["tokens"].as_array().unwrap()[..40]);
    assert_eq!(alone["token_logprobs"][39], lists["token_logprobs"][39]);
}

#[test]
fn a_stream_is_the_same_answer_in_parts() {
    let (_dir, server) = served(&[]);
    for echo in [false, true] {
        let mut body = json!({
            "prompt": ["w1 w2", "w9"], "max_tokens": 12, "temperature": 0.7, "seed": 5, "n": 2,
            "logprobs": 1, "echo": echo, "moh_heads": true, "stop": ["w3 w3", "w11"],
        });
        let whole = server.completion(&body);
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let events = server.post("/v1/completions", &body).events();
        for index in 0..4 {
            let parts = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
            let parts: Vec<_> = parts.filter(|part| part["index"] == index).collect();
            let texts = parts.iter().map(|part| part["text"].as_str().unwrap());
            let whole = &whole["choices"][index];
            assert_eq!(whole["text"], texts.collect::<String>());
            assert_eq!(whole["finish_reason"], parts.last().unwrap()["finish_reason"]);
            for list in ["tokens", "token_logprobs", "text_offset"] {
                let of = |part: &Value| part["logprobs"][list].as_array().cloned();
                let joined: Vec<_> = parts.iter().filter_map(|part| of(part)).flatten().collect();
                assert_eq!(whole["logprobs"][list], json!(joined), "{list}");
            }
            let heads = parts.iter().flat_map(|part| part["moh_heads"].as_array().unwrap());
            assert_eq!(whole["moh_heads"], json!(heads.collect::<Vec<_>>()));
        }
        let usage = &events.last().unwrap()["usage"];
        assert_eq!(usage["completion_tokens"], whole["usage"]["completion_tokens"]);
        assert!(events[..events.len() - 1].iter().all(|event| event["usage"].is_null()));
    }
}

#[test]
fn choices_have_seeds_of_their_own() {
    let (_dir, server) = served(&[]);
    let body = |seed: i64, n: usize| json!({ "prompt": "w4 w5", "max_tokens": 20, "temperature": 1.5, "seed": seed, "n": n });
    let three = server.texts(&body(7, 3));
    assert!(three[0] != three[1] && three[1] != three[2]);
    assert_eq!(three, [7, 8, 9].map(|seed| server.texts(&body(seed, 1)).remove(0)));
    let without = json!({ "prompt": "w4 w5", "max_tokens": 20, "temperature": 1.5 });
    assert_ne!(server.texts(&without), server.texts(&without), "a random seed");
}

#[test]
fn generation_ends_at_stop_strings_and_tokens() {
    let (dir, server) = served(&[]);
    let body = json!({ "prompt": "w1 w2 w3", "max_tokens": 20, "temperature": 0 });
    let whole = server.texts(&body).remove(0);
    let words: Vec<_> = whole.split_whitespace().collect();
    let fifth = words[4];
    let first = words.iter().position(|word| *word == fifth).unwrap();
    let with = |key: &str, value: Value| {
        let mut body = body.clone();
        body[key] = value;
        server.completion(&body)
    };
    let stopped = with("stop", json!(["nothing", format!(" {fifth}")]));
    let text = stopped["choices"][0]["text"].as_str().unwrap();
    assert!(whole.starts_with(text) && !text.contains(&format!(" {fifth}")), "{text} of {whole}");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");

    // The end token counts, but is not text.
    let id: u32 = fifth[1..].parse().unwrap();
    let ended = with("stop_token_ids", json!([id]));
    assert_eq!(
        ended["choices"][0]["text"],
        words[..first].iter().map(|w| format!(" {w}")).collect::<String>()
    );
    assert_eq!(ended["choices"][0]["finish_reason"], "stop");
    assert_eq!(ended["usage"]["completion_tokens"], first + 1);

    // The same token as the model's end token, which ignore_eos ignores.
    fs::write(
        dir.path().join("moh/generation_config.json"),
        json!({ "eos_token_id": id }).to_string(),
    )
    .unwrap();
    let server = Server::start(dir.path(), &[]);
    assert_eq!(server.completion(&body)["choices"], ended["choices"]);
    let mut ignoring = body.clone();
    ignoring["ignore_eos"] = json!(true);
    assert_eq!(server.texts(&ignoring), [whole]);
}

#[test]
fn sampling_options_have_their_effect() {
    let (_dir, server) = served(&[]);
    let text = |changes: Value| {
        let mut body = json!({ "prompt": "w1 w2", "max_tokens": 8, "temperature": 1.2, "seed": 3 });
        body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        server.texts(&body).remove(0)
    };
    let greedy = text(json!({ "temperature": 0 }));
    for same in [
        json!({ "top_k": 1 }),
        json!({ "top_p": 1e-9 }),
        json!({ "min_p": 1 }),
        json!({ "temperature": 1e-40 }),
    ] {
        assert_eq!(text(same), greedy);
    }
    assert_eq!(text(json!({ "logit_bias": { "17": 100 } })), " w17".repeat(8));
    assert_eq!(text(json!({ "logit_bias": { "17": 100 }, "top_k": -1, "n": 1 })), " w17".repeat(8));
    let penalised =
        text(json!({ "temperature": 0, "frequency_penalty": 2, "repetition_penalty": 9 }));
    let mut words: Vec<_> = penalised.split_whitespace().collect();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), 8, "no word twice: {penalised}");
}

#[test]
fn a_conversation_is_answered_in_the_template() {
    let dir = prepared();
    let template = "{% for m in messages %}{{ m.role | replace('user', 'w1') | replace('assistant', 'w2') | \
                    replace('system', 'w3') }} {{ m.content }} {% endfor %}w2 ";
    fs::write(dir.path().join("moh/chat_template.jinja"), template).unwrap();
    let server = Server::start(dir.path(), &["--served-model-name", "mine"]);
    let parts = json!([{ "type": "text", "text": "w7 w8" }, { "type": "text", "text": "w9" }]);
    let mut body = json!({
        "model": "mine", "messages": [{ "role": "system", "content": "w5" }, { "role": "user", "content": parts }],
        "temperature": 0, "max_completion_tokens": 6, "logprobs": true, "top_logprobs": 2,
        "tools": [], "response_format": { "type": "text" }, "user": "someone", "store": false,
    });
    let answer = server.post("/v1/chat/completions", &body).json();
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap();
    let rendered = "w3 w5 w1 w7 w8\nw9 w2 ";
    let completion = json!({ "prompt": rendered, "temperature": 0, "max_tokens": 6 });
    assert_eq!(server.texts(&completion), [text]);
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 6);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(content[0]["bytes"], json!(content[0]["token"].as_str().unwrap().as_bytes()));

    body["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &body).events();
    let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let joined: String = deltas.filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(joined, text);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");

    // With heads, every part is a token, except the first and the last.
    body["moh_heads"] = json!(true);
    let with_heads = server.post("/v1/chat/completions", &body).events();
    assert_eq!(with_heads.len(), events.len());
    let positions = |event: &Value| {
        let heads = event["choices"][0]["moh_heads"].as_array().cloned().unwrap_or_default();
        heads.iter().map(|heads| heads["position"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let found: Vec<_> = with_heads.iter().map(positions).collect();
    let expected = (0..5).map(|token| vec![prompt + token]);
    assert!(found[..2].concat().is_empty(), "a token's heads come with the next one");
    assert_eq!(found[2..7], expected.collect::<Vec<_>>());

    // Without a limit, the answer fills the context.
    let open = json!({ "messages": [{ "role": "user", "content": "w7" }], "temperature": 0 });
    let usage = server.post("/v1/chat/completions", &open).json()["usage"].clone();
    assert_eq!(usage["total_tokens"], 64);
}

#[test]
fn the_heads_of_tokens_are_told() {
    let dir = prepared();
    let (server, mut model) = (Server::start(dir.path(), &[]), model(dir.path()));
    let body = json!({
        "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "echo": true, "moh_heads": true,
        "logprobs": 0,
    });
    let answer = server.completion(&body);
    let tokens = answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    let id = |token: &Value| token.as_str().unwrap().trim()[1..].parse().unwrap();
    let ids: Vec<u32> = tokens.iter().map(id).collect();
    let output = model.run(&[ids]).unwrap();
    let heads = answer["choices"][0]["moh_heads"].as_array().unwrap();
    assert_eq!(heads.len(), 7, "the last token is not computed");
    for (position, heads) in heads.iter().enumerate() {
        assert_eq!(heads["position"], position);
        for (layer, found) in heads["layers"].as_array().unwrap().iter().enumerate() {
            assert_eq!(*found, json!(output.active_heads(layer, 0, position)));
        }
    }
}

#[test]
fn tokens_and_the_model_are_described() {
    let (_dir, server) = served(&["--max-model-len", "50"]);
    let answer =
        server.post("/tokenize", &json!({ "prompt": "w1 w29 x", "return_token_strs": true }));
    let expected = json!({
        "count": 3, "max_model_len": 50, "tokens": [1, 29, 0], "token_strs": ["w1", "w29", "w0"],
    });
    assert_eq!(answer.json(), expected);
    let answer = server.post("/detokenize", &json!({ "tokens": [1, 29] })).json();
    assert_eq!(answer, json!({ "prompt": "w1 w29" }));
    let model = server.get("/v1/models").json()["data"][0].clone();
    assert_eq!((&model["id"], &model["max_model_len"]), (&json!("moh"), &json!(50)));
    let layer = json!({ "heads": 8, "active": 6, "shared": [0, 1, 2, 3] });
    assert_eq!(model["moh"]["layers"][0], layer);
    assert_eq!(server.get("/v1/models/moh").json()["id"], "moh");
    assert_eq!(server.get("/v1/models/other").status, 404);
    assert_eq!(server.get("/tokenizer_info").json()["vocab_size"], WORDS);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.metric("moh_heads_computed_ratio{layer=\"1\"}"), 0.75);
    let page = server.get("/");
    assert!(page.head.contains("content-security-policy: default-src 'none'"), "{}", page.head);
    assert!(page.text().contains("page.js") && server.get("/page.js").status == 200);
}

#[test]
fn elements_may_be_bf16() {
    let (_dir, server) = served(&["--dtype", "bf16", "--block-size", "8"]);
    let body = json!({ "prompt": "w1 w2", "max_tokens": 4, "temperature": 0 });
    assert_eq!(server.texts(&body), server.texts(&body));
}

#[test]
fn options_that_cannot_be_are_refused() {
    let dir = prepared();
    let refused = |arguments: &[&str]| {
        let mut command = moh_serve(dir.path(), arguments);
        moh_testkit::programs::failure(dir.path(), &mut command, 1)
    };
    fs::write(dir.path().join("keys"), "\n \n# one\n").unwrap();
    fs::write(dir.path().join("umlaut"), "one\nschl\u{fc}ssel\n").unwrap();
    for (options, expected) in [
        (&["--watch-run"][..], "is not a run"),
        (&["--watch-run"], "leave it out"),
        (&["--max-model-len", "65"], "--max-model-len 65: the model has 64 positions"),
        (&["--api-key-file", "none"], "--api-key-file none: "),
        (&["--api-key-file", "keys"], "contains no key"),
        (&["--api-key-file", "umlaut"], "--api-key-file umlaut: the key in line 2 has characters"),
        (&["--kv-cache-tokens", "1000000000000000"], "--kv-cache-tokens 1000000000000000: needs"),
        (&["--kv-cache-tokens", "18446744073709551615"], "GB are available: set it lower"),
    ] {
        let message = refused(&[&["--model", "moh"], options].concat());
        assert!(message.contains(expected), "{message}");
    }
    for (option, value) in [
        ("--max-connections", "18446744073709551615"),
        ("--max-queue", "1048577"),
        ("--max-num-seqs", "18446744073709551615"),
        ("--max-num-batched-tokens", "18446744073709551615"),
        ("--chunked-prefill-size", "18446744073709551615"),
        ("--block-size", "18446744073709551615"),
        ("--request-timeout", "18446744073709551615"),
        ("--allowed-host", "http://example.org"),
        ("--host", "0.0.0.0"),
        ("--host", "::"),
    ] {
        let mut command = moh_serve(dir.path(), &["--model", "moh", option, value]);
        let (_, message) = moh_testkit::programs::exits(&mut command, 2);
        assert!(message.contains(option), "{message}");
    }
}
