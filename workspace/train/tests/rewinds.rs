//! Steps that are not applied, many in a row, return a run to an earlier step and pass over samples. Killed
//! at any moment, stopped at any step, it ends with the same bits, on every layout of ranks.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod support;

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;

use moh_recipe::Recipe;
use moh_run_directory::{Rewind, Rewinds, RunDirectory};
use moh_run_log::metrics;
use moh_train::{Error, Event, Outcome};
use support::faulty::{Fault, finish, finish_on, one_of, run_on, stop_at, test_run};
use support::results::{Results, assert_alike};
use support::{TestRun, copy_all, copy_running};

/// A run that returns to an earlier step: the changes of its recipe, the samples whose gradients are not finite, and
/// the returns that follow: step, samples, and whether to the initial model.
type Case = (&'static [&'static str], Vec<u64>, &'static [(u64, [u64; 2], bool)]);

fn cases() -> Vec<Case> {
    let twice = one_of([8, 9, 11, 12]).to_vec();
    vec![
        // Steps 8 and 9 of the second stage.
        (&["guard.patience=2", "guard.rewind=2"], one_of([8, 9]).to_vec(), &[(6, [48, 71], false)]),
        // The same steps again, with the samples of the steps 11 and 12: further back, in the first stage.
        (
            &["guard.patience=2", "guard.rewind=2", "checkpoint.keep=4"],
            twice,
            &[(6, [48, 71], false), (4, [32, 95], false)],
        ),
        // Back to a step that no checkpoint has, from the one before it.
        (
            &["guard.patience=2", "guard.rewind=1", "checkpoint.keep=4"],
            one_of([4, 5]).to_vec(),
            &[(3, [24, 39], false)],
        ),
        // The first steps: from the initial model, without a checkpoint and with one.
        (&["guard.patience=1"], one_of([1]).to_vec(), &[(0, [0, 7], true)]),
        (&["guard.patience=3"], one_of([2, 3, 4]).to_vec(), &[(0, [0, 31], true)]),
        // Two places, one after the other.
        (
            &["guard.patience=1", "guard.rewind=1"],
            one_of([3, 9]).to_vec(),
            &[(2, [16, 23], false), (7, [64, 71], false)],
        ),
    ]
}

fn rewinds(recipe: &Recipe) -> Vec<Rewind> {
    let text = fs::read_to_string(RunDirectory::new(&recipe.run.dir).rewinds()).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The recipe in the run directory `name`.
fn recipe_in(place: &TestRun, changes: &[&str], name: &str) -> Recipe {
    let mut recipe = place.recipe(changes);
    recipe.run.dir = place.dir.path().join(name);
    recipe
}

/// Runs a recipe to its end, and copies its directory at every event: what a process that was killed there
/// leaves. Returns the results and the copies, each with its event.
fn run_with_copies(
    (ranks, place): (usize, &TestRun),
    recipe: &Recipe,
) -> (Results, Vec<(PathBuf, String)>) {
    let copies = Mutex::new(Vec::new());
    let hear = |event: &Event<'_>| {
        // Nothing is written while the model is evaluated.
        if matches!(event, Event::Evaluating { .. }) {
            return;
        }
        let mut copies = copies.lock().unwrap();
        let copy = place.dir.path().join(format!("copy-{}", copies.len()));
        if recipe.run.dir.exists() {
            copy_running(&recipe.run.dir, &copy);
        }
        copies.push((copy, format!("{event:?}")));
    };
    for outcome in run_on(ranks, recipe, None, &hear) {
        assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
    }
    (Results::of(recipe), copies.into_inner().unwrap())
}

#[test]
fn a_run_returns_to_an_earlier_step_and_passes_over_samples() {
    for (changes, samples, expected) in cases() {
        let place = test_run(&samples, Fault::NotFinite);
        let recipe = place.recipe(changes);
        let reference = finish(&recipe);
        let found: Vec<_> = (rewinds(&recipe).iter())
            .map(|rewind| (rewind.step, rewind.samples, rewind.initial))
            .collect();
        assert_eq!(found, expected, "{changes:?}");
        assert_eq!(reference.metrics.len(), 10);
        assert!(reference.metrics.iter().all(|line| line.get("skipped").is_none()), "{changes:?}");
        let run = RunDirectory::new(&recipe.run.dir);
        for rewind in rewinds(&recipe) {
            let left = metrics::read(&run.metrics_before_rewind(rewind.number)).unwrap();
            assert_eq!(left.len() as u64, rewind.skipped_steps[1] - rewind.step);
            assert!(left.last().unwrap().skipped.is_some());
        }
        // Up to the step, the run is one without faults.
        let place = test_run(&samples, Fault::Absent);
        let without = finish(&place.recipe(changes));
        let last = expected.last().unwrap().0.min(expected[0].0) as usize;
        assert_eq!(reference.metrics[..last], without.metrics[..last]);
        assert!(reference.metrics[last] != without.metrics[last], "{changes:?}: other samples");
    }
}

#[test]
fn a_stage_with_its_own_data_passes_over_samples_as_one_with_the_runs() {
    for (changes, samples, _) in cases() {
        let place = test_run(&samples, Fault::NotFinite);
        let expected = finish(&recipe_in(&place, changes, "run"));
        // Another mixture, whose windows are those of the run's because there is one file.
        let path = place.dir.path().join("text");
        let own = format!("stage.moh.data.sources=[{{path=\"{}\",weight=2}}]", path.display());
        let recipe = recipe_in(&place, &[changes, &[&own]].concat(), "own");
        assert!(finish(&recipe) == expected, "{changes:?}");
        assert!(!rewinds(&recipe).is_empty());
    }
}

#[test]
fn a_run_that_is_killed_at_any_moment_of_a_rewind_ends_the_same() {
    for (changes, samples, _) in cases() {
        let place = test_run(&samples, Fault::NotFinite);
        let recipe = place.recipe(changes);
        let (reference, copies) = run_with_copies((1, &place), &recipe);
        let expected = rewinds(&recipe);
        for (copy, event) in copies {
            let killed = recipe_in(&place, changes, copy.to_str().unwrap());
            assert!(finish(&killed) == reference, "{changes:?}, killed at {event}");
            assert_eq!(rewinds(&killed), expected, "{changes:?}, killed at {event}");
            let _ = fs::remove_dir_all(copy);
        }
    }
}

#[test]
fn a_run_that_is_stopped_at_every_step_of_a_rewind_ends_the_same() {
    for (changes, samples, _) in cases() {
        let place = test_run(&samples, Fault::NotFinite);
        let recipe = place.recipe(changes);
        let reference = finish(&recipe);
        let stopped = recipe_in(&place, changes, "stopped");
        let mut steps = (1..10).chain(8..10);
        let finished = steps.any(|step| !stop_at(&stopped, step));
        let found = if finished { Results::of(&stopped) } else { finish(&stopped) };
        assert!(found == reference, "{changes:?}");
    }
}

#[test]
fn a_rewind_that_is_half_done_is_completed() {
    let (changes, samples, _) = cases().swap_remove(1);
    let place = test_run(&samples, Fault::NotFinite);
    let (reference, copies) = run_with_copies((1, &place), &place.recipe(changes));
    let (copy, _) = copies.iter().find(|(_, event)| event.contains("Rewound")).unwrap();
    let changed = |name: &str, change: &dyn Fn(&RunDirectory)| {
        let recipe = recipe_in(&place, changes, name);
        copy_all(copy, &recipe.run.dir);
        let run = RunDirectory::new(&recipe.run.dir);
        assert_eq!(run.checkpoint_steps().unwrap(), [2, 4, 5, 6, 8]);
        change(&run);
        assert!(finish(&recipe) == reference, "{name}");
        let left = fs::read_dir(run.checkpoints()).unwrap();
        let mut names = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert!(!names.any(|name| name.starts_with("rewound-")), "{name}: removed in the end");
    };
    changed("renamed", &|run| {
        let aside = run.checkpoints().join("rewound-step-8");
        fs::rename(run.checkpoint(8), aside).unwrap();
    });
    // The samples are passed over after step 6, from whichever checkpoint the run starts.
    for damaged in [&[6][..], &[5, 6], &[4, 5, 6]] {
        changed(&format!("damaged {damaged:?}"), &|run| {
            for &step in damaged {
                fs::write(run.checkpoint(step).join("weights.safetensors"), "?").unwrap();
            }
        });
    }
    // The record is lost: a newer checkpoint knows what it has passed over.
    let recipe = recipe_in(&place, changes, "lost");
    let (late, _) = copies.iter().rev().find(|(_, event)| event.contains("step-8")).unwrap();
    copy_all(late, &recipe.run.dir);
    fs::remove_file(RunDirectory::new(&recipe.run.dir).rewinds()).unwrap();
    assert!(finish(&recipe) == reference);
}

#[test]
fn a_run_that_began_again_is_not_taken_for_one_that_lost_its_checkpoints() {
    let (changes, samples, _) = cases().swap_remove(4);
    let place = test_run(&samples, Fault::NotFinite);
    let recipe = place.recipe(changes);
    let (reference, copies) = run_with_copies((1, &place), &recipe);
    let at = copies.iter().position(|(_, event)| event.contains("Rewound")).unwrap();
    // The first event after the restart.
    let run = RunDirectory::new(&copies[at + 1].0);
    assert!(run.checkpoint_steps().unwrap().is_empty() && !run.marker().exists());
    let another =
        recipe_in(&place, &[changes, &["run.seed=7"]].concat(), run.root().to_str().unwrap());
    let error = run_on(1, &another, None, &|_| {}).pop().unwrap().unwrap_err();
    assert!(
        matches!(error, Error::RunDirectory(moh_run_directory::Error::RecipeChanged { .. })),
        "{error}"
    );
    let killed = recipe_in(&place, changes, run.root().to_str().unwrap());
    assert!(finish(&killed) == reference);
    // Checkpoints that are lost later are missed.
    let run = RunDirectory::new(&recipe.run.dir);
    fs::remove_file(run.summary()).unwrap();
    fs::remove_dir_all(run.checkpoints()).unwrap();
    let error = run_on(1, &recipe, None, &|_| {}).pop().unwrap().unwrap_err();
    assert!(matches!(error, Error::NoneLeft { .. }), "{error}");
}

#[test]
fn every_layout_of_ranks_returns_and_ends_the_same() {
    let (base, samples, expected) = cases().swap_remove(1);
    let place = test_run(&samples, Fault::NotFinite);
    let reference = finish(&place.recipe(base));
    for (ranks, layout) in [
        (2, &[][..]),
        (2, &["stage.adapt.parallel.tensor=2", "stage.moh.parallel.tensor=2"]),
        (2, &["stage.adapt.parallel.pipeline=2", "stage.moh.parallel.pipeline=2"]),
        (4, &["stage.adapt.parallel.pipeline=2", "stage.moh.parallel.tensor=2"]),
    ] {
        let place = test_run(&samples, Fault::NotFinite);
        let changes = [base, layout].concat();
        let recipe = place.recipe(&changes);
        let (results, copies) = run_with_copies((ranks, &place), &recipe);
        assert_alike(&results, &reference, &format!("{layout:?}"));
        assert_eq!(rewinds(&recipe).len(), expected.len());
        let first = copies.iter().position(|(_, event)| event.contains("Rewound")).unwrap();
        // Around the first return: bit for bit on the same layout, alike on one rank.
        for (copy, event) in &copies[first - 2..first + 5] {
            let other = recipe_in(&place, base, &format!("{}-other", copy.display()));
            copy_all(copy, &other.run.dir);
            let killed = recipe_in(&place, &changes, copy.to_str().unwrap());
            assert!(finish_on(ranks, &killed) == results, "{layout:?}, killed at {event}");
            assert_alike(&finish(&other), &reference, "another layout");
        }
    }
}

#[test]
fn a_run_that_has_nothing_to_return_to_says_what_to_do_and_does_it() {
    let samples = one_of([8, 9]);
    let place = test_run(&samples, Fault::NotFinite);
    let changes = ["guard.patience=2", "guard.rewind=4"];
    let recipe = place.recipe(&changes);
    for _ in 0..2 {
        let error = run_on(1, &recipe, None, &|_| {}).pop().unwrap().unwrap_err();
        assert!(matches!(error, Error::NothingToReturnTo { first: 8, last: 9, step: 4, .. }));
        assert!(error.to_string().contains("lower guard.rewind"), "{error}");
        assert!(rewinds(&recipe).is_empty());
    }
    let nearer = place.recipe(&["guard.patience=2", "guard.rewind=2"]);
    let found = finish(&nearer);
    assert_eq!(rewinds(&nearer)[0].step, 6);
    let place = test_run(&samples, Fault::NotFinite);
    assert!(finish(&place.recipe(&["guard.patience=2", "guard.rewind=2"])) == found);
}

#[test]
fn a_run_that_no_samples_help_ends_and_keeps_its_record() {
    // The first update of the second stage makes every later loss NaN.
    let rates = "stage.moh.learning_rate={max = 1e30, min = 1e29, warmup_steps = 0}";
    let place = TestRun::new();
    let recipe = place.recipe(&[rates, "guard.patience=2", "guard.rewind=1", "checkpoint.keep=9"]);
    for outcome in run_on(2, &recipe, None, &|_| {}) {
        let error = outcome.unwrap_err();
        let is_told = matches!(
            error,
            Error::RunDirectory(moh_run_directory::Error::RewoundTooOften {
                first: 7,
                last: 8,
                ..
            })
        );
        assert!(
            is_told || matches!(error, Error::Step(moh_step::Error::OtherRank { rank: 0 })),
            "{error}"
        );
    }
    let steps: Vec<u64> = rewinds(&recipe).iter().map(|rewind| rewind.step).collect();
    assert_eq!(steps, [6, 5, 4]);
    let error = run_on(1, &recipe, None, &|_| {}).pop().unwrap().unwrap_err();
    assert!(error.to_string().contains("lower learning_rate.max"), "{error}");
}

#[test]
fn samples_that_were_passed_over_count_as_drawn() {
    let (changes, samples, _) = cases().swap_remove(0);
    let place = test_run(&samples, Fault::NotFinite);
    let drawn = Mutex::new(Vec::new());
    let hear = |event: &Event<'_>| {
        if let Event::Sources(sources) = event {
            drawn.lock().unwrap().push(sources[0].tokens_drawn);
        }
    };
    let recipe = place.recipe(changes);
    // Stopped after the return, in the step after it.
    run_on(1, &recipe, Some(9), &hear).pop().unwrap().unwrap();
    assert_eq!(Rewinds::read(&RunDirectory::new(&recipe.run.dir)).unwrap().num_samples(), 24);
    run_on(1, &recipe, None, &hear).pop().unwrap().unwrap();
    assert_eq!(drawn.into_inner().unwrap(), [80 * 8, (80 + 24) * 8]);
}
