//! The display of a conversion's calibration.

use std::fs;
use std::path::Path;

use moh_testkit::programs::assert_has;
use serde_json::{Value, json};

use super::{empty, figures, page, step, write_run, write_summary};

/// Writes a finished run with a calibrated stage `m<oh`, without a refit if `errors` are null.
fn write_calibrated_run(dir: &Path, errors: [Value; 2]) {
    write_run(dir, "run", &[step("moh", 1, 64)]);
    let layers = [([0, 3], 0.5), ([1, 2], 0.25)].into_iter().zip(&errors);
    let layer = |((heads, before), error): (([usize; 2], f64), &Value)| {
        let mut layer = json!({ "shared_heads": heads, "routed_top_k": 1, "error_before": before });
        if !error.is_null() {
            layer["error"] = error.clone();
        }
        layer
    };
    let layers: Vec<Value> = layers.map(layer).collect();
    let calibration = json!({
        "stage": "m<oh", "step": 140, "tokens": 16384, "held_out_tokens": 2048, "loss_dense": null,
        "loss": 0.453,
        "refit": errors[0] != Value::Null, "layers": layers,
    });
    let summary = json!({
        "steps": 1, "tokens": 64, "heads": 4, "evaluations": [], "calibrations": [calibration],
    });
    write_summary(dir, "run", &summary);
}

#[test]
fn a_calibration_has_losses_errors_and_heads() {
    let dir = empty();
    write_calibrated_run(dir.path(), [0.125.into(), 0.0625.into()]);
    let shown = page(dir.path(), "run");
    let sentence = "Stage m&lt;oh, before step 141, calibrated on 16384 tokens: on the 2048 that are held out the \
                    dense model's loss is not finite, and that of the chosen heads 0.4530 with refitted output \
                    projections.";
    assert!(shown.contains(sentence));
    let errors = figures(&shown, "Error of the attention output by layer")[0];
    assert_has(errors, &["the dense model's projection", "refitted"]);
    let row = "<th scope=\"row\">1</th><td>1, 2</td><td>1</td><td>0.2500</td><td>0.0625</td>";
    assert!(shown.contains(row));
    // Without a refit there is a single curve, and no column of a refit.
    write_calibrated_run(dir.path(), [Value::Null, Value::Null]);
    let shown = page(dir.path(), "run");
    assert!(shown.contains("that of the chosen heads 0.4530."));
    assert!(!shown.contains("refitted") && !shown.contains("explained by the router"));
    // The fit of a learned router has a column.
    let summary = dir.path().join("run/summary.json");
    let text = fs::read_to_string(&summary).unwrap();
    let fitted =
        text.replacen("\"routed_top_k\":1", "\"routed_top_k\":1,\"router_explained\":0.75", 1);
    fs::write(&summary, fitted).unwrap();
    let shown = page(dir.path(), "run");
    assert!(shown.contains("explained by the router") && shown.contains("<td>0.7500</td>"));
    // Runs without calibrations have no such section.
    write_run(dir.path(), "other", &[step("moh", 1, 64)]);
    assert!(!page(dir.path(), "other").contains("Heads chosen by measurement"));
}
