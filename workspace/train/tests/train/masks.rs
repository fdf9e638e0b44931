//! Token files with masks: the targets of training and of evaluations.

use std::fs;
use std::path::Path;

use crate::support::driver::{finish, finish_in_parts, refusal, refuses, stop_at};
use crate::support::results::Results;
use crate::support::{TestRun, write_tokens};
use moh_data::{TokenFile, TokenFileInfo, TokenFileWriter, with_ending};
use serde_json::Value;

/// Adds a mask to the token file `prefix`, by the positions of its tokens.
fn mask(prefix: &Path, trains: impl Fn(u64) -> bool) {
    let file = TokenFile::open(prefix).unwrap();
    let mut writer = TokenFileWriter::replace(prefix, 64).unwrap().with_mask().unwrap();
    for number in 0..file.num_documents() {
        let range = file.document(number).unwrap();
        let ids = file.ids(range.clone()).unwrap();
        let mask: Vec<u8> = range.map(|position| u8::from(trains(position))).collect();
        writer.push_masked_document(&ids, &mask).unwrap();
    }
    writer.finish(TokenFileInfo::default()).unwrap();
}

fn results(place: &TestRun, name: &str, overrides: &[&str]) -> (Results, Vec<Option<u64>>) {
    let mut results = finish(&place.recipe_in(name, overrides));
    let take = |line: &mut Value| line.as_object_mut().unwrap().remove("targets");
    let targets = results.metrics.iter_mut().map(take);
    let targets = targets.map(|targets| targets.map(|targets| targets.as_u64().unwrap())).collect();
    (results, targets)
}

#[test]
fn a_mask_of_ones_is_none() {
    let place = TestRun::new();
    let (expected, none) = results(&place, "run", &[]);
    assert_eq!(none, [None; 10]);
    mask(&place.path("text"), |_| true);
    let (found, targets) = results(&place, "masked", &[]);
    assert_eq!(targets, [Some(64); 10]);
    assert!(found.weights == expected.weights && found.metrics == expected.metrics);
}

#[test]
fn a_run_that_was_stopped_ends_as_one_that_never_was() {
    let place = TestRun::new();
    let text = place.path("text");
    mask(&text, |position| position % 3 > 0);
    let (expected, targets) = results(&place, "whole", &[]);
    assert!(targets.iter().all(|targets| targets.is_some_and(|count| (30..60).contains(&count))));
    let mut found = finish_in_parts(&place.recipe(&[]), [3, 7]);
    for (line, targets) in found.metrics.iter_mut().zip(targets) {
        assert_eq!(line.as_object_mut().unwrap().remove("targets").unwrap().as_u64(), targets);
    }
    assert!(found.weights == expected.weights && found.metrics == expected.metrics);
    // Another mask is another file.
    let recipe = place.recipe_in("again", &[]);
    stop_at(&recipe, 3);
    mask(&text, |position| position % 3 > 1);
    refuses(&recipe, "text");
}

#[test]
fn sources_with_and_without_a_mask_are_mixed() {
    let place = TestRun::new();
    let [text, other] = ["text", "other"].map(|name| place.path(name));
    write_tokens(&other, 5, 60);
    mask(&text, |_| false);
    let sources = format!(
        "data.sources=[{{path={:?}}},{{path={:?},weight=3}}]",
        text.display().to_string(),
        other.display().to_string()
    );
    let (_, targets) = results(&place, "run", &[&sources]);
    // Of 8 sequences of 8 tokens, the sequences of the other file count.
    let whole = |targets: &Option<u64>| targets.is_some_and(|count| count % 8 == 0 && count <= 64);
    assert!(targets.iter().all(whole), "{targets:?}");
    let count: u64 = targets.iter().flatten().sum();
    assert!((380..580).contains(&count), "{count}");
}

#[test]
fn steps_without_a_target_change_nothing_and_do_not_count_as_bad() {
    let place = TestRun::new();
    mask(&place.path("text"), |_| false);
    let (found, targets) = results(&place, "run", &["guard.patience=2"]);
    assert_eq!(targets, [Some(0); 10]);
    for line in &found.metrics {
        assert_eq!(
            (&line["skipped"], &line["loss"]),
            (&"no target is trained on".into(), &0.0.into())
        );
    }
    let losses: Vec<_> =
        found.metrics.iter().filter_map(|line| line.get("validation_loss")).collect();
    // After steps 3 and 5, of the first stage.
    assert_eq!(losses[0], losses[1]);
}

#[test]
fn a_validation_loss_is_that_of_the_targets_that_count() {
    let place = TestRun::new();
    let mut sets = Vec::new();
    for name in ["whole", "these", "others"] {
        write_tokens(&place.path(name), 2, 20);
        sets.push(format!(
            "{{name={name:?},path={:?},batches=2}}",
            place.path(name).display().to_string()
        ));
    }
    mask(&place.path("these"), |position| position % 5 < 2);
    mask(&place.path("others"), |position| position % 5 >= 2);
    let sets = format!("data.validation=[{}]", sets.join(","));
    let (found, _) = results(&place, "run", &[&sets]);
    let summary: Value = serde_json::from_str(&found.summary).unwrap();
    let loaded = &summary["evaluations"][0];
    let of = |name: &str| {
        let loss =
            if name == "whole" { &loaded["loss"] } else { &loaded["other_sets"][name]["loss"] };
        (loss.as_f64().unwrap(), loaded["texts"][name]["targets"].as_f64().unwrap())
    };
    let [(whole, all), (these, some), (others, rest)] = ["whole", "these", "others"].map(of);
    assert_eq!(some + rest, all);
    assert!(some > 0.0 && some < rest, "{some} {rest}");
    assert!(((these * some + others * rest) / all / whole - 1.0).abs() < 1e-12);
    fs::remove_file(with_ending(&place.path("these"), ".mask")).unwrap();
    let refused = refusal(&place.recipe_in("again", &[&sets]));
    assert!(refused.contains("these.mask: ") && refused.contains("it is missing"), "{refused}");
}
