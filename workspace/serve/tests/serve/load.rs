//! Many clients at once, some leaving early, and few blocks.

use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::client::{Answer, Server, served};

fn body(number: usize) -> Value {
    let prompt: Vec<usize> = (0..1 + number * 7 % 30).map(|i| (i * 5 + number) % 30).collect();
    json!({
        "prompt": prompt, "max_tokens": 1 + number * 11 % 30, "seed": number,
        "temperature": if number.is_multiple_of(3) { 0.0 } else { 1.0 },
    })
}

/// Returns the answers to requests that are sent one after another.
fn alone(server: &Server, count: usize) -> Vec<Value> {
    (0..count).map(|number| server.completion(&body(number))["choices"].clone()).collect()
}

/// Sends the same requests from many clients at once; a third of the clients leave.
fn together(server: &Server, expected: &[Value]) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(expected) = expected.get(number) else { return };
                    let mut body = body(number);
                    if number % 3 == 1 {
                        body["stream"] = json!(true);
                        let mut stream = server.begin(&body);
                        let mut begin = vec![0; number * 13 % 400];
                        let _ = stream.read_exact(&mut begin);
                    } else if number % 3 == 2 {
                        body["stream"] = json!(true);
                        let events = server.post("/v1/completions", &body).events();
                        let parts = events.iter().map(|event| event["choices"][0]["text"].as_str());
                        assert_eq!(expected[0]["text"], parts.flatten().collect::<String>());
                    } else {
                        assert_eq!(server.completion(&body)["choices"], *expected, "{body}");
                    }
                }
            });
        }
    });
}

#[test]
fn many_clients_get_the_answers_that_each_gets_alone() {
    let (_dir, server) = served(&["--max-num-seqs", "8", "--chunked-prefill-size", "5"]);
    let expected = alone(&server, 90);
    together(&server, &expected);
    server.wait_for("moh_requests_running", 0.0);
    server.wait_for("moh_requests_waiting", 0.0);
    assert!(server.metric("moh_requests_cancelled_total") <= 30.0);
    assert_eq!(server.metric("moh_preemptions_total"), 0.0);
}

#[test]
fn sequences_that_give_up_their_blocks_end_the_same() {
    let options = ["--kv-cache-tokens", "64", "--block-size", "4", "--chunked-prefill-size", "9"];
    let (_dir, server) = served(&options);
    let expected = alone(&server, 60);
    together(&server, &expected);
    assert!(server.metric("moh_preemptions_total") > 0.0);
    server.wait_for("moh_requests_running", 0.0);
    server.wait_for("moh_kv_cache_usage_ratio", 0.0);
}

#[test]
fn prompts_that_begin_alike_are_computed_once() {
    let (_dir, server) = served(&["--block-size", "4"]);
    let prompt: Vec<u32> = (0..22).collect();
    let ask = |n: usize| {
        server.completion(&json!({
            "prompt": prompt, "max_tokens": 5, "temperature": 1, "seed": 1, "n": n,
        }))
    };
    let first = ask(1);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let second = ask(3);
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 20);
    assert_eq!(second["choices"][0]["text"], first["choices"][0]["text"]);
    // Three choices share the tokens that the first choice finds or computes.
    assert_eq!(server.metric("moh_prompt_tokens_cached_total"), 60.0);
}

#[test]
fn a_client_that_leaves_frees_its_place() {
    let (_dir, server) = served(&["--max-num-seqs", "1"]);
    let second = server.request("/v1/completions", b"{\"prompt\": \"w1\"}");
    let cases =
        [(true, &b""[..]), (false, b""), (true, b"\r\n"), (false, b"\r\n"), (false, &second)];
    for (stream, rest) in cases {
        let before = server.metric("moh_requests_cancelled_total");
        let mut clients = Vec::new();
        // One sequence is computed, and the others wait. All clients leave, whatever bytes they have sent.
        for _ in 0..300 {
            let body = json!({
                "prompt": "w1", "n": 3, "max_tokens": 63, "stream": stream, "ignore_eos": true,
            });
            let mut client = server.begin(&body);
            client.write_all(rest).unwrap();
            clients.push(client);
        }
        // If a client leaves before its request is read, no sequence can be cancelled; and the first few may be
        // computed before the server sees that their clients have left.
        server.wait_until("moh_requests_waiting", |waiting| waiting > 30.0);
        drop(clients);
        server.wait_for("moh_requests_waiting", 0.0);
        server.wait_for("moh_requests_running", 0.0);
        assert!(server.metric("moh_requests_cancelled_total") > before);
        server.completion(&json!({ "prompt": "w1", "max_tokens": 3 }));
    }
}

#[cfg(unix)]
#[test]
fn a_signal_lets_answers_finish() {
    let (_dir, mut server) = served(&["--max-num-seqs", "2"]);
    let body =
        json!({ "prompt": "w1", "max_tokens": 60, "stream": true, "temperature": 0, "seed": 1 });
    let whole = server.post("/v1/completions", &body).events().len();
    let mut streams = Vec::new();
    for _ in 0..30 {
        let mut stream = server.begin(&body);
        // The answer has begun.
        stream.read_exact(&mut [0; 1]).unwrap();
        streams.push(stream);
    }
    // `timeout` also sends signals to the process and to its group.
    server.signal("-TERM");
    server.signal("-INT");
    for stream in streams {
        let answer = Answer::read_rest(stream);
        assert_eq!(answer.matches("data: ").count(), whole + 1, "{answer}");
        assert!(answer.contains("data: [DONE]"));
    }
    assert_eq!(server.exit_code(), Some(0));
}
