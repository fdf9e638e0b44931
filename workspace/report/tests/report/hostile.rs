//! Hostile names and files, directories without a run, and files that are not pages.

use std::fs;

use serde_json::{Value, json};

use super::{PROGRAM, check, empty, page, routing, step, write_run};
use moh_testkit::options::take_negative_numbers;
use moh_testkit::programs::{assert_has, failure, program, stderr, success};

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
    let run = dir.path().join(name);
    fs::write(run.join("routing.jsonl"), routing(1, hostile, hostile, 0, [9, 0])).unwrap();
    fs::write(run.join("recipe.toml"), format!("{hostile}\n")).unwrap();
    let page = page(dir.path(), name);
    assert!(!page.contains("<img") && !page.contains("<script"));
    assert_has(&page, &["&lt;img src=x", "&lt;script&gt;alert(1)&lt;/script&gt;&quot;"]);
    assert!(!page.contains(['\u{1}', '\u{202e}']));
}

#[test]
fn a_broken_line_is_left_out_with_a_remark() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("moh", 1, 64), step("moh", 2, 128)]);
    let metrics = dir.path().join("run/metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    let mut hostile = step("moh", 3, 192);
    hostile["<script>alert(1)</script>\u{202e}"] = json!(1);
    fs::write(&metrics, format!("{text}{hostile}\n{}\n", step("moh", 4, 4321))).unwrap();
    let routing = format!("\u{0}\n{}", routing(2, "moh", "text", 0, [2, 6]));
    fs::write(dir.path().join("run/routing.jsonl"), routing).unwrap();
    let output = program(PROGRAM, dir.path()).arg("run").output().unwrap();
    let warnings = stderr(&output);
    assert!(output.status.success(), "{warnings}");
    let page = fs::read_to_string(dir.path().join("run/report.html")).unwrap();
    check(&page);
    for (file, line, reason) in [
        ("metrics", 3, "unknown field `&lt;script&gt;alert(1)&lt;/script&gt;\u{fffd}`"),
        ("routing", 1, "expected value at column 1"),
    ] {
        let remark = format!("left out of run/{file}.jsonl: 1 line, line {line}: {reason}");
        assert!(page.contains(&remark), "{remark}: {page}");
        let line = format!("warning: left out of run/{file}.jsonl: 1 line, line {line}: ");
        assert!(warnings.contains(&line), "{warnings}");
    }
    // The lines after the broken lines.
    let row = "<th scope=\"row\">4</th><td>moh</td><td>4321</td>";
    assert_has(&page, &[row, "Of the tokens, 25.0% select the least used"]);
    assert_eq!(warnings.lines().count(), 2, "{warnings}");
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
    success(&mut to("new/directory/page.html"));
    check(&fs::read_to_string(dir.path().join("new/directory/page.html")).unwrap());
    fs::write(dir.path().join("file"), "").unwrap();
    let error = failure(dir.path(), &mut to("file/page.html"), 1);
    assert!(error.starts_with("file/page.html: ") && !error.contains(".tmp-"), "{error}");
}

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = empty();
    let options = take_negative_numbers(PROGRAM, &[], dir.path());
    assert!(options >= 1, "{options}");
}
