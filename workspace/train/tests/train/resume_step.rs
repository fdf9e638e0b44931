//! A run that goes on otherwise than from its newest checkpoint with its first recipe: from an earlier
//! one, with longer and with further stages, and with other validation sets.

use std::fs;
use std::path::Path;

use crate::support::driver::{Start, finish, stop_at};
use crate::support::results::Results;
use crate::support::{TestRun, files, write_tokens};
use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::metrics;
use moh_checkpoint::{Condition, ListedCheckpoint};
use moh_recipe::{Recipe, ValidationSet};
use moh_train::{Error, Event, Outcome};

/// Runs a recipe from the checkpoint of `step` to its end.
fn train_from(recipe: &Recipe, step: u64) -> Result<Outcome, Error> {
    Start { resume_step: Some(step), ..Start::default() }.run(recipe)
}

/// The results of the recipe's uninterrupted run.
fn reference() -> Results {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    finish(&recipe);
    Results::of(&recipe)
}

fn shorten(path: &Path) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() - 7]).unwrap();
}

#[test]
fn a_run_resumes_from_an_earlier_checkpoint_to_the_same_end() {
    let place = TestRun::new();
    let recipe = place.recipe(&["checkpoint.keep=9"]);
    finish(&recipe);
    let run = RunDirectory::new(&recipe.run.dir);
    let last = files(&run.checkpoint(10));
    for (step, moved) in [
        (8, &["aside-step-10"][..]),
        (5, &["aside-step-10-2", "aside-step-8", "aside-step-6"]),
        (5, &["aside-step-10-3", "aside-step-8-2", "aside-step-6-2"]),
    ] {
        let mut heard = Vec::new();
        let back = Start { resume_step: Some(step), ..Start::default() };
        let done = back.run_and_hear(&recipe, &mut |event| {
            if let Event::LaterCheckpoint { path } = event {
                assert!(!run.summary().exists(), "the run is unfinished");
                heard.push(path.file_name().unwrap().to_str().unwrap().to_owned());
            }
        });
        assert!(matches!(done.unwrap(), Outcome::Finished(_)));
        assert_eq!(heard, moved);
        assert!(Results::of(&recipe) == reference(), "from {step}");
    }
    let listed = moh_checkpoint::list(&run.checkpoint_directory()).unwrap();
    let aside = |one: &&ListedCheckpoint| one.condition == Condition::MovedAside;
    assert_eq!(listed.iter().filter(aside).count(), 1 + 3 + 3);
    assert!(listed.iter().all(|one| one.state.as_ref().is_ok_and(|state| state.step == one.step)));
    // Given its name back, one is a checkpoint again.
    fs::remove_dir_all(run.checkpoint(10)).unwrap();
    fs::rename(run.checkpoints().join("aside-step-10"), run.checkpoint(10)).unwrap();
    assert!(files(&run.checkpoint(10)) == last);
    assert!(matches!(Start::default().run(&recipe).unwrap(), Outcome::AlreadyFinished(_)));
}

#[test]
fn a_run_that_is_interrupted_after_going_back_goes_on_from_there() {
    let place = TestRun::new();
    let recipe = place.recipe_in("copy");
    let killed = Start { copy_at: Some((9, &recipe.run.dir)), ..Start::default() };
    killed.run(&place.recipe(&[])).unwrap();
    let resumed = Start { resume_step: Some(6), stop_at: 7, ..Start::default() };
    assert_eq!(resumed.run(&recipe).unwrap(), Outcome::Stopped { step: 7 });
    assert_eq!(RunDirectory::new(&recipe.run.dir).checkpoint_steps().unwrap(), [6, 7]);
    finish(&recipe);
    assert!(Results::of(&recipe) == reference());
}

#[test]
fn a_step_without_a_good_checkpoint_is_refused_and_nothing_moves() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    finish(&recipe);
    let run = RunDirectory::new(&recipe.run.dir);
    shorten(&run.checkpoint(8).join("weights.safetensors"));
    let before = files(run.root());
    let error = train_from(&recipe, 7).unwrap_err();
    assert!(error.to_string().ends_with("no checkpoint of step 7: name one of 8, 10"), "{error}");
    let error = train_from(&recipe, 8).unwrap_err();
    assert!(matches!(error, Error::Checkpoint(moh_checkpoint::Error::File(_))), "{error}");
    assert!(files(run.root()) == before);
}

/// Batches of 64 tokens: eight steps of a stage instead of five.
const LONGER: [&str; 2] = ["stage.adapt.tokens=512", "stage.moh.tokens=512"];

/// The learning rates of a run's steps.
fn learning_rates(recipe: &Recipe) -> Vec<f64> {
    let lines = metrics::read(&RunDirectory::new(&recipe.run.dir).metrics()).unwrap();
    lines.into_iter().map(|line| line.learning_rate).collect()
}

/// Of a run that is stopped at `step` and goes on with a longer stage to its end.
fn grown_at(step: u64, longer: &str) -> Results {
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), step);
    let recipe = place.recipe(&[longer]);
    finish(&recipe);
    Results::of(&recipe)
}

#[test]
fn a_longer_stage_has_the_new_schedule_from_the_step_on_at_which_it_grew() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let (short, long) = (recipe.stages[0].schedule(), place.recipe(&LONGER).stages[0].schedule());
    stop_at(&recipe, 3);
    let recipe = place.recipe(&LONGER[..1]);
    let mut heard = Vec::new();
    let done = Start::default().run_and_hear(&recipe, &mut |event| {
        if let Event::StageExtended { extension } = event {
            heard.push((extension.step, extension.before, extension.tokens));
        }
    });
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
    assert_eq!(heard, [(3, 320, 512)]);
    let rates = learning_rates(&recipe);
    assert_eq!(rates.len(), 13);
    for step in 1..=8 {
        let schedule = if step <= 3 { short } else { long };
        assert_eq!(rates[step as usize - 1], schedule.learning_rate(step), "step {step}");
    }
    let done = Start::default().run(&recipe).unwrap();
    assert!(matches!(done, Outcome::AlreadyFinished(_)), "{done:?}");
}

#[test]
fn a_grown_run_ends_the_same_however_it_is_interrupted() {
    let expected = grown_at(3, LONGER[0]);
    // Stopped at every step after it.
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 3);
    let recipe = place.recipe(&LONGER[..1]);
    for step in 4..13 {
        stop_at(&recipe, step);
    }
    finish(&recipe);
    assert!(Results::of(&recipe) == expected);
    // Killed between two checkpoints after it, and again with the newest checkpoint damaged: the one
    // before it is from before the growth.
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 3);
    let copy = place.dir.path().join("copy");
    let killed = Start { copy_at: Some((4, &copy)), ..Start::default() };
    killed.run(&place.recipe(&LONGER[..1])).unwrap();
    let mut recipe = place.recipe(&LONGER[..1]);
    recipe.run.dir = copy;
    let run = RunDirectory::new(&recipe.run.dir);
    assert_eq!(run.checkpoint_steps().unwrap(), [2, 3]);
    shorten(&run.checkpoint(3).join("manifest.json"));
    let mut heard = Vec::new();
    let done = Start { stop_at: 5, ..Start::default() }.run_and_hear(&recipe, &mut |event| {
        if let Event::Resumed { step } = event {
            heard.push(*step);
        }
    });
    assert_eq!((done.unwrap(), heard), (Outcome::Stopped { step: 5 }, vec![2]));
    // The checkpoints alone are enough.
    fs::remove_file(run.root().join("growth.jsonl")).unwrap();
    finish(&recipe);
    assert!(Results::of(&recipe) == expected);
    assert!(run.root().join("growth.jsonl").is_file());
}

#[test]
fn a_stage_that_has_not_begun_grows() {
    let expected = grown_at(3, LONGER[1]);
    assert_eq!(expected.metrics.len(), 13);
    // Its schedule has the new length from its first step on.
    let place = TestRun::new();
    let recipe = place.recipe(&LONGER[1..]);
    finish(&recipe);
    assert!(Results::of(&recipe) == expected);
}

#[test]
fn a_finished_run_goes_on_with_a_longer_last_stage() {
    let place = TestRun::new();
    let short = place.recipe(&["checkpoint.keep=9"]);
    finish(&short);
    let recipe = place.recipe(&["checkpoint.keep=9", LONGER[1]]);
    finish(&recipe);
    let expected = Results::of(&recipe);
    assert_eq!(expected.metrics.len(), 13);
    let (old, new) = (short.stages[1].schedule(), recipe.stages[1].schedule());
    let rates = learning_rates(&recipe);
    assert_eq!(rates[9], old.learning_rate(5));
    assert_eq!(rates[10], new.learning_rate(6));
    // From before its first end it stops there, and goes on, again.
    for step in [8, 10, 12] {
        assert!(matches!(train_from(&recipe, step).unwrap(), Outcome::Finished(_)));
        assert!(Results::of(&recipe) == expected, "from {step}");
    }
    // And once more.
    let recipe = place.recipe(&["checkpoint.keep=9", "stage.moh.tokens=640"]);
    finish(&recipe);
    let expected = Results::of(&recipe);
    assert_eq!(expected.metrics.len(), 15);
    assert!(matches!(train_from(&recipe, 6).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == expected);
}

#[test]
fn a_stage_that_is_over_and_a_shorter_one_are_refused() {
    let place = TestRun::new();
    let recipe = place.recipe(&["checkpoint.keep=9"]);
    stop_at(&recipe, 6);
    let run = RunDirectory::new(&recipe.run.dir);
    let before = files(run.root());
    let refused = |change: &str| {
        Start::default().run(&place.recipe(&["checkpoint.keep=9", change])).unwrap_err()
    };
    let error = refused(LONGER[0]);
    assert!(
        matches!(
            error,
            Error::RunDirectory(moh_checkpoint::run_directory::Error::StageOver { step: 6, .. })
        ),
        "{error}"
    );
    assert!(error.to_string().contains("stage.adapt.tokens: was 320, now 512"), "{error}");
    let error = refused("stage.moh.tokens=256");
    assert!(
        matches!(
            error,
            Error::RunDirectory(moh_checkpoint::run_directory::Error::RecipeChanged { .. })
        ),
        "{error}"
    );
    assert!(files(run.root()) == before);
    // At a step before its end the same stage grows.
    let longer = place.recipe(&["checkpoint.keep=9", LONGER[0]]);
    assert!(matches!(train_from(&longer, 4).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&longer) == grown_at(4, LONGER[0]));
}

#[test]
fn metrics_that_begin_in_a_later_stage_keep_their_steps_when_an_earlier_one_has_grown() {
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 3);
    let recipe = place.recipe(&LONGER[..1]);
    stop_at(&recipe, 9);
    let run = RunDirectory::new(&recipe.run.dir);
    fs::remove_file(run.metrics()).unwrap();
    // Begun again with step 2 of the second stage, after eight steps of the first.
    stop_at(&recipe, 11);
    finish(&recipe);
    let lines = metrics::read(&run.metrics()).unwrap();
    let steps: Vec<u64> = lines.iter().map(|line| line.step).collect();
    assert_eq!(steps, [2, 3, 4, 5]);
}

/// The recipe with a third stage, like the first but for its name, and with these overrides.
fn with_third_stage(place: &TestRun, overrides: &[&str]) -> Recipe {
    let mut recipe = place.recipe(overrides);
    let mut stage = recipe.stages[0].clone();
    stage.name = "again".to_owned();
    stage.tokens = 320;
    recipe.stages.push(stage);
    recipe
}

#[test]
fn an_appended_stage_gives_the_bits_of_a_run_that_had_it_from_the_start() {
    let keep = ["checkpoint.keep=9"];
    let place = TestRun::new();
    let whole = with_third_stage(&place, &keep);
    finish(&whole);
    let expected = Results::of(&whole);
    assert_eq!(expected.metrics.len(), 15);
    for stop in [3, 7, 10] {
        let place = TestRun::new();
        let first = place.recipe(&keep);
        match stop {
            10 => finish(&first),
            stop => stop_at(&first, stop),
        }
        let recipe = with_third_stage(&place, &keep);
        finish(&recipe);
        assert!(Results::of(&recipe) == expected, "after step {stop}");
        assert!(matches!(train_from(&recipe, 4).unwrap(), Outcome::Finished(_)));
        assert!(Results::of(&recipe) == expected, "after step {stop}, from 4");
        // It is the run's own from then on.
        let error = Start::default().run(&first).unwrap_err().to_string();
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
    let keep = "checkpoint.keep=9";
    finish(&place.recipe(&[keep]));
    finish(&place.recipe(&[keep, LONGER[1]]));
    let recipe = with_third_stage(&place, &[keep, LONGER[1]]);
    finish(&recipe);
    let expected = Results::of(&recipe);
    assert_eq!(expected.metrics.len(), 18);
    for step in [8, 10, 12] {
        assert!(matches!(train_from(&recipe, step).unwrap(), Outcome::Finished(_)));
        assert!(Results::of(&recipe) == expected, "from {step}");
    }
}

#[test]
fn a_stage_in_front_of_others_is_refused_with_the_command_of_another_run() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    finish(&recipe);
    let mut other = with_third_stage(&place, &[]);
    other.stages.rotate_right(1);
    let error = Start::default().run(&other).unwrap_err().to_string();
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
    write_tokens(&place.dir.path().join("other"), 3, 30);
    let set = |name: &str, file: &str| ValidationSet {
        name: name.to_owned(),
        path: place.dir.path().join(file),
        batches: 1,
        every_steps: 2,
    };
    let mut recipe = place.recipe(&[]);
    let first = recipe.data.validation.clone();
    let mut warnings = Vec::new();
    for (stop, sets) in [
        (2, first.clone()),
        (4, vec![set("code", "other"), set("validation", "held-out")]),
        (6, Vec::new()),
        (8, vec![set("code", "held-out")]),
        (0, first),
    ] {
        recipe.data.validation = sets;
        let start = Start { stop_at: stop, ..Start::default() };
        let done = start.run_and_hear(&recipe, &mut |event| {
            if let Event::Warning { text } = event {
                warnings.push((stop, (*text).to_owned()));
            }
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
    // The first stage ended without a set, and the second began with none.
    assert_eq!(of_sets, ["validation", "validation"]);
    assert!(!found.summary.contains("code"));
    let record = fs::read_to_string(RunDirectory::new(&recipe.run.dir).inputs()).unwrap();
    assert!(record.contains("data.validation") && !record.contains("code"), "{record}");
    // Of one set alone the text had changed; a set that was not there before has no earlier losses.
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn a_validation_set_of_another_text_is_accepted_with_a_warning() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 3);
    let held_out = place.dir.path().join("held-out");
    for ending in ["bin", "idx", "json"] {
        fs::remove_file(held_out.with_extension(ending)).unwrap();
    }
    write_tokens(&held_out, 5, 20);
    let mut warnings = Vec::new();
    let done = Start::default().run_and_hear(&recipe, &mut |event| {
        if let Event::Warning { text } = event {
            warnings.push((*text).to_owned());
        }
    });
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
    assert!(Results::of(&recipe).weights == reference().weights);
    let expected = "data.validation has another text than before, so its losses";
    assert!(warnings.len() == 1 && warnings[0].starts_with(expected), "{warnings:?}");
}
