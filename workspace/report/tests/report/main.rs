//! `moh-report` as a process: pages of runs in every state, hostile names, several runs, and a page that is
//! watched.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod calibration;
mod comparison;
mod directories;
mod head_measures;
mod heads;
mod hostile;
mod routing;
mod states;
mod watching;

use std::fs;
use std::path::Path;

use moh_testkit::programs::{program, success};
use moh_testkit::whole_page::check;
use serde_json::{Value, json};

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-report");

/// Returns a line of `metrics.jsonl`.
fn step(stage: &str, step: u64, tokens: u64) -> Value {
    json!({
        "stage": stage, "step": step, "tokens": tokens, "loss": 2.0 + 1.0 / step as f64,
        "balance_loss": (stage == "moh").then_some(0.5), "learning_rate": 1e-3, "grad_norm": 0.25,
        "tokens_per_second": 1000.0,
    })
}

/// Writes a run directory `name` in `dir` with these steps.
fn write_run(dir: &Path, name: &str, steps: &[Value]) {
    let run = dir.join(name);
    fs::create_dir_all(&run).unwrap();
    let lines: String = steps.iter().map(|step| format!("{step}\n")).collect();
    fs::write(run.join(".moh-run"), "").unwrap();
    fs::write(run.join("metrics.jsonl"), lines).unwrap();
}

/// Returns lines of `count` steps of 64 tokens. `change` edits each line, given its number.
fn steps(stage: &str, count: u64, change: impl Fn(u64, &mut Value)) -> Vec<Value> {
    let changed = |number| {
        let mut line = step(stage, number, 64 * number);
        change(number, &mut line);
        line
    };
    (1..=count).map(changed).collect()
}

/// Writes a run of `count` steps.
fn write_steps(dir: &Path, name: &str, stage: &str, count: u64) {
    write_run(dir, name, &steps(stage, count, |_, _| {}));
}

/// Returns a line of `routing.jsonl` of a layer after a step. Each token selects a single head.
fn routing(step: u64, stage: &str, set: &str, layer: u64, selected: [u64; 2]) -> String {
    let line = json!({
        "step": step, "moment": "step", "stage": stage, "validation": set, "layer": layer,
        "tokens": selected[0] + selected[1], "entropy": 0.5, "shared_heads": 1, "selected": selected,
    });
    format!("{line}\n")
}

fn empty() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn page(dir: &Path, run: &str) -> String {
    let out = success(program(PROGRAM, dir).arg(run));
    assert_eq!(out, format!("{run}/report.html\n{run}/run.svg\n"));
    let page = fs::read_to_string(dir.join(run).join("report.html")).unwrap();
    check(&page);
    page
}

/// Returns the page that compares runs, or files.
fn compared(dir: &Path, names: &[&str]) -> String {
    let out = success(program(PROGRAM, dir).args(names).args(["--out", "both.html"]));
    assert_eq!(out, "both.html\n");
    let page = fs::read_to_string(dir.join("both.html")).unwrap();
    check(&page);
    page
}

fn write_summary(dir: &Path, run: &str, summary: &Value) {
    fs::write(dir.join(run).join("summary.json"), summary.to_string()).unwrap();
}

fn figures<'a>(page: &'a str, title: &str) -> Vec<&'a str> {
    let figures = page.split("<figure").skip(1).filter_map(|text| text.split("</figure>").next());
    figures.filter(|figure| figure.contains(&format!("<strong>{title}</strong>"))).collect()
}

/// Returns a figure's drawing for a choice of axes, without the drawing for narrow pages.
fn drawing<'a>(figure: &'a str, axes: &str) -> &'a str {
    let parts = figure.split("<div class=\"").skip(1);
    let mut of_axes = parts.skip_while(|part| {
        part.split('"').next().is_none_or(|classes| classes.split(' ').all(|class| class != axes))
    });
    let first = of_axes.next().unwrap();
    let part = if first.contains("<svg") { first } else { of_axes.next().unwrap() };
    part.split("</div>").next().unwrap()
}
