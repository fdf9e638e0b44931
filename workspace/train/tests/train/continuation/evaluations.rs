//! Runs that are stopped in an evaluation, between its batches, or in the export at the end.

use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use moh_recipe::Recipe;
use moh_train::{Event, Outcome};

use super::{STEPS, killed_at, remains};
use crate::support::driver::{finish, reference, stop_at, stop_when, watch};
use crate::support::{TestRun, run_of};

/// Runs a recipe, and asks it to stop before its `batch`-th batch of all evaluations, or before the first batch of its
/// `evaluation`-th evaluation.
fn stop_in(recipe: &Recipe, batch: Option<usize>, evaluation: Option<usize>) -> Outcome {
    let (mut batches, mut evaluations) = (0, 0);
    let mut is_asked = false;
    watch(recipe, |event, stop| match event {
        Event::Evaluating { done, .. } => {
            assert!(!is_asked, "a batch is evaluated after the stop");
            is_asked = Some(batches) == batch || (*done == 0 && Some(evaluations) == evaluation);
            stop.store(is_asked, Ordering::Relaxed);
            batches += 1;
            evaluations += usize::from(*done == 0);
        }
        Event::Step { .. } | Event::Evaluated { .. } => assert!(!is_asked, "{event:?}"),
        _ => {}
    })
    .unwrap()
}

/// Returns the tokens' use of the heads, as the run without an interruption records it.
fn routing() -> &'static str {
    static ROUTING: OnceLock<String> = OnceLock::new();
    ROUTING.get_or_init(|| {
        let place = TestRun::new();
        let recipe = place.recipe(&[]);
        finish(&recipe);
        routing_of(&recipe)
    })
}

fn routing_of(recipe: &Recipe) -> String {
    fs::read_to_string(run_of(recipe).routing()).unwrap()
}

/// Two batches each: as loaded, after the steps 3, 5, 6, 9 and 10, and after the conversion.
const BATCHES: usize = 14;

#[test]
fn a_run_that_is_stopped_between_any_batches_of_an_evaluation_ends_the_same() {
    for batch in 0..BATCHES {
        let place = TestRun::new();
        let recipe = place.recipe(&[]);
        let step = [0, 3, 5, 5, 6, 9, 10][batch / 2];
        let expected = match step {
            0 => Outcome::StoppedBeforeTraining,
            step => Outcome::Stopped { step },
        };
        assert_eq!(stop_in(&recipe, Some(batch), None), expected, "batch {batch}");
        let steps = run_of(&recipe).checkpoint_steps().unwrap();
        assert_eq!(steps.last(), Some(&step).filter(|&&step| step > 0));
        assert!(finish(&recipe) == *reference(), "stopped before batch {batch}");
        assert!(routing_of(&recipe) == routing(), "stopped before batch {batch}");
    }
    let place = TestRun::new();
    let whole = stop_in(&place.recipe(&[]), Some(BATCHES), None);
    assert!(matches!(whole, Outcome::Finished(_)));
}

#[test]
fn a_run_that_is_stopped_in_every_evaluation_ends_the_same() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    // Each start repeats the evaluation in which the start before was stopped, and is stopped in the next evaluation.
    assert_eq!(stop_in(&recipe, None, Some(0)), Outcome::StoppedBeforeTraining);
    // The checkpoint of step 5 lacks its evaluation until the next checkpoint.
    for (evaluation, step) in [(1, 3), (1, 5), (1, 5), (2, 6), (1, 9), (1, 10)] {
        assert_eq!(stop_in(&recipe, None, Some(evaluation)), Outcome::Stopped { step });
        // Again in the same evaluation: the state stays.
        assert_eq!(stop_in(&recipe, None, Some(0)), Outcome::Stopped { step });
    }
    assert!(finish(&recipe) == *reference());
    assert!(routing_of(&recipe) == routing());
}

#[test]
fn a_run_that_is_killed_after_a_stop_in_an_evaluation_ends_the_same() {
    let place = TestRun::new();
    let copy = place.recipe_in("copy", &[]);
    let recipe = place.recipe(&[]);
    // After the evaluation of step 9 that the checkpoint lacks, before any later checkpoint.
    assert_eq!(stop_in(&recipe, Some(10), None), Outcome::Stopped { step: 9 });
    killed_at(&recipe, &[(9, &copy.run.dir)]);
    assert_eq!(fs::read_to_string(run_of(&copy).metrics()).unwrap().lines().count(), 9);
    assert!(finish(&copy) == *reference());
    assert!(routing_of(&copy) == routing());
}

#[test]
fn a_run_that_is_stopped_at_its_export_is_finished_by_the_same_command() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let is_unfinished = || {
        let run = run_of(&recipe);
        assert!(!run.export().exists() && !run.summary().exists());
        assert!(remains(&recipe).is_empty(), "{:?}", remains(&recipe));
    };
    stop_at(&recipe, STEPS);
    is_unfinished();
    let again = stop_when(&recipe, |event| matches!(event, Event::Resumed { .. }));
    assert_eq!(again, Outcome::Stopped { step: STEPS });
    is_unfinished();
    assert!(finish(&recipe) == *reference());
}
