//! The page that `moh-report` makes of runs of `moh-train`.

use std::fs;
use std::path::Path;

use super::PROGRAM;
use moh_testkit::programs::{assert_has, program, success, trainable, two_stages};
use moh_testkit::whole_page::check;

/// Returns the page of a run, made by the program in the same directory.
pub(crate) fn page(run: &Path) -> String {
    let report = Path::new(PROGRAM).with_file_name("moh-report");
    let (place, name) = (run.parent().unwrap(), run.file_name().unwrap());
    success(program(report.to_str().unwrap(), place).arg(name));
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    check(&page);
    page
}

#[test]
fn a_finished_run_has_every_section() {
    let validation = "validation = { path = \"text\", batches = 1, every_steps = 2 }\n";
    let dir = trainable(&format!("{validation}{}", two_stages([256, 256], 64)));
    let out = success(program(PROGRAM, dir.path()).args(["--recipe", "recipe.toml"]));
    assert!(out.contains("moh-report run\n"), "{out}");
    let page = page(&dir.path().join("run"));
    let parts = [
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
    ];
    assert_has(&page, &parts);
    assert!(!page.contains("Steps that were not applied"));
    // Two routed heads of four: half of the tokens on average over the heads.
    let table = page.split("Percent of the tokens that select each head").nth(1).unwrap();
    let row = table.split("<tbody><tr>").nth(1).unwrap().split("</tr>").next().unwrap();
    let loads: Vec<f64> =
        row.split("<td>").skip(2).filter_map(|cell| cell.split('<').next()?.parse().ok()).collect();
    assert_eq!(loads.len(), 4, "{row}");
    assert!((loads.iter().sum::<f64>() - 200.0).abs() < 0.3, "{loads:?}");
    let picture = fs::read_to_string(dir.path().join("run/run.svg")).unwrap();
    assert!(picture.contains("moh: converted to 6 of 8 heads") && picture.ends_with("</svg>\n"));
}
