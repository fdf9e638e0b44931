//! `moh-report` as a process: pages of runs in every state, hostile names, several runs, and a page that is
//! watched.

#![cfg(unix)]
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use support::{failure, program, stderr, stdout, success, trainable};

mod support;

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-report");

const STAGES: &str = r#"
validation = { path = "text", batches = 1, every_steps = 2 }

[[stage]]
name = "adapt"
attention = "dense"
tokens = 256
batch_tokens = 64
micro_batch = 2
learning_rate = { max = 1e-2, min = 1e-3, warmup_steps = 1 }

[[stage]]
name = "moh"
attention = "moh"
moh = { shared_heads = 4, routed_top_k = 2 }
tokens = 256
batch_tokens = 64
micro_batch = 2
learning_rate = { max = 5e-3, min = 1e-3, warmup_steps = 1 }
"#;

/// A line of `metrics.jsonl`.
fn step(stage: &str, step: u64, tokens: u64) -> Value {
    json!({
        "stage": stage, "step": step, "tokens": tokens, "loss": 2.0 + 1.0 / step as f64,
        "balance_loss": (stage == "moh").then_some(0.5), "learning_rate": 1e-3, "grad_norm": 0.25,
        "tokens_per_second": 1000.0,
    })
}

/// A run directory `name` in `dir` with these steps.
fn write_run(dir: &Path, name: &str, steps: &[Value]) {
    let run = dir.join(name);
    fs::create_dir_all(&run).unwrap();
    let lines: String = steps.iter().map(|step| format!("{step}\n")).collect();
    fs::write(run.join("metrics.jsonl"), lines).unwrap();
}

fn empty() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// The page of a run.
fn page(dir: &Path, run: &str) -> String {
    let out = success(program(PROGRAM, dir).arg(run));
    assert_eq!(out, format!("{run}/report.html\n"));
    let page = fs::read_to_string(dir.join(run).join("report.html")).unwrap();
    check(&page);
    page
}

/// What holds for every page: it is whole, fetches nothing, and has no number that is none.
fn check(page: &str) {
    assert!(page.starts_with("<!DOCTYPE html><html lang=\"en\">") && page.ends_with("</html>\n"));
    for absent in ["http://", "https://", "<script", "url(", "@import", "NaN", "\"inf"] {
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!page.contains(absent), "{absent}");
    }
    for element in ["svg", "g", "figure", "section", "table", "details", "text"] {
        let opened = page.matches(&format!("<{element}>")).count()
            + page.matches(&format!("<{element} ")).count();
        assert_eq!(opened, page.matches(&format!("</{element}>")).count(), "{element}");
    }
}

/// The number of charts of curves with this title.
fn charts(page: &str, title: &str) -> usize {
    page.matches(&format!("<title>{title}</title>")).count()
}

#[test]
fn a_finished_run_has_every_section() {
    let dir = trainable(STAGES);
    let train = env!("CARGO_BIN_EXE_moh-train");
    let out = success(program(train, dir.path()).args(["--recipe", "recipe.toml"]));
    assert!(out.contains("moh-report run\n"), "{out}");
    let page = page(dir.path(), "run");
    for expected in [
        "Run run",
        "finished",
        "Training and validation loss",
        "moh: converted to 6 of 8 heads",
        "the model as loaded",
        "converted, 6 of 8 heads active, not tuned",
        "Balance loss",
        "Learning rate",
        "Gradient norm",
        "Load of the routed heads on validation, after step 8",
        "Load of the routed heads on validation, converted, not tuned",
        "Active heads by layer",
        "Entropy of the gates by layer",
        "A step of moh",
        "<dt>machine</dt>",
        " thread",
        "routed_top_k = 2",
    ] {
        assert!(page.contains(expected), "{expected}");
    }
    assert!(!page.contains("Steps that were not applied"));
    // Two routed heads of four: half of the tokens on average, whatever the head.
    let table = page.split("Percent of the tokens that select each head").nth(1).unwrap();
    let row = table.split("<tbody><tr>").nth(1).unwrap().split("</tr>").next().unwrap();
    let loads: Vec<f64> =
        row.split("<td>").skip(2).filter_map(|cell| cell.split('<').next()?.parse().ok()).collect();
    assert_eq!(loads.len(), 4, "{row}");
    assert!((loads.iter().sum::<f64>() - 200.0).abs() < 0.3, "{loads:?}");
    let picture = fs::read_to_string(dir.path().join("run/run.svg")).unwrap();
    assert!(picture.contains("moh: converted to 6 of 8 heads") && picture.ends_with("</svg>\n"));
}

#[test]
fn a_run_that_has_just_begun_has_a_page() {
    let dir = empty();
    fs::create_dir(dir.path().join("run")).unwrap();
    fs::write(dir.path().join("run/recipe.toml"), "[run]\nseed = \"<b>\"\n").unwrap();
    let page = page(dir.path(), "run");
    for expected in [
        "no step yet",
        "No step has been recorded yet",
        "No evaluation has been recorded",
        "&lt;b&gt;",
    ] {
        assert!(page.contains(expected), "{expected}");
    }
    assert_eq!(page.matches("<figure").count(), 0);
}

#[test]
fn one_step_without_a_number_has_a_page() {
    let dir = empty();
    let mut nothing = step("adapt", 1, 64);
    for key in ["loss", "learning_rate", "grad_norm", "tokens_per_second"] {
        nothing[key] = Value::Null;
    }
    nothing["skipped"] = "loss is not finite".into();
    nothing["samples"] = json!([0, 3]);
    write_run(dir.path(), "run", &[nothing.clone()]);
    let page_of_none = page(dir.path(), "run");
    assert!(page_of_none.contains("1 step of this path was not applied"));
    assert_eq!(charts(&page_of_none, "Learning rate"), 0);
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    assert_eq!(charts(&page(dir.path(), "run"), "Learning rate"), 1);
    write_run(dir.path(), "run", &[step("adapt", 1, 64), nothing, step("adapt", 3, 192)]);
    let page = page(dir.path(), "run");
    assert!(page.contains("v-9"), "a short line for the step that was not applied");
}

#[test]
fn a_dense_run_has_no_maps_and_an_unfinished_one_says_so() {
    let dir = empty();
    let steps: Vec<Value> = (1..=30).map(|n| step("adapt", n, 64 * n)).collect();
    write_run(dir.path(), "run", &steps);
    let page = page(dir.path(), "run");
    assert!(page.contains("not finished, in stage adapt"));
    assert!(!page.contains("Balance loss") && !page.contains("How tokens use the heads"));
    assert!(page.contains("the run directory has no recipe.toml"));
}

#[test]
fn a_line_that_is_being_written_changes_nothing() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    let whole = page(dir.path(), "run");
    let path = dir.path().join("run/metrics.jsonl");
    let mut text = fs::read_to_string(&path).unwrap();
    text.push_str("{\"stage\":\"adapt\",\"ste");
    fs::write(&path, &text).unwrap();
    let torn = page(dir.path(), "run");
    let steps = |page: &str| {
        page.split("All steps").nth(1).unwrap().split("</table>").next().unwrap().to_owned()
    };
    assert_eq!(steps(&torn), steps(&whole));
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

#[test]
fn a_long_run_has_a_small_page_with_its_spikes() {
    let dir = empty();
    let run = dir.path().join("run");
    fs::create_dir(&run).unwrap();
    let mut text = String::new();
    for n in 1..=60_000u64 {
        let loss = if n == 41_234 { 77.5 } else { 2.0 + (n % 17) as f64 / 100.0 };
        writeln!(
            text,
            "{{\"stage\":\"adapt\",\"step\":{n},\"tokens\":{},\"loss\":{loss},\"balance_loss\":null,\
             \"learning_rate\":{},\"grad_norm\":1.0,\"tokens_per_second\":1e3}}",
            n << 24,
            if n <= 600 { 1.0 } else { 1e-5 },
        )
        .unwrap();
    }
    fs::write(run.join("metrics.jsonl"), text).unwrap();
    let page = page(dir.path(), "run");
    assert!(page.len() < 500_000, "{} bytes", page.len());
    // The means have no such value, and the curve of all steps is only their background.
    let loss = page.split_once("<title>Training and validation loss</title>").unwrap().1;
    let loss = loss.split("<figcaption>").next().unwrap();
    assert_eq!(loss.matches("up to 77.50").count(), 2, "on wide and on narrow pages");
    // A schedule has no exceptions.
    let rate = page.split("<title>Learning rate</title>").nth(1).unwrap();
    let rate = rate.split("<figcaption>").next().unwrap();
    assert!(rate.contains(">1.0</text>") && !rate.contains("up to"), "{rate}");
    assert!(page.contains("40 of 60000 steps"));
}

#[test]
fn names_from_files_are_text() {
    let hostile = "<script>alert(1)</script>\"'&\u{202e}\u{1}";
    let dir = empty();
    let mut first = step(hostile, 1, 64);
    first["validation_loss"] = 2.0.into();
    first["validation_bits_per_byte"] = Value::Null;
    first["validation"] = json!({ hostile: { "loss": 2.0, "bits_per_byte": null } });
    let name = "<img src=x onerror=alert(1)>";
    write_run(dir.path(), name, &[first]);
    let routing = json!({
        "step": 1, "moment": "step", "stage": hostile, "validation": hostile, "layer": 0, "tokens": 9,
        "entropy": 0.5, "shared_heads": 1, "selected": [9, 0],
    });
    let run = dir.path().join(name);
    fs::write(run.join("routing.jsonl"), format!("{routing}\n")).unwrap();
    fs::write(run.join("recipe.toml"), format!("{hostile}\n")).unwrap();
    let page = page(dir.path(), name);
    assert!(!page.contains("<img") && !page.contains("<script"));
    assert!(
        page.contains("&lt;img src=x")
            && page.contains("&lt;script&gt;alert(1)&lt;/script&gt;&quot;")
    );
    assert!(!page.contains(['\u{1}', '\u{202e}']));
}

#[test]
fn several_runs_are_compared() {
    let dir = empty();
    for (name, count) in [("one", 20), ("two", 30)] {
        let steps: Vec<Value> = (1..=count).map(|n| step("adapt", n, 64 * n)).collect();
        write_run(dir.path(), name, &steps);
        let summary = json!({ "steps": count, "tokens": 64 * count, "heads": 8, "evaluations": [
            { "moment": "loaded", "step": 0, "loss": 3.0, "bits_per_byte": null },
            { "moment": { "trained": { "stage": name } }, "step": count, "loss": 2.0, "bits_per_byte": 1.0 },
        ] });
        fs::write(dir.path().join(name).join("summary.json"), summary.to_string()).unwrap();
    }
    let error = failure(dir.path(), program(PROGRAM, dir.path()).args(["one", "two"]), 2);
    assert!(error.contains("--out is missing"), "{error}");
    let out = success(program(PROGRAM, dir.path()).args(["one", "two", "--out", "both.html"]));
    assert_eq!(out, "both.html\n");
    let page = fs::read_to_string(dir.path().join("both.html")).unwrap();
    check(&page);
    for expected in
        ["2 runs", "Training loss", "Validation loss", "after stage one", "after stage two"]
    {
        assert!(page.contains(expected), "{expected}");
    }
    // A moment that both have is one row; one that a run lacks leaves its cells empty.
    assert_eq!(page.matches("the model as loaded").count(), 1);
    let row = page.split("after stage two").nth(1).unwrap().split("</tr>").next().unwrap();
    assert_eq!(row, "</th><td>-</td><td>-</td><td>2.0000</td><td>1.0000</td>");
    // Curves differ in dashes, not in colour alone.
    assert!(page.contains("line d0") && page.contains("line d1"));
    // Runs of the same name are told apart by their paths.
    success(program(PROGRAM, dir.path()).args(["one", "./one", "--out", "both.html"]));
    let page = fs::read_to_string(dir.path().join("both.html")).unwrap();
    assert!(page.contains("./one</th>"), "{page}");
}

#[test]
fn a_run_has_the_same_look_in_all_charts() {
    let dir = empty();
    for name in ["dense", "moh"] {
        write_run(dir.path(), name, &[step("adapt", 1, 64), step("adapt", 2, 128)]);
    }
    let routing = |step: u64, layer: u64| {
        let line = json!({
            "step": step, "moment": "step", "stage": "moh", "validation": "text", "layer": layer, "tokens": 8,
            "entropy": 0.5, "shared_heads": 1, "selected": [8 - step, step],
        });
        format!("{line}\n")
    };
    let lines: String = [1, 2].map(|step| routing(step, 0) + &routing(step, 1)).concat();
    fs::write(dir.path().join("moh/routing.jsonl"), lines).unwrap();
    success(program(PROGRAM, dir.path()).args(["dense", "moh", "--out", "both.html"]));
    let page = fs::read_to_string(dir.path().join("both.html")).unwrap();
    check(&page);
    assert!(page.contains("Of the tokens, 25.0% select the least used"), "the newest evaluation");
    for title in ["Active heads by layer", "Entropy of the gates by layer"] {
        let chart = page.split(&format!("<title>{title}</title>")).nth(1).unwrap();
        let chart = chart.split("</figure>").next().unwrap();
        assert!(chart.contains("class=\"s1\"") && !chart.contains("class=\"s0\""), "{chart}");
    }
    // One curve needs no key, but here it tells which run it is of.
    let caption = page.split("<strong>Active heads by layer</strong>").nth(1).unwrap();
    assert!(caption.split("<title>").next().unwrap().contains("<ul class=\"key\">"));
}

#[test]
fn a_long_table_says_what_it_leaves_out() {
    let dir = empty();
    let steps: Vec<Value> = (1..=10).map(|n| step("adapt", n, 64 * n)).collect();
    write_run(dir.path(), "run", &steps);
    let returns: String = (1..=60)
        .map(|number| {
            let line = json!({
                "number": number, "skipped_steps": [1, 1], "step": 0, "samples": [0, 3], "attempt": number,
                "initial": true,
            });
            format!("{line}\n")
        })
        .collect();
    fs::write(dir.path().join("run/rewinds.jsonl"), returns).unwrap();
    assert!(page(dir.path(), "run").contains("The last 50 of 60."));
}

#[test]
fn only_pages_are_replaced() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    fs::write(dir.path().join("notes.html"), "<!DOCTYPE html><html>my notes</html>").unwrap();
    fs::create_dir(dir.path().join("folder")).unwrap();
    let to = |out: &str| {
        let mut command = program(PROGRAM, dir.path());
        command.args(["run", "--out", out]);
        command
    };
    let error = failure(dir.path(), &mut to("notes.html"), 1);
    assert!(error.starts_with("notes.html: is not a page of moh-report"), "{error}");
    assert!(fs::read_to_string(dir.path().join("notes.html")).unwrap().contains("my notes"));
    for force in [&[][..], &["--force"]] {
        let error = failure(dir.path(), to("folder").args(force), 1);
        assert!(error.starts_with("folder: is not a file"), "{error}");
    }
    success(to("notes.html").arg("--force"));
    success(&mut to("notes.html"));
    let error = failure(dir.path(), &mut to("missing/page.html"), 1);
    assert!(error.starts_with("missing/page.html: cannot be written"), "{error}");
}

#[test]
fn what_is_not_a_run_is_one_sentence() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    let error = failure(dir.path(), program(PROGRAM, dir.path()).arg("nowhere"), 1);
    assert!(error.starts_with("nowhere: is not a run directory"), "{error}");
    fs::write(dir.path().join("run/metrics.jsonl"), "{}\n").unwrap();
    let error = failure(dir.path(), program(PROGRAM, dir.path()).arg("run"), 1);
    assert!(error.starts_with("run/metrics.jsonl:1: missing field"), "{error}");
    let error = failure(dir.path(), program(PROGRAM, dir.path()).args(["--watch", "nowhere"]), 1);
    assert!(error.starts_with("nowhere: is not a run directory"), "{error}");
}

/// A server of a run, ended when it is dropped.
struct Watching {
    child: Child,
    address: String,
}

impl Watching {
    fn start(dir: &Path) -> Self {
        let mut command: Command = program(PROGRAM, dir);
        let child = command.args(["--watch", "run", "--port", "0"]).stdout(Stdio::piped());
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
    fs::write(dir.path().join("run/routing.jsonl"), "<b>\n").unwrap();
    let broken = watching.ask("GET /");
    assert!(
        broken.starts_with("HTTP/1.1 500 ") && broken.contains("run/routing.jsonl:1: "),
        "{broken}"
    );
    fs::remove_file(dir.path().join("run/routing.jsonl")).unwrap();
    assert!(watching.ask("GET /").starts_with("HTTP/1.1 200 "));
    assert_eq!(support::names(&dir.path().join("run")), before, "nothing was written");
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
