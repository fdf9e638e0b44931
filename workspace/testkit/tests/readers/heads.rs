//! Reports of `moh-eval heads --json`, and their page.

use std::time::SystemTime;

use moh_report::head_measures::HeadDocument;
use serde_json::{Value, json};

use crate::{outcome, run_on_file, target};

/// Returns a report of two heads on two texts, with a sentence of two tokens.
fn report() -> Value {
    let head = |shared: bool| {
        let tokens = if shared {
            json!([])
        } else {
            json!([{"id": 3, "text": " a", "occurrences": 20, "share": 0.5}])
        };
        json!({
            "head": usize::from(!shared), "shared": shared, "load": if shared { [1.0, 1.0] } else { [0.25, 0.5] },
            "feature_rank": 2, "distance": 1.5, "entropy": null, "tokens": tokens,
        })
    };
    let table = json!([[1.0, null], [null, 1.0]]);
    let layer = json!({
        "layer": 0, "gate_entropy": [0.0, 0.1], "pattern_similarity": null, "output_similarity": -0.5,
        "pattern_similarities": table, "output_similarities": table, "heads": [head(true), head(false)],
    });
    let of_sentence = json!({
        "layer": 0, "shared_heads": [0], "active": [[0], [0, 1]], "gates": null, "weights": [[1.0, 0.0], [0.5, 1.5]],
        "maps": [[[1.0], [0.5, 0.5]], [[1.0], [0.25, 0.75]]],
    });
    json!({
        "model": "runs/a/export", "sequence_length": 8,
        "texts": [{"name": "a", "tokens": 16}, {"name": "b", "tokens": 8}], "layers": [layer],
        "sentence": {"tokens": [{"id": 1, "text": "a"}, {"id": 2, "text": "\n"}], "layers": [of_sentence]},
    })
}

#[test]
fn a_mutated_report_has_a_page_or_is_refused() {
    let seeds = [report().to_string().into_bytes()];
    // A megabyte of numbers. Each number may become a cell of a map.
    run_on_file(target("heads", &seeds, 512), "heads.json", |path| {
        let read = HeadDocument::read(path);
        if let Ok(document) = &read {
            let page = moh_report::heads_page(std::slice::from_ref(document), SystemTime::now());
            assert!(page.ends_with("</html>\n") && !page.contains("NaN"));
        }
        outcome(read)
    });
}
