//! A run that does not continue from its newest checkpoint with its first recipe: from an earlier checkpoint, with
//! longer and with further stages, and with other validation sets.

use std::fs;

use crate::support::driver::{
    Start, finish, finish_from, finish_in_parts, heard, reference, refusal, refuses, run, stop_at,
    warnings,
};
use crate::support::results::Results;
use crate::support::{TestRun, files, remove_tokens, run_of, shorten, write_tokens};
use moh_checkpoint::run_log::metrics;
use moh_checkpoint::{Condition, ListedCheckpoint};
use moh_recipe::{Recipe, ValidationSet};
use moh_train::{Event, Outcome};

/// Every checkpoint stays.
const KEEP: &str = "checkpoint.keep=9";

#[test]
fn a_run_resumes_from_an_earlier_checkpoint_to_the_same_end() {
    let place = TestRun::new();
    let recipe = place.recipe(&[KEEP]);
    finish(&recipe);
    let run_directory = run_of(&recipe);
    let last = files(&run_directory.checkpoint(10));
    for (step, moved) in [
        (8, &["aside-step-10"][..]),
        (5, &["aside-step-10-2", "aside-step-8", "aside-step-6"]),
        (5, &["aside-step-10-3", "aside-step-8-2", "aside-step-6-2"]),
    ] {
        let mut heard = Vec::new();
        let back = Start { resume_step: Some(step), ..Start::default() };
        let found = back.finish_and_hear(&recipe, |event, _| {
            if let Event::LaterCheckpoint { path } = event {
                assert!(!run_directory.summary().exists(), "the run is unfinished");
                heard.push(path.file_name().unwrap().to_str().unwrap().to_owned());
            }
        });
        assert_eq!(heard, moved);
        assert!(found == *reference(), "from {step}");
    }
    let listed = moh_checkpoint::list(&run_directory).unwrap();
    let aside = |one: &&ListedCheckpoint| one.condition == Condition::MovedAside;
    assert_eq!(listed.iter().filter(aside).count(), 1 + 3 + 3);
    assert!(listed.iter().all(|one| one.state.as_ref().is_ok_and(|state| state.step == one.step)));
    // With its old name, a directory is a checkpoint again.
    let newest = run_directory.checkpoint(10);
    fs::remove_dir_all(&newest).unwrap();
    fs::rename(run_directory.checkpoints().join("aside-step-10"), &newest).unwrap();
    assert!(files(&newest) == last);
    assert!(matches!(run(&recipe).unwrap(), Outcome::AlreadyFinished(_)));
}

#[test]
fn a_run_that_is_interrupted_after_going_back_goes_on_from_there() {
    let place = TestRun::new();
    let recipe = place.recipe_in("copy", &[]);
    Start { copies: &[(9, &recipe.run.dir)], ..Start::default() }.finish(&place.recipe(&[]));
    let resumed = Start { resume_step: Some(6), stop_at: 7, ..Start::default() };
    assert_eq!(resumed.run(&recipe).unwrap(), Outcome::Stopped { step: 7 });
    assert_eq!(run_of(&recipe).checkpoint_steps().unwrap(), [6, 7]);
    assert!(finish(&recipe) == *reference());
}

#[test]
fn a_step_without_a_good_checkpoint_is_refused_and_nothing_moves() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    finish(&recipe);
    let run = run_of(&recipe);
    shorten(&run.checkpoint(8).join("weights.safetensors"));
    let before = files(run.root());
    let refused = |step| {
        let start = Start { resume_step: Some(step), ..Start::default() };
        start.run(&recipe).unwrap_err().to_string()
    };
    let error = refused(7);
    assert!(error.ends_with("no checkpoint of step 7: name one of 8, 10"), "{error}");
    let error = refused(8);
    assert!(error.contains("step-8/weights.safetensors: "), "{error}");
    assert!(files(run.root()) == before);
}

/// Batches of 64 tokens: eight steps of a stage instead of five.
const LONGER: [&str; 2] = ["stage.adapt.tokens=512", "stage.moh.tokens=512"];

fn learning_rates(recipe: &Recipe) -> Vec<f64> {
    let lines = metrics::read(&run_of(recipe).metrics()).unwrap();
    lines.into_iter().map(|line| line.learning_rate).collect()
}

/// Returns the results of a run that is stopped at `step` and continues with a longer stage to its end.
fn grown_at(step: u64, longer: &str) -> Results {
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), step);
    finish(&place.recipe(&[longer]))
}

#[test]
fn a_longer_stage_has_the_new_schedule_from_the_step_on_at_which_it_grew() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let (short, long) = (recipe.stages[0].schedule(), place.recipe(&LONGER).stages[0].schedule());
    stop_at(&recipe, 3);
    let recipe = place.recipe(&LONGER[..1]);
    let extensions = heard(&recipe, |event| match event {
        Event::StageExtended { extension: it } => Some((it.step, it.before, it.tokens)),
        _ => None,
    });
    assert_eq!(extensions, [(3, 320, 512)]);
    let rates = learning_rates(&recipe);
    assert_eq!(rates.len(), 13);
    for step in 1..=8 {
        let schedule = if step <= 3 { short } else { long };
        assert_eq!(rates[step as usize - 1], schedule.learning_rate(step), "step {step}");
    }
    assert!(matches!(run(&recipe).unwrap(), Outcome::AlreadyFinished(_)));
}

#[test]
fn a_grown_run_ends_the_same_however_it_is_interrupted() {
    let expected = grown_at(3, LONGER[0]);
    // Stopped at every step after it.
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 3);
    assert!(finish_in_parts(&place.recipe(&LONGER[..1]), 4..13) == expected);
    // Killed between two checkpoints after it, and again with the newest checkpoint damaged: the checkpoint before is
    // from before the growth.
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 3);
    let recipe = place.recipe_in("copy", &LONGER[..1]);
    let copies = [(4, recipe.run.dir.as_path())];
    Start { copies: &copies, ..Start::default() }.finish(&place.recipe(&LONGER[..1]));
    let run = run_of(&recipe);
    assert_eq!(run.checkpoint_steps().unwrap(), [2, 3]);
    shorten(&run.checkpoint(3).join("manifest.json"));
    let mut heard = Vec::new();
    let stopping = Start { stop_at: 5, ..Start::default() };
    let done = stopping.run_and_hear(&recipe, |event, _| {
        if let Event::Resumed { step } = event {
            heard.push(*step);
        }
    });
    assert_eq!((done.unwrap(), heard), (Outcome::Stopped { step: 5 }, vec![2]));
    // The checkpoints alone are enough.
    fs::remove_file(run.growth()).unwrap();
    assert!(finish(&recipe) == expected);
    assert!(run.growth().is_file());
}

#[test]
fn a_stage_that_has_not_begun_grows() {
    let expected = grown_at(3, LONGER[1]);
    assert_eq!(expected.metrics.len(), 13);
    // Its schedule has the new length from its first step on.
    assert!(finish(&TestRun::new().recipe(&LONGER[1..])) == expected);
}

#[test]
fn a_finished_run_goes_on_with_a_longer_last_stage() {
    let place = TestRun::new();
    let short = place.recipe(&[KEEP]);
    finish(&short);
    let recipe = place.recipe(&[KEEP, LONGER[1]]);
    let expected = finish(&recipe);
    assert_eq!(expected.metrics.len(), 13);
    let (old, new) = (short.stages[1].schedule(), recipe.stages[1].schedule());
    let rates = learning_rates(&recipe);
    assert_eq!(rates[9], old.learning_rate(5));
    assert_eq!(rates[10], new.learning_rate(6));
    // Resumed before the stage's first end, the run reaches this end, and extends the stage again.
    for step in [8, 10, 12] {
        assert!(finish_from(&recipe, step) == expected, "from {step}");
    }
    // Once more.
    let recipe = place.recipe(&[KEEP, "stage.moh.tokens=640"]);
    let expected = finish(&recipe);
    assert_eq!(expected.metrics.len(), 15);
    assert!(finish_from(&recipe, 6) == expected);
}

#[test]
fn a_stage_that_is_over_and_a_shorter_one_are_refused() {
    let place = TestRun::new();
    let recipe = place.recipe(&[KEEP]);
    stop_at(&recipe, 6);
    let root = &recipe.run.dir;
    let before = files(root);
    for (change, expected) in [
        (LONGER[0], "stage.adapt.tokens: was 320, now 512: at step 6 the stage is over, and only"),
        ("stage.moh.tokens=256", "the recipe differs from the run's"),
    ] {
        refuses(&place.recipe(&[KEEP, change]), expected);
    }
    assert!(files(root) == before);
    // At a step before its end the same stage grows.
    let longer = place.recipe(&[KEEP, LONGER[0]]);
    assert!(finish_from(&longer, 4) == grown_at(4, LONGER[0]));
}

#[test]
fn metrics_that_begin_in_a_later_stage_keep_their_steps_when_an_earlier_one_has_grown() {
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 3);
    let recipe = place.recipe(&LONGER[..1]);
    stop_at(&recipe, 9);
    fs::remove_file(run_of(&recipe).metrics()).unwrap();
    // Resumed with step 2 of the second stage, after eight steps of the first stage.
    stop_at(&recipe, 11);
    let steps: Vec<_> =
        finish(&recipe).metrics.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 3, 4, 5]);
}

/// Returns the recipe with a third stage, like the first except its name, and with these overrides.
fn with_third_stage(place: &TestRun, overrides: &[&str]) -> Recipe {
    let mut recipe = place.recipe(overrides);
    let mut stage = recipe.stages[0].clone();
    (stage.name, stage.tokens) = ("again".to_owned(), 320);
    recipe.stages.push(stage);
    recipe
}

#[test]
fn an_appended_stage_gives_the_bits_of_a_run_that_had_it_from_the_start() {
    let expected = finish(&with_third_stage(&TestRun::new(), &[KEEP]));
    assert_eq!(expected.metrics.len(), 15);
    for stop in [3, 7, 10] {
        let place = TestRun::new();
        let first = place.recipe(&[KEEP]);
        match stop {
            10 => drop(finish(&first)),
            stop => stop_at(&first, stop),
        }
        let recipe = with_third_stage(&place, &[KEEP]);
        assert!(finish(&recipe) == expected, "after step {stop}");
        assert!(finish_from(&recipe, 4) == expected, "after step {stop}, from 4");
        // The third stage is part of the run from then on.
        let error = refusal(&first);
        assert!(
            error.contains("stage: was \"adapt, moh, again\", now")
                || error.contains("stage.again.tokens"),
            "{error}"
        );
    }
}

#[test]
fn a_stage_that_has_grown_before_another_was_appended_grows_there_again() {
    let place = TestRun::new();
    finish(&place.recipe(&[KEEP]));
    finish(&place.recipe(&[KEEP, LONGER[1]]));
    let recipe = with_third_stage(&place, &[KEEP, LONGER[1]]);
    let expected = finish(&recipe);
    assert_eq!(expected.metrics.len(), 18);
    for step in [8, 10, 12] {
        assert!(finish_from(&recipe, step) == expected, "from {step}");
    }
}

#[test]
fn a_stage_in_front_of_others_is_refused_with_the_command_of_another_run() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    finish(&recipe);
    let mut other = with_third_stage(&place, &[]);
    other.stages.rotate_right(1);
    let error = refusal(&other);
    let root = recipe.run.dir.display();
    let command = format!(
        "\n  moh-train --recipe recipe.toml --set 'model={{ from = \"{root}@10\" }}' --set run.dir={root}-2"
    );
    assert!(error.ends_with(&command), "{error}");
}

#[test]
fn validation_sets_come_and_go_without_a_change_of_a_weight() {
    let place = TestRun::new();
    let expected = reference();
    write_tokens(&place.path("other"), 3, 30);
    let set = |name: &str, file: &str| ValidationSet {
        name: name.to_owned(),
        path: place.path(file),
        batches: 1,
        every_steps: 2,
    };
    let mut recipe = place.recipe(&[]);
    let first = recipe.data.validation.clone();
    for (stop, sets) in [
        (2, first.clone()),
        (4, vec![set("code", "other"), set("validation", "held-out")]),
        (6, Vec::new()),
        (8, vec![set("code", "held-out")]),
        (0, first),
    ] {
        recipe.data.validation = sets;
        let start = Start { stop_at: stop, ..Start::default() };
        let done = start.run_and_hear(&recipe, |event, _| {
            // Only the text of `code` changes, and a set that was absent before has no earlier losses.
            assert!(!matches!(event, Event::Warning { .. }), "{stop}: {event:?}");
        });
        assert!(matches!(done.unwrap(), Outcome::Stopped { .. } | Outcome::Finished(_)));
    }
    let found = Results::of(&recipe);
    assert!(found.weights == expected.weights);
    for (line, reference) in found.metrics.iter().zip(&expected.metrics) {
        assert_eq!(
            (&line["loss"], &line["grad_norm"]),
            (&reference["loss"], &reference["grad_norm"])
        );
    }
    let sets: Vec<_> = found.metrics.iter().map(|line| line["validation"].to_string()).collect();
    assert!(sets[3].contains("code") && sets[3].contains("validation"), "{sets:?}");
    let summary: serde_json::Value = serde_json::from_str(&found.summary).unwrap();
    let evaluations = summary["evaluations"].as_array().unwrap();
    let of_sets: Vec<_> = evaluations.iter().map(|one| one["set"].as_str().unwrap()).collect();
    // The first stage ended, and the second stage started, without validation sets.
    assert_eq!(of_sets, ["validation", "validation"]);
    assert!(!found.summary.contains("code"));
    let record = fs::read_to_string(run_of(&recipe).inputs()).unwrap();
    assert!(record.contains("data.validation") && !record.contains("code"), "{record}");
}

#[test]
fn a_validation_set_of_another_text_is_accepted_with_a_warning() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 3);
    let held_out = place.path("held-out");
    remove_tokens(&held_out);
    write_tokens(&held_out, 5, 20);
    let warnings = warnings(&recipe);
    assert!(Results::of(&recipe).weights == reference().weights);
    let expected = "data.validation has another text than before, so its losses";
    assert!(warnings.len() == 1 && warnings[0].starts_with(expected), "{warnings:?}");
}
