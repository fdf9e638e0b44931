//! The files of a run: checkpoints, metrics and an export. Also runs that have finished.

use std::fs;

use moh_checkpoint::run_log::metrics;
use moh_recipe::Schedule;
use moh_train::Outcome;
use serde_json::Value;

use super::{STEPS, uninterrupted};
use crate::support::driver::{Start, finish, reference, refuses, run};
use crate::support::{TestRun, files, run_of};

#[test]
fn a_finished_run_stays_finished_without_its_data_and_its_checkpoints() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let Outcome::Finished(summary) = run(&recipe).unwrap() else { panic!("did not finish") };
    let says_so_and_changes_nothing = || {
        let before = files(&recipe.run.dir);
        assert_eq!(run(&recipe).unwrap(), Outcome::AlreadyFinished(summary.clone()));
        assert!(files(&recipe.run.dir) == before);
    };
    fs::remove_dir_all(run_of(&recipe).checkpoints()).unwrap();
    says_so_and_changes_nothing();
    refuses(&place.recipe(&["run.seed=77"]), "the recipe differs from the run's");
    let text = fs::read(place.path("text.bin")).unwrap();
    fs::remove_file(place.path("text.bin")).unwrap();
    says_so_and_changes_nothing();
    // No checkpoint is left to export the model from.
    fs::write(place.path("text.bin"), text).unwrap();
    fs::remove_dir_all(run_of(&recipe).export()).unwrap();
    let before = files(&recipe.run.dir);
    refuses(&recipe, "and none of them is left to resume from");
    assert!(files(&recipe.run.dir) == before);
}

#[test]
fn an_export_that_is_missing_or_half_written_is_written_again() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    finish(&recipe);
    let export = recipe.run.dir.join("export");
    for part in ["", "config.json"] {
        match part {
            "" => fs::remove_dir_all(&export).unwrap(),
            part => fs::remove_file(export.join(part)).unwrap(),
        }
        assert!(finish(&recipe) == *reference(), "without export/{part}");
    }
}

#[test]
fn a_new_run_in_the_place_of_a_finished_one_is_not_taken_for_it() {
    let place = TestRun::new();
    finish(&place.recipe(&[]));
    let recipe = place.recipe(&["run.seed=2"]);
    fs::remove_dir_all(recipe.run.dir.join("checkpoints")).unwrap();
    refuses(&recipe, "the recipe differs from the run's");
    let stopped = Start { begin_anew: true, stop_at: 3, ..Start::default() }.run(&recipe);
    assert_eq!(stopped.unwrap(), Outcome::Stopped { step: 3 });
    assert!(finish(&recipe) == uninterrupted(&["run.seed=2"]));
}

#[test]
fn the_newest_checkpoints_and_every_nth_are_kept() {
    for (options, kept) in [
        ("{ every_steps = 1, keep = 2, keep_every = 3 }", &[3, 6, 9, 10][..]),
        // The stages' ends, always.
        ("{ every_steps = 0, keep = 9 }", &[5, 10]),
    ] {
        let place = TestRun::new();
        let recipe = place.recipe(&[&format!("checkpoint={options}")]);
        finish(&recipe);
        assert_eq!(run_of(&recipe).checkpoint_steps().unwrap(), kept, "{options}");
    }
}

#[test]
fn metrics_have_the_documented_fields() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    finish(&recipe);
    let run = run_of(&recipe);
    let text = fs::read_to_string(run.metrics()).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len() as u64, STEPS);
    let schedules: Vec<Schedule> = recipe.stages.iter().map(|stage| stage.schedule()).collect();
    for (number, line) in (1..).zip(&lines) {
        let mut fields = vec!["stage", "step", "tokens", "loss", "balance_loss", "learning_rate"];
        fields.extend(["grad_norm", "tokens_per_second"]);
        // Every third step, and the last step of a stage.
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
