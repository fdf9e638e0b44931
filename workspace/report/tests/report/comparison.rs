//! Pages that compare several runs.

use std::fs;

use serde_json::json;

use super::{
    PROGRAM, compared, drawing, empty, figures, routing, step, write_run, write_steps,
    write_summary,
};
use moh_testkit::programs::{assert_has, failure, program};

#[test]
fn several_runs_are_compared() {
    let dir = empty();
    for (name, count) in [("one", 20), ("two", 30)] {
        write_steps(dir.path(), name, "adapt", count);
        let summary = json!({ "steps": count, "tokens": 64 * count, "heads": 8, "evaluations": [
            { "moment": "loaded", "step": 0, "loss": 3.0, "bits_per_byte": null },
            { "moment": { "trained": { "stage": name } }, "step": count, "loss": 2.0, "bits_per_byte": 1.0 },
        ] });
        write_summary(dir.path(), name, &summary);
    }
    let error = failure(dir.path(), program(PROGRAM, dir.path()).args(["one", "two"]), 2);
    assert!(error.contains("--out is missing"), "{error}");
    let page = compared(dir.path(), &["one", "two"]);
    assert_has(&page, &["2 runs", "Training loss", "Validation loss"]);
    assert_has(&page, &["after stage one", "after stage two"]);
    // An evaluation that both runs have is a single row. If a run lacks an evaluation, its cells are empty.
    assert_eq!(page.matches("the model as loaded").count(), 1);
    let row = page.split("after stage two").nth(1).unwrap().split("</tr>").next().unwrap();
    assert_eq!(row, "</th><td>-</td><td>-</td><td>2.0000</td><td>1.0000</td>");
    // Curves differ in dashes, not only in colour.
    assert!(page.contains("line d0") && page.contains("line d1"));
    // Runs of the same name are told apart by their paths.
    let page = compared(dir.path(), &["one", "./one"]);
    assert!(page.contains("./one</th>"), "{page}");
}

#[test]
fn a_run_has_the_same_look_in_all_charts() {
    let dir = empty();
    for name in ["dense", "moh"] {
        write_run(dir.path(), name, &[step("adapt", 1, 64), step("adapt", 2, 128)]);
    }
    let line = |step, layer| routing(step, "moh", "text", layer, [8 - step, step]);
    let lines: String = [1, 2].map(|step| line(step, 0) + &line(step, 1)).concat();
    fs::write(dir.path().join("moh/routing.jsonl"), lines).unwrap();
    let page = compared(dir.path(), &["dense", "moh"]);
    assert!(page.contains("Of the tokens, 25.0% select the least used"), "the newest evaluation");
    for title in ["Active heads by layer", "Entropy of the gates by layer"] {
        let chart = page.split(&format!("<title>{title}</title>")).nth(1).unwrap();
        let chart = chart.split("</figure>").next().unwrap();
        assert!(chart.contains("class=\"s1\"") && !chart.contains("class=\"s0\""), "{chart}");
    }
    // A single curve needs no key, but here the key names its run.
    let caption = page.split("<strong>Active heads by layer</strong>").nth(1).unwrap();
    assert!(caption.split("<title>").next().unwrap().contains("<ul class=\"key\">"));
}

#[test]
fn runs_of_different_length_have_logarithmic_axes_to_choose() {
    let dir = empty();
    for (name, count) in [("short", 10), ("long", 10_000)] {
        write_steps(dir.path(), name, "adapt", count);
    }
    let page = compared(dir.path(), &["short", "long"]);
    for axes in ["axes-linear", "axes-log-tokens", "axes-log-both"] {
        assert!(
            page.contains(&format!("<input type=\"radio\" name=\"axes\" id=\"{axes}\"")),
            "{axes}"
        );
        assert_eq!(axes != "axes-linear", page.contains(&format!("#{axes}:checked")), "{axes}");
    }
    assert_eq!(page.matches(" checked>").count(), 1, "one choice from the start");
    // The end of the short run, in pixels.
    let end = |title: &str, axes: &str| -> f64 {
        let drawn = drawing(figures(&page, title)[0], axes);
        let path = drawn.split("class=\"line d0\" d=\"").nth(1).unwrap();
        let path = path.split('"').next().unwrap();
        path.split(' ').rev().nth(1).unwrap().parse().unwrap()
    };
    for title in ["Training loss", "Learning rate", "Gradient norm"] {
        assert!(end(title, "linear") < 3.0, "{title}: {}", end(title, "linear"));
        for axes in ["log-tokens", "log-both"] {
            // One of four powers of ten.
            assert!(end(title, axes) > 75.0, "{title}: {}", end(title, axes));
        }
    }
}
