//! The display of the use of heads over training.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::json;

use super::{compared, drawing, empty, figures, page, write_steps};

/// Writes a run `name` in `dir` with `evaluations` evaluations and this many layers and routed heads. Head 0 of layer 1
/// is used less and less.
fn write_moh_run(dir: &Path, name: &str, evaluations: u64, layers: u64, heads: usize) {
    write_steps(dir, name, "moh", evaluations);
    let mut text = String::new();
    for step in 1..=evaluations {
        for layer in 0..layers {
            let mut selected = vec![500; heads];
            if layer == 1 {
                selected[0] = 500 - 500 * step / evaluations;
            }
            let line = json!({
                "step": step, "moment": "step", "stage": "moh", "validation": "te<xt", "layer": layer,
                "tokens": 1000, "entropy": 0.5, "shared_heads": 2, "selected": selected,
            });
            writeln!(text, "{line}").unwrap();
        }
    }
    fs::write(dir.join(name).join("routing.jsonl"), text).unwrap();
}

#[test]
fn loads_are_shown_over_training() {
    let dir = empty();
    write_moh_run(dir.path(), "run", 6, 3, 4);
    let page = page(dir.path(), "run");
    // One of four loads is 0: the standard deviation of (0, 1, 1, 1) is 0.433, their mean 0.75.
    let imbalance = drawing(figures(&page, "Imbalance of the most unequal layer")[0], "linear");
    assert!(imbalance.contains("te&lt;xt: 57.74 at 384"), "{imbalance}");
    let mean = drawing(figures(&page, "Imbalance of the loads")[0], "log-tokens");
    assert!(mean.contains("te&lt;xt: 19.25 at 384"), "{mean}");
    let least = drawing(figures(&page, "Load of the least used routed head")[0], "linear");
    assert!(least.contains("te&lt;xt: 0 at 384") && least.contains(": 25 at 192"), "{least}");
    let map = figures(&page, "Layer 1")[0];
    assert!(map.contains("<title>Load of each head of layer 1 on te&lt;xt</title>"), "{map}");
    assert!(map.contains("at the first one 41.7% to 50.0%, at the newest 0.0% to 50.0%."), "{map}");
    // Two shared heads, a head that changes its colour with every evaluation, and three heads of the same colour.
    assert!(map.contains("<path class=\"shared\" d=\"M0 0.5h6M0 1.5h6\">"), "{map}");
    assert!(map.contains("d=\"M0 3.5h6M0 4.5h6M0 5.5h6\""), "{map}");
    assert!(map.contains("stroke=\"#440154\" d=\"M5 2.5h1\""), "{map}");
    assert_eq!(figures(&page, "Imbalance of each layer").len(), 1);
    // A single evaluation has no section over time.
    write_moh_run(dir.path(), "run", 1, 3, 4);
    assert!(!self::page(dir.path(), "run").contains("Over training"));
}

#[test]
fn many_evaluations_of_a_large_model_stay_small() {
    let dir = empty();
    write_moh_run(dir.path(), "run", 150, 80, 64);
    let page = page(dir.path(), "run");
    assert!(page.len() < 900_000, "{} bytes", page.len());
    assert!(page.contains("39 of 150 with the newest"), "{page}");
    // The layers are sorted by imbalance, as many as there is room for.
    assert!(page.contains("come first, 7 of the 80 in all."), "{page}");
    assert_eq!(figures(&page, "Layer 1").len(), 1);
    assert!(page.contains("<summary>Heads of 2 more layers</summary>"));
}

#[test]
fn several_runs_have_their_loads_over_each_other() {
    let dir = empty();
    write_moh_run(dir.path(), "one", 5, 2, 4);
    write_moh_run(dir.path(), "two", 9, 2, 4);
    let page = compared(dir.path(), &["one", "two"]);
    let chart = figures(&page, "Imbalance of the loads")[0];
    assert!(chart.contains("one, te&lt;xt") && chart.contains("two, te&lt;xt"), "{chart}");
    assert_eq!(figures(&page, "Layer 1").len(), 2);
}
