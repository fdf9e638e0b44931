//! Answers to bad requests: an error, and the server continues.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{PATIENCE, Server, prepared, served};
use moh_testkit::launcher::wait_until;

#[test]
fn a_field_that_cannot_be_is_named() {
    let (_dir, server) = served(&[]);
    let stops: Vec<_> = (0..10_000).map(|n| n.to_string()).collect();
    for (name, value, expected) in [
        ("foo", json!(1), "foo is not supported"),
        ("suffix", json!("a"), "suffix is not supported"),
        ("best_of", json!(2), "best_of has to be 1 or left out"),
        ("model", json!("other"), "model \"other\" is not served: ask for \"moh\""),
        ("prompt", json!(null), "the prompt is missing"),
        ("prompt", json!(5), "prompt must be a string, a list"),
        ("prompt", json!([]), "prompt is an empty list"),
        ("prompt", json!(""), "the prompt has no tokens"),
        ("prompt", json!([[1], []]), "the prompt has no tokens"),
        ("prompt", json!([36, 400]), "token id 400 is outside the vocabulary of 37 ids"),
        ("prompt", json!([4_294_967_296u64]), "prompt must be"),
        ("prompt", json!([-1]), "prompt must be"),
        (
            "prompt",
            json!("w1 ".repeat(65)),
            "the prompt has 65 tokens, more than the context of 64",
        ),
        ("max_tokens", json!(64), "max_tokens is 64: after a prompt of 1 tokens"),
        ("max_tokens", json!(-1), "max_tokens must be a whole number"),
        ("temperature", json!(-0.1), "temperature must be a number from 0 to 2"),
        ("temperature", json!("1"), "temperature must be a number from 0 to 2"),
        ("top_p", json!(0), "top_p must be a number above 0"),
        ("top_k", json!(-2), "top_k must be at least 1"),
        ("min_p", json!(1.1), "min_p must be a number from 0 to 1"),
        ("repetition_penalty", json!(0), "repetition_penalty must be a number from 0.01 to 100"),
        ("presence_penalty", json!(2.1), "presence_penalty must be a number from -2 to 2"),
        ("frequency_penalty", json!([1]), "frequency_penalty must be a number from -2 to 2"),
        (
            "logit_bias",
            json!({ "40": 1 }),
            "logit_bias of \"40\": must be a number from -100 to 100",
        ),
        ("logit_bias", json!({ "4": 101 }), "logit_bias of \"4\""),
        ("logit_bias", json!({ "w4": 1 }), "logit_bias of \"w4\""),
        ("logit_bias", json!({ "04": 1 }), "logit_bias of \"04\""),
        ("logit_bias", json!({ "+4": 1 }), "logit_bias of \"+4\""),
        ("stop_token_ids", json!([37]), "token id 37 is outside the vocabulary of 37 ids"),
        (
            "prompt",
            json!("w1 ".repeat(1500)),
            "prompt: the text has 4500 bytes, and 64 tokens are the most",
        ),
        ("prompt", json!("w".repeat(1 << 20)), "prompt: the text has 1048576 bytes"),
        ("n", json!(0), "n must be from 1 to 128"),
        ("n", json!(1_000_000), "n must be from 1 to 128"),
        ("logprobs", json!(21), "logprobs must be at most 20"),
        ("stop", json!(stops), "stop has 10000 strings, and at most 4 are allowed"),
        ("stop", json!(""), "a string of stop must have 1 to 1024 bytes"),
        ("stop", json!("a".repeat(1025)), "a string of stop must have 1 to 1024 bytes"),
        ("stop", json!([1]), "stop must be a string or a list of strings"),
        ("stream", json!("yes"), "stream must be true or false"),
        ("stream_options", json!({ "include_usage": true }), "set stream, or leave it out"),
        ("stream_options", json!([]), "stream_options must be an object"),
        ("stream_options", json!({ "usage": true }), "stream_options must be an object"),
        ("seed", json!(1.5), "seed must be a whole number"),
    ] {
        let mut body = json!({ "prompt": "w1", "max_tokens": 1 });
        body[name] = value;
        let answer = server.post("/v1/completions", &body);
        let expected_status = if name == "model" { 404 } else { 400 };
        assert_eq!(answer.status, expected_status, "{name}: {}", answer.text());
        assert!(answer.error().contains(expected), "{name}: {}", answer.error());
    }
    for (body, expected) in [
        (json!({}), "messages are missing"),
        (json!({ "messages": [] }), "the conversation has no message"),
        (json!({ "messages": [{ "content": "a" }] }), "message 1"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
            "only \"text\" is supported",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": "a" }] }),
            "the model has no chat template",
        ),
        (
            json!({ "messages": [], "tools": [{ "type": "function" }] }),
            "tools has to be [] or left out",
        ),
        (json!({ "messages": [], "top_logprobs": 2 }), "requires logprobs"),
    ] {
        let answer = server.post("/v1/chat/completions", &body);
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.error().contains(expected), "{}", answer.error());
    }
    assert!(server.post("/tokenize", &json!({})).error().contains("the prompt is missing"));
    for (tokens, expected) in [
        (json!("a"), "tokens must be"),
        (json!([1, 37]), "token id 37 is outside the vocabulary of 37 ids"),
        (json!(vec![1; 1025]), "tokens has 1025 ids, and 1024 are the most"),
    ] {
        let error = server.post("/detokenize", &json!({ "tokens": tokens })).error();
        assert!(error.contains(expected), "{error}");
    }
    let long = json!({ "prompt": "w1 ".repeat(20_000) });
    let error = server.post("/tokenize", &long).error();
    assert!(error.contains("has more than 1536 tokens, and 1024 tokens are the most"), "{error}");
    for (method, path, status, expected) in [
        ("GET", "/v1/completions", 405, "/v1/completions does not take GET"),
        ("PUT", "/", 405, "/ does not take PUT"),
        ("POST", "/page.js", 405, "/page.js does not take POST"),
        ("OPTIONS", "/v1/models", 405, "/v1/models does not take OPTIONS"),
        ("GET", "/nothing", 404, "there is no path /nothing"),
        ("GET", "/v1/models/%ff", 404, "there is no path /v1/models/%ff"),
        ("GET", "/v1/models/", 404, "there is no path /v1/models/"),
    ] {
        let answer =
            server.raw(format!("{method} {path} HTTP/1.1\r\n{}\r\n", server.headers()).as_bytes());
        assert_eq!((answer.status, answer.error().as_str()), (status, expected));
    }
    // Fields that ask for nothing are accepted.
    let nothing = json!({
        "prompt": "w1", "max_tokens": 1, "skip_special_tokens": true, "min_tokens": 0, "best_of": 1,
        "suffix": null, "user": "someone", "foo": null,
    });
    server.completion(&nothing);
    server.completion(&json!({ "prompt": "w1" }));
}

#[test]
fn hostile_requests_do_not_harm_the_others() {
    let (_dir, server) = served(&["--max-connections", "40"]);
    let text = || server.texts(&json!({ "prompt": "w1 w2", "max_tokens": 5, "temperature": 0 }));
    let expected = text();

    let headers = server.headers();
    let post = format!("POST /v1/completions HTTP/1.1\r\n{headers}");
    let long = format!("{post}Content-Length: 1000000000\r\n\r\n{{");
    assert_eq!(server.raw(long.as_bytes()).status, 413);
    let many = format!("{post}{}\r\n", "A: b\r\n".repeat(1000));
    assert!(matches!(server.raw(many.as_bytes()).status, 400 | 431));
    let endless = format!("{post}A: {}", "b".repeat(1 << 20));
    assert!(matches!(server.raw(endless.as_bytes()).status, 0 | 400 | 431));
    for body in
        [&b"\xff\xfe{"[..], b"{\"prompt\": \"\xff\"}", b"", b"[]", b"{\"prompt\": ", b"null"]
    {
        assert_eq!(server.raw(&server.request("/v1/completions", body)).status, 400, "{body:?}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(server.raw(&server.request("/v1/completions", deep.as_bytes())).status, 400);
    assert!(matches!(server.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03").status, 0 | 400));
    assert_eq!(endless_chunks(&server), 413);
    assert_eq!(server.raw(b"GET / HTTP/1.0\r\nHost: example.org\r\n\r\n").status, 421);
    assert_eq!(text(), expected);

    // Two clients read nothing of their streams, and then leave.
    let body = json!({ "prompt": "w1 w2", "max_tokens": 60, "stream": true, "temperature": 0 });
    let open = [(); 2].map(|()| server.begin(&body));
    assert_eq!(text(), expected);
    drop(open);
    server.wait_for("moh_requests_running", 0.0);
    assert_eq!(text(), expected);
}

/// Returns the status of a request with endless chunks.
fn endless_chunks(server: &Server) -> u16 {
    let mut stream = server.connect();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let headers = format!("{}Transfer-Encoding: chunked\r\n\r\n", server.headers());
    stream.write_all(format!("POST /v1/completions HTTP/1.1\r\n{headers}").as_bytes()).unwrap();
    let chunk = format!("100000\r\n{}\r\n", " ".repeat(1 << 20));
    // Sends until the server closes the connection.
    for _ in 0..1000 {
        if stream.write_all(chunk.as_bytes()).is_err() {
            break;
        }
    }
    let mut head = [0; 16];
    match stream.read_exact(&mut head) {
        Ok(()) => String::from_utf8_lossy(&head).split(' ').nth(1).unwrap().parse().unwrap(),
        // The answer may be lost with the connection that the server has reset.
        Err(_) => 413,
    }
}

#[test]
fn what_does_not_arrive_or_end_keeps_nobody_waiting() {
    let dir = prepared();
    let hang = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
    std::fs::write(dir.path().join("moh/chat_template.jinja"), hang).unwrap();
    let mut server = Server::start(dir.path(), &["--max-connections", "40"]);
    let post = format!("POST /v1/completions HTTP/1.1\r\n{}", server.headers());
    let mut open = Vec::new();
    for number in 0..39 {
        let mut stream = server.connect();
        let rest =
            ["Content-Length: 8388608\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n", "X: "];
        stream.write_all(format!("{post}{}", rest[number % 3]).as_bytes()).unwrap();
        open.push(stream);
    }
    // The second time, there are more connections than places.
    for _ in 0..2 {
        let start = Instant::now();
        server.completion(&json!({ "prompt": "w1 w2", "max_tokens": 5 }));
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        std::thread::sleep(Duration::from_secs(1));
        open.extend((0..40).map(|_| server.connect()));
    }
    let large = json!({ "prompt": vec![vec![5; 60]; 8], "n": 128, "max_tokens": 4, "echo": true,
        "moh_heads": true, "logprobs": 20 });
    let answer = server.post("/v1/completions", &large);
    assert!(answer.status == 400 && answer.error().contains("MiB are the most"));
    let chat = json!({ "messages": [{ "role": "user", "content": "w1" }], "max_tokens": 1 });
    let answer = server.post("/v1/chat/completions", &chat);
    assert!(answer.status == 400 && !answer.text().contains('/'), "{}", answer.text());
    for _ in 0..8 {
        let request = server.request("/v1/chat/completions", chat.to_string().as_bytes());
        server.connect().write_all(&request).unwrap();
    }
    let start = Instant::now();
    server.signal("-TERM");
    assert_eq!(server.exit_code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_key_is_required_where_there_is_one() {
    let dir = prepared();
    std::fs::write(dir.path().join("keys"), "\u{feff}one\n\n# four\r\ntwo\r\n").unwrap();
    let server = Server::start(dir.path(), &["--api-key-file", "keys"]);
    let with = |header: &str| {
        let headers = format!("{}{header}", server.headers());
        server.raw(format!("GET /v1/models HTTP/1.1\r\n{headers}\r\n").as_bytes()).status
    };
    assert_eq!(with(""), 401);
    assert_eq!(with("Authorization: Bearer three\r\n"), 401);
    assert_eq!(with("Authorization: Bearer # four\r\n"), 401);
    assert_eq!(with("Authorization: Bearer one\r\n"), 200);
    assert_eq!(with("Authorization: Bearer two\r\n"), 200);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn a_full_queue_asks_to_come_again() {
    let (_dir, server) = served(&["--max-queue", "4", "--max-num-seqs", "1"]);
    let answer = server.post("/v1/completions", &json!({ "prompt": "w1", "n": 5 }));
    assert_eq!(answer.status, 400, "no time helps");
    assert!(answer.error().contains("more than the 4 choices that may wait"), "{}", answer.error());
    // One of these choices is computed, and three wait.
    let four = |stream: bool| json!({ "prompt": "w1", "n": 4, "max_tokens": 60, "stream": stream, "ignore_eos": true });
    let mut stream = server.begin(&four(true));
    stream.read_exact(&mut [0; 1]).unwrap();
    let answer = server.post("/v1/completions", &four(false));
    assert_eq!((answer.status, answer.head.contains("retry-after: 1")), (429, true));
    assert!(answer.error().contains("at most 4 may"), "{}", answer.error());
    assert_eq!(server.metric("moh_requests_refused_total"), 1.0);
    drop(stream);
    // The places of a client that left become free once the engine notices.
    let is_answered = || server.post("/v1/completions", &four(false)).status == 200;
    wait_until(PATIENCE, "an answer", is_answered);
}

#[test]
fn a_client_is_refused_at_once_where_as_many_wait_for_answers_as_may() {
    let (_dir, server) = served(&["--max-connections", "4", "--max-num-seqs", "1"]);
    let long = json!({ "prompt": "w1", "n": 128, "max_tokens": 60, "ignore_eos": true });
    let waiting = [(); 5].map(|()| server.begin(&long));
    server.wait_until("moh_requests_waiting", |waiting| waiting > 256.0);
    let ask = || server.post("/v1/completions", &json!({ "prompt": "w1", "max_tokens": 1 }));
    let answer = ask();
    assert_eq!((answer.status, answer.head.contains("retry-after: 1")), (503, true));
    drop(waiting);
    wait_until(PATIENCE, "an answer", || ask().status == 200);
}

#[test]
fn a_request_is_given_up_at_its_time() {
    let (_dir, server) = served(&["--request-timeout", "1", "--max-num-seqs", "1"]);
    // Short answers are in time.
    server.completion(&json!({ "prompt": "w1", "max_tokens": 2 }));
    assert_eq!(server.metric("moh_requests_late_total"), 0.0);
    let prompts = vec!["w1"; 8];
    let answer = server.post(
        "/v1/completions",
        &json!({ "prompt": prompts, "n": 128, "max_tokens": 60, "ignore_eos": true }),
    );
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert!(answer.error().contains("--request-timeout"), "{}", answer.error());
    server.wait_for("moh_requests_waiting", 0.0);
    assert!(server.metric("moh_requests_late_total") > 0.0);
    server.completion(&json!({ "prompt": "w1", "max_tokens": 2 }));
}
