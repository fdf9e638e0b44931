//! A run that starts from a checkpoint of another run: from its weights, exactly, and on request from its moments.

use std::fs;

use crate::support::driver::{finish, finish_in_parts, refusal, refuses, run, stop_at};
use crate::support::{TestRun, files, run_of};
use moh_checkpoint::{RunDirectory, StoredCheckpoint};
use moh_hf::ConfigFile;
use moh_model::HeadCounts;
use moh_recipe::Recipe;
use moh_step::TensorKind;
use moh_testkit::programs::flip;
use moh_train::Outcome;

const EMBEDDING: &str = "model.embed_tokens.weight";

/// Returns a recipe that starts from `from`, in the directory `next`, with these overrides.
fn next(place: &TestRun, from: &str, overrides: &[&str]) -> Recipe {
    let from = format!("{}{from}", place.path("run").display());
    place.recipe_from(from, "next", &[&["checkpoint.keep=9"], overrides].concat())
}

fn with_moments(mut recipe: Recipe) -> Recipe {
    recipe.model.moments = true;
    recipe
}

fn values(run: &RunDirectory, step: u64, kind: TensorKind, name: &str, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    StoredCheckpoint::of_step(run, step).unwrap().read_f32(kind, name, &mut values).unwrap();
    values
}

/// Rates of zero: a step leaves the weights as they are.
const STILL: [&str; 6] = [
    "stage.adapt.learning_rate.max=1e-30",
    "stage.adapt.learning_rate.min=0",
    "stage.adapt.optimizer.weight_decay=0",
    "stage.moh.learning_rate.max=1e-30",
    "stage.moh.learning_rate.min=0",
    "stage.moh.optimizer.weight_decay=0",
];

#[test]
fn a_run_starts_from_the_exact_weights_of_another() {
    for dtype in ["f32", "bf16"] {
        let place = TestRun::new();
        let dtype = format!("run.dtype={dtype}");
        stop_at(&place.recipe(&["checkpoint.keep=9", &dtype]), 6);
        let run = RunDirectory::new(place.path("run"));
        let moved = run.root().with_file_name("moved");
        for (from, step) in [("@4", 4), ("", 6)] {
            let recipe = next(&place, from, &[&STILL[..], &[&dtype]].concat());
            stop_at(&recipe, 1);
            let own = run_of(&recipe);
            let weights = |run: &RunDirectory, step| {
                values(run, step, TensorKind::Weight, EMBEDDING, 64 * 16)
            };
            assert!(weights(&own, 1) == weights(&run, step), "{dtype} {from}");
            let stored = Recipe::load(&own.recipe(), &[]).unwrap().model.from.unwrap();
            assert_eq!(stored, format!("{}@{step}", run.root().display()));
            // The other run continues or disappears: this run resumes as it started.
            fs::rename(run.root(), &moved).unwrap();
            assert!(own.keeps_model(&Recipe::load(&own.recipe(), &[]).unwrap()).unwrap());
            stop_at(&recipe, 2);
            fs::rename(&moved, run.root()).unwrap();
            fs::remove_dir_all(own.root()).unwrap();
        }
    }
}

#[test]
fn moments_are_taken_over_with_the_steps_that_they_contain() {
    let place = TestRun::new();
    let rate = ["stage.adapt.learning_rate.max=1e-2", "stage.adapt.learning_rate.min=1e-2"];
    let whole = place.recipe(&[&rate[..], &["checkpoint.keep=9"]].concat());
    stop_at(&whole, 4);
    let run = run_of(&whole);
    let moments = |recipe: &Recipe| {
        stop_at(recipe, 1);
        let own = run_of(recipe);
        let steps = own.stored(1).unwrap().manifest().state.moment_steps;
        let found = values(&own, 1, TensorKind::FirstMoment, EMBEDDING, 64 * 16);
        fs::remove_dir_all(own.root()).unwrap();
        (steps, found)
    };
    let (steps, with) = moments(&with_moments(next(&place, "@4", &rate)));
    assert_eq!(steps, 5);
    let (steps, without) = moments(&next(&place, "@4", &rate));
    assert_eq!(steps, 1);
    // m = 0.9 m + 0.1 g: the same gradient, and the other run's moment.
    let before = values(&run, 4, TensorKind::FirstMoment, EMBEDDING, 64 * 16);
    assert!(before.iter().any(|&m| m != 0.0));
    for ((with, without), before) in with.iter().zip(&without).zip(&before) {
        assert!((with - (without + 0.9 * before)).abs() < 1e-6, "{with} {without} {before}");
    }
}

#[test]
fn the_first_stage_keeps_the_attention_of_the_step_unless_it_has_another() {
    let place = TestRun::new();
    stop_at(&place.recipe(&["checkpoint.keep=9"]), 8);
    // The run's heads are the default of a stage that names no heads.
    for (from, shared) in [("@8", 1), ("@4", 2)] {
        let mut recipe = next(&place, from, &[]);
        recipe.stages.remove(0);
        recipe.stages[0].moh = Some(moh_recipe::MohOptions::default());
        stop_at(&recipe, 1);
        let own = run_of(&recipe);
        let stored = Recipe::load(&own.recipe(), &[]).unwrap();
        let heads = stored.stages[0].moh.clone().unwrap().shared_heads;
        assert_eq!(heads, Some(HeadCounts::All(shared)), "{from}");
        fs::remove_dir_all(own.root()).unwrap();
    }
}

#[test]
fn a_run_from_a_run_continues_exactly_and_its_vocabulary_grows() {
    let place = TestRun::new();
    finish(&place.recipe(&[]));
    let mut recipe = with_moments(next(&place, "", &[]));
    recipe.model.pad_vocab_to = Some(48);
    let mut whole = recipe.clone();
    whole.run.dir = place.path("whole");
    let expected = finish(&whole);
    stop_at(&recipe, 1);
    // Tokens beyond the data's 64 have rows, which start with zero moments and get no gradient.
    let own = run_of(&recipe);
    let moments = values(&own, 1, TensorKind::FirstMoment, EMBEDDING, 96 * 16);
    assert!(moments[..64 * 16].iter().any(|&m| m != 0.0));
    assert!(moments[64 * 16..].iter().all(|&m| m == 0.0));
    assert!(finish_in_parts(&recipe, [4, 5, 7]) == expected);
    assert_eq!(ConfigFile::read(&own.export()).unwrap().config.vocab_size, 96);
    assert!(matches!(run(&recipe).unwrap(), Outcome::AlreadyFinished(_)));
}

#[test]
fn what_is_no_origin_is_refused_and_leaves_no_run() {
    let place = TestRun::new();
    finish(&place.recipe(&[]));
    let run = RunDirectory::new(place.path("run"));
    let before = files(place.dir.path());
    let mut with_revision = next(&place, "@8", &[]);
    with_revision.model.revision = Some("main".to_owned());
    for (recipe, expected) in [
        (next(&place, "@7", &[]), "no checkpoint of step 7: name one of 8, 10"),
        (
            with_moments(next(&place, "/export", &[])),
            "model.moments: only a run has moments: set model.from to RUN or RUN@STEP",
        ),
        (with_revision, "model.revision: only hub ids have revisions, and model.from is a run"),
    ] {
        let error = refusal(&recipe);
        assert!(error.ends_with(expected), "{error}");
        assert!(files(place.dir.path()) == before, "{error}");
    }
    let mut own = next(&place, "@8", &[]);
    own.run.dir = run.root().to_owned();
    refuses(&own, "is the run directory of this recipe");
}

#[test]
fn damage_of_a_finished_runs_last_checkpoint_is_not_passed_over() {
    let place = TestRun::new();
    finish(&place.recipe(&[]));
    let run = RunDirectory::new(place.path("run"));
    flip(&run.checkpoint(10).join("weights.safetensors"), |length| length / 2);
    let before = files(place.dir.path());
    for from in ["", "@10"] {
        refuses(&next(&place, from, &[]), "does not match its hash");
    }
    // If the run has not finished, the checkpoint before the damaged one is used.
    fs::remove_file(run.summary()).unwrap();
    stop_at(&next(&place, "", &[]), 1);
    let stored = Recipe::load(&place.path("next/recipe.toml"), &[]).unwrap();
    assert!(stored.model.from.unwrap().ends_with("run@8"));
    let changed = |path: &std::path::Path| !path.starts_with(place.path("next"));
    let after: Vec<_> = files(place.dir.path()).into_keys().filter(|path| changed(path)).collect();
    assert_eq!(after.len() + 1, before.len());
}
