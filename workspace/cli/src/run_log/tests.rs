use std::fs;

use moh_train::routing_log::RoutingMoment;

use super::*;

const LINE: &str = r#"{"stage":"adapt","step":1,"tokens":8,"loss":2.0,"balance_loss":null,"learning_rate":1e-3,"grad_norm":1.0,"tokens_per_second":10.0}"#;

/// A run directory with these files.
fn run(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn line(step: u64, change: &str) -> String {
    let line = LINE.replace("\"step\":1", &format!("\"step\":{step}"));
    let line = line.replace("\"tokens\":8", &format!("\"tokens\":{}", 8 * step));
    line.replace('}', &format!("{change}}}\n"))
}

#[test]
fn a_directory_without_a_run_is_refused() {
    let dir = run(&[("notes.txt", "")]);
    let error = RunLog::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("is not a run directory"), "{error}");
}

#[test]
fn a_run_that_has_just_begun_has_no_steps() {
    let dir = run(&[("recipe.toml", "")]);
    let log = RunLog::read(dir.path()).unwrap();
    assert!(log.steps.all.is_empty() && log.recipe.is_none() && !log.is_finished);
    assert_eq!((log.steps_done(), log.validation().len()), (0, 0));
}

#[test]
fn a_line_that_is_being_written_is_passed_over() {
    let text = format!("{}{}", line(1, ""), &LINE[..40]);
    let dir = run(&[("metrics.jsonl", &text)]);
    let log = RunLog::read(dir.path()).unwrap();
    assert_eq!(log.steps.all.len(), 1);
    assert_eq!(fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap(), text);
}

#[test]
fn damaged_files_are_named_with_their_line() {
    for (name, text) in [
        ("metrics.jsonl", "\u{0}\n"),
        ("metrics.jsonl", "null\n"),
        ("rewinds.jsonl", "{}\n"),
        ("routing.jsonl", "[]\n"),
        ("machine.json", "[]"),
        ("summary.json", "{\"steps\":-1}"),
    ] {
        let dir = run(&[("recipe.toml", ""), (name, text)]);
        let error = format!("{:#}", RunLog::read(dir.path()).unwrap_err());
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn head_counts_that_no_model_has_are_refused() {
    let line = |layer: u64, shared: u64| {
        format!(
            "{{\"step\":1,\"moment\":\"step\",\"stage\":null,\"validation\":\"text\",\"layer\":{layer},\
             \"tokens\":4,\"entropy\":0.5,\"shared_heads\":{shared},\"selected\":[4,0]}}\n"
        )
    };
    let many = |count| (0..count).map(|layer| line(layer, 1000)).collect::<String>();
    for (text, number) in [(line(u64::MAX, 1), 1), (line(0, u64::MAX), 1), (many(66), 66)] {
        let dir = run(&[("recipe.toml", ""), ("routing.jsonl", &text)]);
        let error = RunLog::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("routing.jsonl:{number}: layer ")), "{error}");
    }
    let dir = run(&[("recipe.toml", ""), ("routing.jsonl", &many(65))]);
    assert_eq!(RunLog::read(dir.path()).unwrap().routing[0].layers.len(), 65);
}

#[test]
fn the_newest_evaluation_of_a_set_and_those_of_conversions_are_kept() {
    let evaluation = |step: u64, moment: &str, set: &str| {
        [0, 1].map(|layer| {
            format!(
                "{{\"step\":{step},\"moment\":\"{moment}\",\"stage\":\"moh\",\"validation\":\"{set}\",\
                 \"layer\":{layer},\"tokens\":4,\"entropy\":0.5,\"shared_heads\":1,\"selected\":[4,0]}}\n"
            )
        })
    };
    let moments = [
        (0, "converted", "text"),
        (0, "converted", "code"),
        (5, "step", "text"),
        (5, "step", "code"),
        (10, "step", "text"),
        (10, "converted", "text"),
        (15, "step", "text"),
        (20, "step", "text"),
    ];
    let lines = moments.map(|(step, moment, set)| evaluation(step, moment, set));
    let dir = run(&[("recipe.toml", ""), ("routing.jsonl", &lines.concat().concat())]);
    let log = RunLog::read(dir.path()).unwrap();
    let kept: Vec<(u64, bool, &str)> = log
        .routing
        .iter()
        .map(|kept| (kept.step, kept.moment == RoutingMoment::Step, kept.set.as_str()))
        .collect();
    let expected = [
        (0, false, "text"),
        (0, false, "code"),
        (5, true, "code"),
        (10, false, "text"),
        (20, true, "text"),
    ];
    assert_eq!(kept, expected);
    assert!(log.routing.iter().all(|evaluation| evaluation.layers.len() == 2));
}

#[test]
fn losses_of_a_set_come_from_steps_and_from_moments() {
    let first = r#","validation_loss":1.5,"validation_bits_per_byte":null"#;
    let metrics = format!("{}{}", line(1, ""), line(2, first));
    let summary = r#"{"steps":2,"tokens":16,"heads":8,"evaluations":[
        {"moment":"loaded","step":0,"loss":3.0,"bits_per_byte":null,
            "other_sets":{"co\u0000de":{"loss":4.0,"bits_per_byte":null}}},
        {"moment":{"trained":{"stage":"adapt"}},"step":2,"loss":1.5,"bits_per_byte":null},
        {"moment":{"converted":{"stage":"moh","active_heads":6}},"step":2,"loss":1.75,"bits_per_byte":null},
        {"moment":{"trained":{"stage":"lost"}},"step":99,"loss":1.0,"bits_per_byte":null}]}"#;
    let dir = run(&[("metrics.jsonl", &metrics), ("summary.json", summary)]);
    let log = RunLog::read(dir.path()).unwrap();
    assert!(log.is_finished);
    let [(first, losses), (second, _)] = &log.validation()[..] else { panic!() };
    assert_eq!((first.as_str(), second.as_str()), ("validation", "co\u{fffd}de"));
    let losses: Vec<(f64, f64)> = losses.iter().map(|loss| (loss.tokens, loss.loss)).collect();
    assert_eq!(losses, [(0.0, 3.0), (16.0, 1.5), (16.0, 1.75)]);
}

#[test]
fn numbers_at_the_ends_of_their_range_do_not_overflow() {
    let most = LINE.replace("\"step\":1", &format!("\"step\":{}", u64::MAX));
    let most = most.replace("\"tokens\":8", &format!("\"tokens\":{}", u64::MAX));
    let dir = run(&[("metrics.jsonl", &format!("{most}\n{most}\n"))]);
    let log = RunLog::read(dir.path()).unwrap();
    assert_eq!(log.steps.all.len(), 2);
    assert_eq!(log.tokens_after(u64::MAX), None);
}
