//! Pages of single runs in every state: begun, long, with steps that were not applied. The page of a finished run is
//! tested with `moh-train`.

use std::fs;

use moh_testkit::programs::assert_has;
use serde_json::{Value, json};

use super::{drawing, empty, figures, page, step, steps, write_run, write_steps, write_summary};

#[test]
fn a_run_that_has_just_begun_has_a_page() {
    let dir = empty();
    fs::create_dir(dir.path().join("run")).unwrap();
    fs::write(dir.path().join("run/.moh-run"), "").unwrap();
    fs::write(dir.path().join("run/recipe.toml"), "[run]\nseed = \"<b>\"\n").unwrap();
    let page = page(dir.path(), "run");
    let no_step = ["no step yet", "No step has been recorded yet"];
    assert_has(&page, &no_step);
    assert_has(&page, &["No evaluation has been recorded", "&lt;b&gt;"]);
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
    assert!(page_of_none.contains("1 step was not applied"));
    assert_eq!(figures(&page_of_none, "Learning rate").len(), 0);
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    assert_eq!(figures(&page(dir.path(), "run"), "Learning rate").len(), 1);
    write_run(dir.path(), "run", &[step("adapt", 1, 64), nothing, step("adapt", 3, 192)]);
    let page = page(dir.path(), "run");
    assert!(page.contains("v-9"), "a short line for the step that was not applied");
}

#[test]
fn a_dense_run_has_no_maps_and_an_unfinished_one_says_so() {
    let dir = empty();
    write_steps(dir.path(), "run", "adapt", 30);
    let page = page(dir.path(), "run");
    assert!(page.contains("not finished, in stage adapt"));
    assert!(!page.contains("Balance loss") && !page.contains("How tokens use the heads"));
    assert!(page.contains("the run directory has no recipe.toml"));
}

#[test]
fn a_long_run_has_a_small_page_with_its_spikes() {
    let dir = empty();
    let steps = steps("adapt", 60_000, |n, line| {
        line["tokens"] = (n << 24).into();
        line["loss"] = if n == 41_234 { 77.5 } else { 2.0 + (n % 17) as f64 / 100.0 }.into();
        line["learning_rate"] = if n <= 600 { 1.0 } else { 1e-5 }.into();
    });
    write_run(dir.path(), "run", &steps);
    let page = page(dir.path(), "run");
    assert!(page.len() < 500_000, "{} bytes", page.len());
    // The means have no such value, and the curve of all steps is only a background.
    let loss = figures(&page, "Training and validation loss")[0];
    // Six times: on wide and on narrow pages, for each choice of axes.
    assert_eq!(loss.matches("up to 77.50").count(), 6);
    // A schedule shows all its values.
    let rate = drawing(figures(&page, "Learning rate")[0], "linear");
    assert!(rate.contains(">1.0</text>") && !rate.contains("up to"), "{rate}");
    assert!(page.contains("40 of 60000 steps"));
}

#[test]
fn a_long_table_says_what_it_leaves_out() {
    let dir = empty();
    let steps = steps("adapt", 60, |n, line| {
        line["skipped"] = "loss is not finite".into();
        line["samples"] = json!([4 * n - 4, 4 * n - 1]);
    });
    write_run(dir.path(), "run", &steps);
    assert!(page(dir.path(), "run").contains("The last 50 of 60."));
}

#[test]
fn measured_quantities_of_a_long_run_are_means_over_a_faint_curve() {
    let dir = empty();
    // Every other step is far from the mean.
    let steps = steps("moh", 3000, |n, line| {
        let far = if n % 2 == 0 { 1.5 } else { 0.5 };
        for key in ["balance_loss", "grad_norm", "tokens_per_second"] {
            line[key] = far.into();
        }
    });
    write_run(dir.path(), "run", &steps);
    let page_of_long = page(dir.path(), "run");
    let height = |path: &str| -> f64 {
        let places: Vec<f64> =
            path.split([' ', 'M']).skip(2).step_by(2).map(|y| y.parse().unwrap()).collect();
        // The first steps have means of their own.
        let later = &places[places.len() / 2..];
        later.iter().copied().fold(0.0, f64::max) - later.iter().copied().fold(f64::MAX, f64::min)
    };
    for title in ["Balance loss", "Gradient norm", "Speed"] {
        for axes in ["linear", "log-tokens"] {
            let drawn = drawing(figures(&page_of_long, title)[0], axes);
            let of = |class: &str| {
                let path = drawn.split(&format!("<path class=\"{class}\" d=\"")).nth(1).unwrap();
                height(path.split('"').next().unwrap())
            };
            let (faint, means) = (of("line d0 faint"), of("line d0"));
            assert!(faint > 50.0 && means < 20.0, "{title}: {faint} {means}");
        }
    }
    assert!(!drawing(figures(&page_of_long, "Learning rate")[0], "linear").contains("faint"));
    write_run(dir.path(), "run", &steps[..100]);
    assert!(!page(dir.path(), "run").contains("line d0 faint"), "few steps are shown as they are");
}

#[test]
fn a_moment_that_a_longer_stage_repeats_has_its_step() {
    let dir = empty();
    write_steps(dir.path(), "run", "moh", 9);
    let trained = |step: u64, sets: Value| {
        json!({
            "moment": { "trained": { "stage": "moh" } }, "step": step, "loss": 2.0, "bits_per_byte": null,
            "other_sets": sets,
        })
    };
    // A set that was removed, and a set that was added.
    let [gone, come] =
        ["gone", "come"].map(|set| json!({ set: { "loss": 1.5, "bits_per_byte": null } }));
    let summary = json!({
        "steps": 9, "tokens": 576, "heads": 8, "evaluations": [trained(5, gone), trained(9, come)],
    });
    write_summary(dir.path(), "run", &summary);
    let page = page(dir.path(), "run");
    let rows: Vec<&str> = page
        .split("Losses before and after")
        .nth(1)
        .unwrap()
        .split("<th scope=\"row\"")
        .skip(1)
        .filter_map(|row| row.split('>').nth(1)?.split('<').next())
        .take(4)
        .collect();
    assert_eq!(rows, ["after stage moh, step 5", "gone", "after stage moh, step 9", "come"]);
    for set in ["validation, gone", "validation, come"] {
        assert!(figures(&page, "Training and validation loss")[0].contains(set), "{set}");
    }
}
