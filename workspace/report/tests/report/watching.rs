//! `--watch`: the server of a page, and what it refuses.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::support::{self, failure, program, stderr, stdout};
use super::{PROGRAM, empty, step, write_run};

/// A server of a run, ended when it is dropped.
struct Watching {
    child: Child,
    address: String,
}

impl Watching {
    fn start(dir: &Path) -> Self {
        Watching::start_for(dir, "run")
    }

    fn start_for(dir: &Path, run: &str) -> Self {
        let mut command: Command = program(PROGRAM, dir);
        let child = command.args(["--watch", run, "--port", "0"]).stdout(Stdio::piped());
        let mut child = child.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address =
            line.trim().strip_prefix("http://").and_then(|url| url.strip_suffix('/')).unwrap();
        assert!(address.starts_with("127.0.0.1:"), "{line}");
        Watching { child, address: address.to_owned() }
    }

    /// The answer to a request for `host`.
    fn ask_as(&self, host: &str, request: &str) -> String {
        self.send(&format!("{request} HTTP/1.1\r\nHost: {host}\r\n\r\n"))
    }

    /// The answer to these bytes.
    fn send(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn ask(&self, request: &str) -> String {
        self.ask_as(&self.address, request)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_watched_run_is_read_at_each_request() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    let before = support::names(&dir.path().join("run"));
    let watching = Watching::start(dir.path());
    let first = watching.ask("GET /");
    assert!(first.starts_with("HTTP/1.1 200 ") && first.contains("All steps"), "{first}");
    assert!(
        first.contains("<script src=\"/watch.js\" defer>") && first.contains("data-seconds=\"5\"")
    );
    assert!(!first.contains(">1234</td>"));
    let mut second = step("adapt", 2, 1234);
    second["grad_norm"] = Value::Null;
    write_run(dir.path(), "run", &[step("adapt", 1, 64), second]);
    assert!(watching.ask("GET /?again").contains(">1234</td>"));
    // What cannot be read now may be readable at the next request.
    fs::write(dir.path().join("run/summary.json"), "<b>\n").unwrap();
    let broken = watching.ask("GET /");
    assert!(
        broken.starts_with("HTTP/1.1 500 ") && broken.contains("run/summary.json: "),
        "{broken}"
    );
    fs::remove_file(dir.path().join("run/summary.json")).unwrap();
    assert!(watching.ask("GET /").starts_with("HTTP/1.1 200 "));
    assert_eq!(support::names(&dir.path().join("run")), before, "nothing was written");
}

#[test]
fn a_watched_directory_shows_the_runs_that_come() {
    let dir = empty();
    write_run(&dir.path().join("runs"), "one", &[step("adapt", 1, 64)]);
    let watching = Watching::start_for(dir.path(), "runs");
    assert!(watching.ask("GET /").contains("<h1>Run one</h1>"));
    write_run(&dir.path().join("runs"), "two", &[step("adapt", 1, 64)]);
    fs::create_dir(dir.path().join("runs/<b>")).unwrap();
    let both = watching.ask("GET /");
    assert!(both.contains("<h1>2 runs</h1>"), "{both}");
    assert!(both.contains("left out of runs, as not run directories: &lt;b&gt;"), "{both}");
}

#[test]
fn a_watched_run_answers_this_machine_and_reading_alone() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    let watching = Watching::start(dir.path());
    for (request, status) in [
        ("GET /", 200),
        ("HEAD /", 200),
        ("GET /watch.js", 200),
        ("GET /../../etc/passwd", 404),
        ("GET /metrics.jsonl", 404),
        ("POST /", 405),
        ("DELETE /", 405),
        ("PUT /metrics.jsonl", 405),
    ] {
        let answer = watching.ask(request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
    }
    let port = watching.address.split(':').next_back().unwrap();
    assert!(watching.ask_as(&format!("localhost:{port}"), "GET /").starts_with("HTTP/1.1 200 "));
    for host in ["rebound.example", &format!("rebound.example:{port}"), "127.0.0.1:1"] {
        let answer = watching.ask_as(host, "GET /");
        assert!(
            answer.starts_with("HTTP/1.1 421 ") && !answer.contains("<svg"),
            "{host}: {answer}"
        );
    }
}

#[test]
fn neither_silence_nor_large_requests_hold_up_the_others() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    let watching = Watching::start(dir.path());
    let silent: Vec<TcpStream> =
        (0..8).map(|_| TcpStream::connect(&watching.address).unwrap()).collect();
    let host = &watching.address;
    // The length is only said: nobody allocates for it or waits for the body.
    let length = u64::MAX;
    let post = format!("POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\nbody");
    assert!(watching.send(&post).starts_with("HTTP/1.1 405 "));
    let get = format!("GET / HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n");
    assert!(watching.send(&get).starts_with("HTTP/1.1 200 "));
    let long = format!("GET / HTTP/1.1\r\nHost: {host}\r\nA: {}\r\n\r\n", "a".repeat(20_000));
    assert!(watching.send(&long).starts_with("HTTP/1.1 400 "));
    assert!(watching.send("\0\r\n\r\n").starts_with("HTTP/1.1 400 "));
    let head = watching.ask("HEAD /");
    assert!(head.ends_with("\r\n\r\n") && !head.contains("Content-Length: 0"), "{head}");
    drop(silent);
    assert!(watching.ask("GET /").starts_with("HTTP/1.1 200 "));
}

#[test]
fn a_port_in_use_is_an_error_and_a_signal_ends_the_server() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    let mut watching = Watching::start(dir.path());
    let port = watching.address.split(':').next_back().unwrap().to_owned();
    let error = failure(
        dir.path(),
        program(PROGRAM, dir.path()).args(["--watch", "run", "--port", &port]),
        1,
    );
    assert!(
        error.starts_with(&format!("--port {port}: another program uses this port")),
        "{error}"
    );
    let interrupt =
        Command::new("kill").args(["-INT", &watching.child.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    assert_eq!(watching.child.wait().unwrap().code(), Some(0));
    let output = program(PROGRAM, dir.path())
        .args(["--watch", "run", "--out", "page.html"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{}{}", stdout(&output), stderr(&output));
}
