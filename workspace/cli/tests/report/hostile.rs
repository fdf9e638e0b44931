//! Hostile names and files, what is no run, and files that are no pages.

use std::fs;

use serde_json::{Value, json};

use super::support::{failure, program, success};
use super::{PROGRAM, empty, page, step, write_run};

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
