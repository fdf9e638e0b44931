//! The page about heads.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{PROGRAM, check, compared, empty, figures, step, write_run};
use moh_testkit::programs::{assert_has, failure, program, success};

/// Returns a report of a model with two layers of two heads, on two texts. Both heads are shared if it is dense, else
/// the second is routed.
fn report(model: &str, dense: bool) -> Value {
    let head = |layer: usize, head: usize| {
        let shared = dense || head == 0;
        let tokens = match shared {
            true => json!([]),
            false => json!([{"id": 3, "text": " <b>", "occurrences": 20, "share": 0.75}]),
        };
        json!({
            "head": head, "shared": shared, "load": if shared { [1.0, 1.0] } else { [0.25, 0.875] },
            "feature_rank": 3 + layer, "distance": 1.5, "entropy": 0.5, "tokens": tokens,
        })
    };
    let layer = |layer: usize| {
        json!({
            "layer": layer, "gate_entropy": (!dense).then_some([0.5, 0.25]),
            "pattern_similarity": 0.625, "output_similarity": -0.25,
            "pattern_similarities": [[1.0, 0.625], [0.625, 1.0]],
            "output_similarities": [[1.0, null], [null, 1.0]], "heads": [head(layer, 0), head(layer, 1)],
        })
    };
    json!({
        "model": model, "sequence_length": 8, "layers": [layer(0), layer(1)],
        "texts": [{"name": "village", "tokens": 16}, {"name": "sea <i>", "tokens": 8}],
    })
}

/// Adds a sentence of three tokens. The second token computes the routed head.
fn with_sentence(mut report: Value) -> Value {
    let map = json!([[1.0], [0.5, 0.5], [0.25, 0.25, 0.5]]);
    report["sentence"] = json!({
        "tokens": [{"id": 1, "text": "One"}, {"id": 2, "text": " day"}, {"id": 9, "text": "\n"}],
        "layers": [{
            "layer": 0, "shared_heads": [0], "active": [[0], [0, 1], [0]], "gates": [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]],
            "weights": null, "maps": [map, map],
        }],
    });
    report
}

fn write(dir: &Path, name: &str, report: &Value) {
    fs::write(dir.join(name), report.to_string()).unwrap();
}

#[test]
fn loads_by_text_and_similarities_are_shown() {
    let dir = empty();
    write(dir.path(), "heads.json", &with_sentence(report("runs/half/export", false)));
    let out = success(program(PROGRAM, dir.path()).arg("heads.json"));
    assert_eq!(out, "heads.html\n");
    let page = fs::read_to_string(dir.path().join("heads.html")).unwrap();
    check(&page);
    assert_has(&page, &["<h1>Heads of half</h1>", "runs/half/export, windows of 8"]);
    let loads = figures(&page, "Layer 1")[0];
    let sentence = "Head 1 differs most: 25.0% of the tokens of village compute it, and 87.5% of those of sea &lt;i&gt;.";
    assert_has(loads, &[sentence, ">25</text>", ">88</text>"]);
    // The shared head is grey, in each of two rows.
    assert_eq!(loads.matches("class=\"shared\"").count(), 2, "{loads}");
    for (name, value) in [
        ("layers, heads", "2, 2"),
        ("heads that a token computes", "78.1%"),
        ("similarity of attention patterns", "0.6250"),
        ("similarity of outputs", "-0.2500"),
        ("feature rank of routed heads", "3.50"),
        ("entropy of gates, nats", "0.3750"),
    ] {
        let row = format!("<th scope=\"row\">{name}</th><td>{value}</td>");
        assert!(page.contains(&row), "{row}");
    }
    for chart in ["Similarity of attention patterns", "Feature rank", "Entropy of the gates"] {
        assert_eq!(figures(&page, chart).len(), 1, "{chart}");
    }
    assert!(figures(&page, "Layer 0: outputs")[0].contains("The mean of all pairs is -0.2500."));
    assert_has(&page, &["<code>\u{2423}&lt;b&gt;</code> 75%"]);
    // The second token selects head 1, and the third token computes only the shared head.
    let day = "<code>\u{2423}day</code></th><td>1</td>";
    assert_has(&page, &[day, "<code>\u{21b5}</code></th><td></td>"]);
    let map = figures(&page, "Layer 0, head 1, routed")[0];
    assert!(
        map.contains("1 of 3 tokens compute it.") && map.matches("<rect").count() == 2,
        "{map}"
    );
}

#[test]
fn models_are_compared_under_names_that_differ() {
    let dir = empty();
    write(dir.path(), "a.json", &report("runs/dense/export", true));
    write(dir.path(), "b.json", &report("runs/half/export", false));
    let compare = |files: &[&str]| compared(dir.path(), files);
    let page = compare(&["a.json", "b.json"]);
    assert!(page.contains("<th scope=\"col\">dense</th><th scope=\"col\">half</th>"));
    assert!(page.contains("<th scope=\"row\">shared heads</th><td>4</td><td>2</td>"));
    // A dense model has no loads.
    assert_eq!(figures(&page, "Layer 0").len(), 1);
    let ranks = figures(&page, "Feature rank")[0];
    assert!(ranks.contains("dense, shared") && ranks.contains("half, routed"), "{ranks}");
    assert!(!ranks.contains("dense, routed"), "{ranks}");
    let page = compare(&["b.json", "b.json"]);
    assert!(page.contains("<th scope=\"col\">half (1)</th><th scope=\"col\">half (2)</th>"));
    write(dir.path(), "c.json", &report("other/half/export", false));
    let page = compare(&["b.json", "c.json"]);
    assert!(page.contains("<th scope=\"col\">runs/half</th><th scope=\"col\">other/half</th>"));
    // A model without texts and without routed heads.
    let mut sentence = with_sentence(report("m", false));
    sentence["layers"] = json!([]);
    sentence["texts"] = json!([]);
    write(dir.path(), "c.json", &sentence);
    let page = compare(&["c.json"]);
    assert!(!page.contains("Load by text") && page.contains("Heads of a sentence"));
}

#[test]
fn what_is_no_report_of_heads_is_one_sentence() {
    let dir = empty();
    let refused = |bytes: &[u8]| {
        fs::write(dir.path().join("heads.json"), bytes).unwrap();
        let error = failure(dir.path(), program(PROGRAM, dir.path()).arg("heads.json"), 1);
        assert!(error.starts_with("heads.json: ") && error.lines().count() == 1, "{error}");
        assert!(error.ends_with("give what `moh-eval heads --json` has written"), "{error}");
        assert!(!dir.path().join("heads.html").exists());
        error
    };
    let whole = with_sentence(report("m", false));
    let text = whole.to_string();
    for end in [0, 1, text.len() / 2, text.len() - 1] {
        refused(&text.as_bytes()[..end]);
    }
    type Change = fn(&mut Value);
    let changes: [(Change, &str); 8] = [
        (|r| r["layers"][1]["layer"] = 7.into(), "layers[1]: layer: 7, expected 1"),
        (
            |r| r["layers"][0]["heads"][1]["load"] = json!([1.0]),
            "layers[0]: loads of a head: 1, expected 2",
        ),
        (|r| r["layers"][0]["heads"] = json!([]), "layers[0]: it has no heads or no texts"),
        (
            |r| r["layers"][0]["gate_entropy"] = json!([]),
            "layers[0]: values of gate_entropy: 0, expected 2",
        ),
        (
            |r| r["layers"][0]["output_similarities"][1] = json!([1.0]),
            "similarities of a row: 1, expected 2",
        ),
        (
            |r| r["sentence"]["layers"][0]["active"][1] = json!([0, 2]),
            "sentence.layers[0]: head 2 of 2",
        ),
        (
            |r| r["sentence"]["layers"][0]["maps"][0][2] = json!([1.0]),
            "weights of a row: 1, expected 3",
        ),
        (
            |r| r["sentence"]["tokens"] = json!([]),
            "sentence.layers[0]: lists of active heads: 3, expected 0",
        ),
    ];
    for (change, expected) in changes {
        let mut broken = whole.clone();
        change(&mut broken);
        let error = refused(broken.to_string().as_bytes());
        assert!(error.contains(expected), "{error}");
    }
    let neither = json!({"model": "m", "sequence_length": 8});
    assert!(refused(neither.to_string().as_bytes()).contains("neither `layers` nor a `sentence`"));
}

#[test]
fn runs_and_reports_of_heads_have_pages_of_their_own() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("moh", 1, 64)]);
    write(dir.path(), "heads.json", &report("m", false));
    // A file of another origin is not replaced.
    fs::write(dir.path().join("heads.html"), "mine").unwrap();
    let together = "runs and files of `moh-eval heads --json` have no page together";
    for (arguments, code, expected) in [
        (&["run", "heads.json"][..], 2, together),
        (&["heads.json"], 1, "heads.html: is not a page of moh-report"),
        (&["--watch", "heads.json"], 1, "heads.json: "),
        (&["--watch", "nowhere"], 1, "nowhere: is not a run directory"),
    ] {
        let error = failure(dir.path(), program(PROGRAM, dir.path()).args(arguments), code);
        assert!(error.starts_with(expected), "{error}");
    }
}
