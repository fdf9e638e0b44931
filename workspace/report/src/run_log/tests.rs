use std::fs;

use moh_checkpoint::run_log::RoutingMoment;

use super::*;

const LINE: &str = r#"{"stage":"adapt","step":1,"tokens":8,"loss":2.0,"balance_loss":null,"learning_rate":1e-3,"grad_norm":1.0,"tokens_per_second":10.0}"#;

/// Returns a run directory with these files.
fn run(files: &[(&str, &str)]) -> tempfile::TempDir {
    directory(&[&[(".moh-run", "")], files].concat())
}

/// Returns the log of a run directory with these files.
fn log(files: &[(&str, &str)]) -> RunLog {
    RunLog::read(run(files).path()).unwrap()
}

fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
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

/// Returns a line of `routing.jsonl`, of a layer with two routed heads. All tokens select the first.
fn routing(
    step: u64,
    moment: &str,
    set: &str,
    layer: u64,
    shared: u64,
    selected: [u64; 2],
) -> String {
    let line = serde_json::json!({
        "step": step, "moment": moment, "stage": "moh", "validation": set, "layer": layer,
        "tokens": selected[0], "entropy": 0.5, "shared_heads": shared, "selected": selected,
    });
    format!("{line}\n")
}

#[test]
fn a_directory_without_a_run_is_refused() {
    for name in ["notes.txt", "metrics.jsonl", "recipe.toml", "summary.json"] {
        let dir = directory(&[(name, "")]);
        let error = RunLog::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("is not a run directory"), "{error}");
    }
    assert!(is_run(directory(&[("recipe.toml", ""), ("metrics.jsonl", "")]).path()));
    let copy = directory(&[("metrics.jsonl", "")]);
    fs::create_dir_all(copy.path().join("checkpoints/step-3")).unwrap();
    assert!(is_run(copy.path()));
}

#[test]
fn a_run_that_has_just_begun_has_no_steps() {
    let log = log(&[("recipe.toml", "")]);
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
fn damaged_files_are_named() {
    for (name, text) in [("machine.json", "[]"), ("summary.json", "{\"steps\":-1}")] {
        let dir = run(&[("recipe.toml", ""), (name, text)]);
        let error = format!("{:#}", RunLog::read(dir.path()).unwrap_err());
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn broken_lines_are_left_out_and_named() {
    let long = "x".repeat(200_000);
    let odd = line(1, ",\"\u{202e}<b>\":1");
    let text = format!("{}null\n{}{long}\n\u{0}\n{odd}{}", line(1, ""), line(3, ""), line(7, ""));
    let log = log(&[("recipe.toml", ""), ("metrics.jsonl", &text), ("routing.jsonl", "[]\n")]);
    let numbers: Vec<u64> = log.steps.all.iter().map(|step| log.number(step)).collect();
    assert_eq!(numbers, [1, 3, 7], "each line is a step, read or not");
    assert_eq!((log.steps_done(), log.tokens_after(7), log.tokens_after(2)), (7, Some(56.0), None));
    let [metrics, routing] = &log.left_out[..] else { panic!("{:?}", log.left_out) };
    assert_eq!((&*metrics.file, metrics.count), ("metrics.jsonl", 4));
    assert_eq!((&*routing.file, routing.count, routing.first[0].0), ("routing.jsonl", 1, 1));
    let lines: Vec<u64> = metrics.first.iter().map(|(number, _)| *number).collect();
    assert_eq!(lines, [2, 4, 5, 6]);
    let reasons: Vec<&str> = metrics.first.iter().map(|(_, reason)| &**reason).collect();
    assert!(reasons[0].starts_with("invalid type: null"), "{reasons:?}");
    assert_eq!(reasons[1], "a line has at most 65536 bytes");
    assert!(reasons[3].starts_with("unknown field `\u{fffd}<b>`"), "{reasons:?}");
}

#[test]
fn many_broken_lines_are_counted() {
    let broken = format!("{}{}{}", "{}\n".repeat(5000), line(5001, ""), "y".repeat(70_000));
    let log = log(&[("metrics.jsonl", &broken)]);
    let [left_out] = &log.left_out[..] else { panic!("{:?}", log.left_out) };
    // The last line has no end, and is longer than any line that is still being written.
    assert_eq!((left_out.count, left_out.first.len()), (5001, 5));
    assert_eq!(log.number(&log.steps.all[0]), 5001);
}

#[test]
fn a_broken_first_line_moves_no_step() {
    let recipe = "[run]\ndir = \"run\"\nseed = 1\ndevice = \"cpu\"\ndtype = \"f32\"\n[model]\nfrom = \"m\"\n\
        [data]\nsequence_length = 8\nsources = [{ path = \"text\" }]\n\
        [[stage]]\nname = \"adapt\"\nattention = \"dense\"\ntokens = 800\nbatch_tokens = 8\n\
        micro_batch = 1\nlearning_rate = { max = 1, min = 0, warmup_steps = 0 }\n";
    let metrics = format!("<b>\n{}{}", line(2, ""), line(3, ""));
    let log = log(&[("recipe.toml", recipe), ("metrics.jsonl", &metrics)]);
    assert!(log.recipe.is_some(), "{:?}", log.recipe_text);
    assert_eq!((log.steps_before, log.tokens_after(2), log.steps_done()), (0, Some(16.0), 3));
}

#[test]
fn head_counts_that_no_model_has_are_left_out() {
    let line = |layer: u64, shared: u64| routing(1, "step", "text", layer, shared, [4, 0]);
    let many = |count| (0..count).map(|layer| line(layer, 1000)).collect::<String>();
    for (text, number, kept) in
        [(line(u64::MAX, 1), 1, 0), (line(0, u64::MAX), 1, 0), (many(66), 66, 65)]
    {
        let log = log(&[("recipe.toml", ""), ("routing.jsonl", &text)]);
        let (line, reason) = &log.left_out[0].first[0];
        assert!(*line == number && reason.starts_with("layer "), "{line}: {reason}");
        assert_eq!(log.routing.iter().map(|routing| routing.layers.len()).sum::<usize>(), kept);
    }
    let log = log(&[("recipe.toml", ""), ("routing.jsonl", &many(65))]);
    assert_eq!(log.routing[0].layers.len(), 65);
}

#[test]
fn the_newest_evaluation_of_a_set_and_those_of_conversions_are_kept() {
    let evaluation = |step: u64, moment: &str, set: &str| {
        [0, 1].map(|layer| routing(step, moment, set, layer, 1, [4, 0]))
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
    let log = log(&[("recipe.toml", ""), ("routing.jsonl", &lines.concat().concat())]);
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
fn a_history_has_every_spread_and_the_loads_of_few_evaluations() {
    let mut text = String::new();
    for step in 0..=1000 {
        for (set, unused) in [("text", step), ("code", 0)] {
            for layer in 0..2 {
                let selected = [1000, 1000 - unused * layer];
                text += &routing(step, "step", set, layer, 1, selected);
            }
        }
    }
    let log = log(&[("recipe.toml", ""), ("routing.jsonl", &text)]);
    let [code, text] = &log.routing_histories[..] else { panic!() };
    assert_eq!((text.spreads.len(), code.spreads.len()), (1001, 1001));
    let last = text.spreads[1000];
    // One of two heads has all tokens: the standard deviation of 1 and 0 is their mean.
    assert_eq!((last.step, last.mean, last.most, last.least_load), (1000, 0.5, 1.0, 0.0));
    assert!(code.spreads.iter().all(|spread| spread.most == 0.0 && spread.least_load == 1.0));
    let steps: Vec<u64> = text.picked.iter().map(|loads| loads.step).collect();
    let (newest, picked) = steps.split_last().unwrap();
    assert!((32..=64).contains(&picked.len()) && *newest == 1000, "{steps:?}");
    assert!(picked.windows(2).all(|pair| pair[1] - pair[0] == picked[1]), "{steps:?}");
    assert_eq!(text.picked.last().unwrap().layers[&1].heads, [None, Some(1.0), Some(0.0)]);
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
    let log = log(&[("metrics.jsonl", &metrics), ("summary.json", summary)]);
    assert!(log.is_finished);
    let [(first, losses), (second, _)] = &log.validation()[..] else { panic!() };
    assert_eq!((first.as_str(), second.as_str()), ("validation", "co\u{fffd}de"));
    assert_eq!(losses[..], [(0.0, 3.0), (16.0, 1.5), (16.0, 1.75)]);
}

#[test]
fn numbers_at_the_ends_of_their_range_do_not_overflow() {
    let most = LINE.replace("\"step\":1", &format!("\"step\":{}", u64::MAX));
    let most = most.replace("\"tokens\":8", &format!("\"tokens\":{}", u64::MAX));
    let log = log(&[("metrics.jsonl", &format!("{most}\n{most}\n"))]);
    assert_eq!(log.steps.all.len(), 2);
    assert_eq!(log.tokens_after(u64::MAX), None);
}
