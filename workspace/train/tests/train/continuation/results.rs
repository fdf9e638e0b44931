//! What a run leaves: checkpoints, metrics, an export; and runs that have finished.

use std::fs;
use std::sync::atomic::Ordering;

use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::metrics;
use moh_recipe::Schedule;
use moh_train::{Error, Event, Outcome};
use serde_json::Value;

use super::{STEPS, reference, train, uninterrupted, watch_anew};
use crate::support::results::Results;
use crate::support::{TestRun, files};

#[test]
fn a_finished_run_stays_finished_without_its_checkpoints() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let Outcome::Finished(summary) = train(&recipe).unwrap() else { panic!("did not finish") };
    let run = RunDirectory::new(&recipe.run.dir);
    fs::remove_dir_all(run.checkpoints()).unwrap();
    let before = files(&recipe.run.dir);
    assert_eq!(train(&recipe).unwrap(), Outcome::AlreadyFinished(summary));
    assert!(files(&recipe.run.dir) == before);
    let error = train(&place.recipe(&["run.seed=77"])).unwrap_err();
    assert!(
        matches!(
            error,
            Error::RunDirectory(moh_checkpoint::run_directory::Error::RecipeChanged { .. })
        ),
        "{error}"
    );
    // Nothing is left to export it again from.
    fs::remove_dir_all(run.export()).unwrap();
    let before = files(&recipe.run.dir);
    assert!(matches!(train(&recipe).unwrap_err(), Error::NoneLeft { .. }));
    assert!(files(&recipe.run.dir) == before);
}

#[test]
fn a_finished_run_says_so_and_changes_nothing() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let Outcome::Finished(summary) = train(&recipe).unwrap() else { panic!("did not finish") };
    let before = files(&recipe.run.dir);
    // Not even the data is needed any more.
    fs::remove_file(place.dir.path().join("text.bin")).unwrap();
    assert_eq!(train(&recipe).unwrap(), Outcome::AlreadyFinished(summary));
    assert!(files(&recipe.run.dir) == before);
}

#[test]
fn an_export_that_is_missing_or_half_written_is_written_again() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    train(&recipe).unwrap();
    let export = recipe.run.dir.join("export");
    for part in ["", "config.json"] {
        match part {
            "" => fs::remove_dir_all(&export).unwrap(),
            part => fs::remove_file(export.join(part)).unwrap(),
        }
        assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
        assert!(Results::of(&recipe) == *reference(), "without export/{part}");
    }
}

#[test]
fn a_new_run_in_the_place_of_a_finished_one_is_not_taken_for_it() {
    let place = TestRun::new();
    train(&place.recipe(&[])).unwrap();
    let recipe = place.recipe(&["run.seed=2"]);
    fs::remove_dir_all(recipe.run.dir.join("checkpoints")).unwrap();
    assert!(matches!(
        train(&recipe).unwrap_err(),
        Error::RunDirectory(moh_checkpoint::run_directory::Error::RecipeChanged { .. })
    ));
    let stopped = watch_anew(&recipe, |event, stop| {
        stop.fetch_or(matches!(event, Event::Step { step: 3, .. }), Ordering::Relaxed);
    });
    assert_eq!(stopped.unwrap(), Outcome::Stopped { step: 3 });
    assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == uninterrupted(&["run.seed=2"]));
}

#[test]
fn the_newest_checkpoints_and_every_nth_are_kept() {
    let place = TestRun::new();
    let every = ["checkpoint.every_steps=1", "checkpoint.keep=2", "checkpoint.keep_every=3"];
    let recipe = place.recipe(&every);
    train(&recipe).unwrap();
    let run = RunDirectory::new(&recipe.run.dir);
    assert_eq!(run.checkpoint_steps().unwrap(), [3, 6, 9, 10]);

    let place = TestRun::new();
    let recipe = place.recipe(&["checkpoint.every_steps=0", "checkpoint.keep=9"]);
    train(&recipe).unwrap();
    let run = RunDirectory::new(&recipe.run.dir);
    assert_eq!(run.checkpoint_steps().unwrap(), [5, 10], "the stages' ends, always");
}

#[test]
fn metrics_have_the_documented_fields() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    train(&recipe).unwrap();
    let run = RunDirectory::new(&recipe.run.dir);
    let text = fs::read_to_string(run.metrics()).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len() as u64, STEPS);
    let schedules: Vec<Schedule> = recipe.stages.iter().map(|stage| stage.schedule()).collect();
    for (number, line) in (1..).zip(&lines) {
        let mut fields = vec!["stage", "step", "tokens", "loss", "balance_loss", "learning_rate"];
        fields.extend(["grad_norm", "tokens_per_second"]);
        // Every third step, and the last of a stage.
        if number % 3 == 0 || number % 5 == 0 {
            fields.extend(["validation_loss", "validation_bits_per_byte"]);
            assert!(line["validation_loss"].is_f64() && line["validation_bits_per_byte"].is_null());
            fields.push("validation");
            let of_set = serde_json::json!({
                "validation": { "loss": line["validation_loss"], "bits_per_byte": null }
            });
            assert_eq!(line["validation"], of_set);
        }
        fields.push("speed");
        assert_eq!(line.as_object().unwrap().keys().collect::<Vec<_>>(), fields);
        let (stage, step) = ((number as usize - 1) / 5, (number - 1) % 5 + 1);
        assert_eq!(line["stage"], ["adapt", "moh"][stage]);
        assert_eq!((&line["step"], &line["tokens"]), (&step.into(), &(64 * number).into()));
        assert_eq!(line["balance_loss"].is_f64(), stage == 1);
        assert_eq!(line["learning_rate"], schedules[stage].learning_rate(step));
        for field in ["loss", "grad_norm", "tokens_per_second"] {
            assert!(line[field].as_f64().unwrap() > 0.0, "{line}");
        }
    }
    assert!(lines[9]["loss"].as_f64() < lines[0]["loss"].as_f64());
    assert_eq!(metrics::read(&run.metrics()).unwrap().len() as u64, STEPS);
}
