//! Steps with bad numbers are not applied, and the run continues. An interrupted run ends with the same bits. Too many
//! bad steps in a row end the run.

use crate::support::driver::{
    finish, finish_in_parts, finish_on, refusal, refuses, run_in, run_on, stop_at,
};
use crate::support::faulty::{Fault, SEQUENCES, one_of, test_run};
use crate::support::results::metrics_of;
use crate::support::{TestRun, arranged, run_of};
use moh_checkpoint::run_log::metrics;
use moh_comm::World;
use moh_recipe::Recipe;
use moh_train::{Error, Event, RunOptions};
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;

/// Returns the steps of the whole run that were not applied, with the reasons.
fn skipped(metrics: &[Value]) -> Vec<(usize, &Value)> {
    let lines = metrics.iter().enumerate();
    lines.filter_map(|(at, line)| Some((at + 1, line.get("skipped")?))).collect()
}

#[test]
fn steps_with_nan_are_not_applied_and_the_run_goes_on() {
    let samples = one_of([1, 4, 10]);
    let place = test_run(&samples, Fault::Absent);
    let reference = finish(&place.recipe(&[]));
    for (ranks, layout) in [
        (1, [[1, 1, 1]; 2]),
        (2, [[1, 1, 1]; 2]),
        (2, [[2, 1, 1]; 2]),
        (2, [[1, 2, 1]; 2]),
        (4, [[1, 2, 1], [2, 1, 1]]),
    ] {
        let place = test_run(&samples, Fault::NotFinite);
        let results = finish_on(ranks, &arranged(place.recipe(&[]), layout));
        let reason = json!("gradient norm is not finite");
        let what = format!("{ranks} ranks, {layout:?}");
        assert_eq!(
            skipped(&results.metrics),
            [(1, &reason), (4, &reason), (10, &reason)],
            "{what}"
        );
        assert_eq!(results.metrics.len(), reference.metrics.len());
        for (line, reference) in results.metrics.iter().zip(&reference.metrics) {
            for key in ["stage", "step", "tokens", "learning_rate"] {
                assert_eq!(line[key], reference[key], "{what}");
            }
            assert!(line["loss"].as_f64().unwrap() > 0.0);
        }
        assert_eq!(results.metrics[3]["samples"], json!([24, 31]));
        assert!(results.metrics[3]["grad_norm"].is_null());
        // The first step has not changed the weights.
        assert!(results.metrics[1]["loss"] != reference.metrics[1]["loss"]);
    }
}

#[test]
fn a_stopped_run_with_bad_steps_continues_to_the_same_end() {
    let place = test_run(&one_of([1, 4, 5, 7]), Fault::NotFinite);
    let reference = finish(&place.recipe_in("whole", &[]));
    assert!(finish_in_parts(&place.recipe(&[]), 1..10) == reference);
}

/// Returns the message of a run that two steps in a row up to `step` have ended.
fn diverged(recipe: &Recipe, step: u64, last_good: &str) -> String {
    let root = recipe.run.dir.display();
    format!(
        "{root}: 2 steps in a row up to step {step} were not applied, the last one because its gradient norm is not \
         finite; {last_good}: to skip more, raise guard.patience, which a resumed run may change, or start another \
         run from an earlier checkpoint with a lower learning_rate.max or another run.seed: --set \
         model.from={root}@STEP --set run.dir=DIR"
    )
}

#[test]
fn too_many_bad_steps_in_a_row_end_the_run_until_it_may_skip_more() {
    for (bad, last_good, kept) in [
        // At the start, around the end of a stage, and with a checkpoint between the two steps.
        ([1, 2], "there is no good checkpoint yet", &[][..]),
        ([5, 6], "the last good checkpoint is of step 5", &[2, 4, 5]),
        ([8, 9], "the last good checkpoint is of step 8", &[5, 6, 8]),
    ] {
        let place = test_run(&one_of(bad), Fault::NotFinite);
        let recipe = place.recipe(&["guard.patience=2"]);
        let run = run_of(&recipe);
        // Started again, the run resumes, and ends there again.
        for _ in 0..2 {
            assert_eq!(refusal(&recipe), diverged(&recipe, bad[1], last_good));
            assert_eq!(run.checkpoint_steps().unwrap(), kept);
            let steps = metrics::read(&run.metrics()).unwrap().len() as u64;
            assert_eq!(steps, bad[1]);
        }
        let patient = place.recipe(&["guard.patience=3"]);
        let place = test_run(&one_of(bad), Fault::NotFinite);
        let reference = finish(&place.recipe(&["guard.patience=3"]));
        assert!(finish(&patient) == reference, "{bad:?}");
    }
}

#[test]
fn all_ranks_end_where_too_many_steps_are_bad() {
    let place = test_run(&one_of([8, 9]), Fault::NotFinite);
    let layout = ["guard.patience=2", "stage.moh.parallel.pipeline=2"];
    let recipe = place.recipe(&layout);
    let ended = run_on((2, 0..0), &recipe, &|_, _| {});
    let [Err(error), Err(other)] = &ended[..] else { panic!("{ended:?}") };
    let last_good = "the last good checkpoint is of step 8";
    assert_eq!(error.to_string(), diverged(&recipe, 9, last_good));
    assert!(matches!(other, Error::Step(moh_step::Error::OtherRank { rank: 0 })), "{other}");
}

/// Returns a recipe with one stage of 60 steps.
fn long(place: &TestRun, more: &[&str]) -> Recipe {
    let all = ["stage.adapt.tokens=3840", "guard.factor=3", "data.validation.every_steps=0"];
    let mut recipe = place.recipe(&[&all[..], more].concat());
    recipe.stages.truncate(1);
    recipe
}

#[test]
fn a_spike_is_not_applied_once_there_is_a_median() {
    let spikes = [3, 40, 55].map(|step| step * SEQUENCES);
    let place = test_run(&spikes, Fault::Spike);
    let reference = finish(&long(&place, &[]));
    let reason = json!("gradient norm is above guard.factor times its median");
    assert_eq!(skipped(&reference.metrics), [(41, &reason), (56, &reason)]);
    let place = test_run(&spikes, Fault::Spike);
    assert!(finish_in_parts(&long(&place, &[]), [31, 33, 40, 41, 42, 56]) == reference);
    // Without a factor, only values that are not finite are rejected.
    let place = test_run(&spikes, Fault::Spike);
    assert!(skipped(&finish(&long(&place, &["guard.factor=0"])).metrics).is_empty());
}

#[test]
fn a_resumed_run_refuses_another_factor() {
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 3);
    refuses(&place.recipe(&["guard.factor=4"]), "guard.factor: was 0.0, now 4");
}

#[test]
fn a_loss_that_is_no_number_ends_a_run_without_an_export() {
    // The first update of the second stage makes every later loss NaN.
    let rates = "stage.moh.learning_rate={max = 1e30, min = 1e29, warmup_steps = 0}";
    let ended = |recipe: &Recipe| {
        let error = refusal(recipe);
        let path = run_of(recipe).checkpoint(10);
        let expected = format!("{}: the model has the loss NaN, so it is not", path.display());
        assert!(error.starts_with(&expected), "{error}");
        assert!(!run_of(recipe).export().exists() && !run_of(recipe).summary().exists());
        metrics_of(&recipe.run.dir)
    };
    let place = TestRun::new();
    let recipe = place.recipe(&[rates]);
    let (mut warnings, silent) = (Vec::new(), AtomicBool::new(false));
    let done = run_in(&World::single(), &recipe, RunOptions::new(&silent), &mut |event| {
        if let Event::Warning { text } = event {
            warnings.push(text.to_owned());
        }
    });
    assert!(done.is_err());
    let expected =
        "the loss on validation set \"validation\" after step 6 is NaN, and is recorded as null";
    assert!(warnings.iter().any(|text| text == expected), "{warnings:?}");
    let reference = ended(&recipe);
    let reason = json!("loss is not finite");
    assert_eq!(skipped(&reference), [7, 8, 9, 10].map(|step| (step, &reason)));
    assert!(reference[5]["validation_loss"].is_null());
    assert!(reference[9]["validation_loss"].is_null());
    let place = TestRun::new();
    let recipe = place.recipe(&[rates]);
    for step in [6, 8, 9] {
        stop_at(&recipe, step);
    }
    assert!(ended(&recipe) == reference);
}

#[test]
fn weights_that_are_no_numbers_are_in_no_checkpoint() {
    // The last step makes the weights infinite.
    let rates = "stage.moh.learning_rate={max = 1e39, min = 1e-3, warmup_steps = 5}";
    for more in ["checkpoint.every_steps=1", "checkpoint.every_steps=5"] {
        let place = TestRun::new();
        let recipe = place.recipe(&[rates, more]);
        refuses(&recipe, " has values that are not finite; the last good");
        let kept = run_of(&recipe).checkpoint_steps().unwrap();
        assert_eq!((kept.last(), run_of(&recipe).export().exists()), (Some(&5), false), "{more}");
    }
}
