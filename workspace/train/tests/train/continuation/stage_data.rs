//! Stages that read data of their own.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use moh_data::TrainingData;
use moh_plan::{SourceEpochs, open_training};
use moh_recipe::Recipe;
use moh_testkit::programs::read_json;

use super::{STEPS, killed_at};
use crate::support::driver::{finish, finish_in_parts, reference, refusal, refuses, stop_at};
use crate::support::{TestRun, files, move_tokens, run_of, token_files, write_tokens};

/// Returns a directory with a second file, and overrides with a mixture and a sequence length for each stage.
fn mixtures() -> (TestRun, [String; 4]) {
    let place = TestRun::new();
    let dir = place.dir.path().display().to_string();
    write_tokens(&place.path("other"), 3, 60);
    let adapt = format!("{{ path = \"{dir}/text\", weight = 3 }}, {{ path = \"{dir}/other\" }}");
    let moh = format!("{{ path = \"{dir}/other\", weight = 2 }}, {{ path = \"{dir}/text\" }}");
    let overrides = [
        format!("stage.adapt.data.sources=[{adapt}]"),
        format!("stage.moh.data.sources=[{moh}]"),
        "stage.moh.data.sequence_length=16".to_owned(),
        "stage.moh.data.document_mask=true".to_owned(),
    ];
    (place, overrides)
}

fn recipe(place: &TestRun, overrides: &[String], name: &str) -> Recipe {
    let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
    place.recipe_in(name, &[&overrides[..], &["stage.moh.micro_batch=2"]].concat())
}

#[test]
fn two_mixtures_of_two_lengths_continue_exactly() {
    let (place, overrides) = mixtures();
    let copies = [3, 7].map(|step| (step, recipe(&place, &overrides, &format!("copy-{step}"))));
    let paths = copies.each_ref().map(|(step, copy)| (*step, copy.run.dir.as_path()));
    let expected = killed_at(&recipe(&place, &overrides, "whole"), &paths);
    assert!(expected.metrics[0] != reference().metrics[0], "another mixture");
    assert_eq!(expected.metrics[9]["tokens"], 640);
    let interrupted = recipe(&place, &overrides, "interrupted");
    assert!(finish_in_parts(&interrupted, [2, 3, 5, 7, 8]) == expected);
    for (step, copy) in copies {
        assert!(finish(&copy) == expected, "killed at {step}");
    }
}

#[test]
fn the_files_of_a_stage_are_compared_by_content() {
    let (place, overrides) = mixtures();
    let recipe = recipe(&place, &overrides[1..], "run");
    stop_at(&recipe, 3);
    let record = read_json(&run_of(&recipe).inputs());
    let keys: Vec<_> = record["token_files"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["data.sources.0", "data.validation", "stage.moh.data.sources.0"]);
    // The same content at another path.
    let with_path = |recipe: &Recipe, index: usize, path: &Path| {
        let mut recipe = recipe.clone();
        let data = recipe.stages[1].data.as_mut().unwrap();
        data.sources.as_mut().unwrap()[index].path = path.to_owned();
        recipe
    };
    let moved = place.path("moved");
    move_tokens(&place.path("other"), &moved);
    let with_moved = with_path(&recipe, 0, &moved);
    stop_at(&with_moved, 6);
    // A copy of a file that several stages read would be read from its beginning.
    let copy = place.path("copy");
    for (from, to) in token_files(&place.path("text")).iter().zip(token_files(&copy)) {
        fs::copy(from, to).unwrap();
    }
    refuses(&with_path(&with_moved, 1, &copy), "stage.moh.data.sources.1.path");
    // Other content.
    write_tokens(&moved, 4, 60);
    let before = files(&recipe.run.dir);
    let error = refusal(&with_moved);
    assert!(error.contains(": stage.moh.data.sources.0 is not the file"), "{error}");
    assert_eq!(error.lines().count(), 1);
    assert!(files(&recipe.run.dir) == before);
}

#[test]
fn the_runs_data_named_again_are_the_runs() {
    let place = TestRun::new();
    let path = place.path("text");
    let again = format!("stage.moh.data={{sources=[{{path=\"{}\"}}]}}", path.display());
    let recipe = place.recipe(&[&again]);
    stop_at(&recipe, 7);
    assert!(finish(&recipe) == *reference());
}

#[test]
fn a_stage_with_its_own_data_may_be_appended_and_grow() {
    let (place, overrides) = mixtures();
    let overrides =
        [&overrides[1..], &["model.new.max_position_embeddings=16".to_owned()]].concat();
    let whole = finish(&recipe(&place, &overrides, "whole"));
    let mut longer = recipe(&place, &overrides, "longer");
    let mut first = longer.clone();
    first.stages.truncate(1);
    finish(&first);
    let found = finish(&longer);
    // A finished run has evaluated once more.
    assert!(found.weights == whole.weights && found.metrics == whole.metrics);
    longer.stages[1].tokens += 64;
    let found = finish(&longer);
    assert_eq!(found.metrics.len() as u64, STEPS + 1);
    assert!(found.metrics[..10] == whole.metrics);
}

/// Returns the windows that the stages read, by file and position.
fn windows(recipe: &Recipe, training: &[TrainingData]) -> Vec<(u64, u64)> {
    let mut samples = 0u64..0;
    let mut found = Vec::new();
    for (stage, data) in recipe.stages.iter().zip(training) {
        samples = samples.end..samples.end + recipe.num_samples(stage);
        let numbers: Vec<u64> = data.file_numbers().collect();
        found.extend(samples.clone().map(|number| {
            let (source, start) = data.locate(number);
            (numbers[source], start)
        }));
    }
    found
}

#[test]
fn no_window_comes_again_before_all_of_a_file_are_read() {
    let (place, overrides) = mixtures();
    for name in ["text", "other"] {
        write_tokens(&place.path(name), 5, 200);
    }
    // Two mixtures of one length. The third stage continues the first stage's mixture.
    let mut recipe = recipe(&place, &overrides[..2], "run");
    recipe.stages.push(moh_recipe::Stage { name: "again".to_owned(), ..recipe.stages[0].clone() });
    let training = open_training(&recipe, 64).unwrap();
    let found = windows(&recipe, &training);
    assert_eq!(found.len(), 120);
    assert_eq!(found.iter().collect::<BTreeSet<_>>().len(), 120);
    let epochs = SourceEpochs::of_run(&recipe, &training);
    let read = |number| found.iter().filter(|(file, _)| *file == number).count() as u64;
    let expected = [(0, "text"), (1, "other")];
    assert_eq!(epochs.len(), expected.len());
    for (source, (number, name)) in epochs.iter().zip(expected) {
        assert_eq!(source.path, place.path(name));
        assert_eq!(source.tokens_drawn, 8 * read(number));
        assert!(source.epochs < 1.0 && source.epochs > 0.0);
    }
    // Without the second stage, the first and the third stage read the same samples.
    recipe.stages.remove(1);
    let alone = windows(&recipe, &open_training(&recipe, 64).unwrap());
    assert_eq!(alone[..40], found[..40]);
    let of_mixture =
        |samples: &[(u64, u64)]| samples.iter().map(|found| found.0).collect::<Vec<_>>();
    assert_eq!(of_mixture(&alone[40..]), of_mixture(&found[80..]));
    // A stage of another length reads windows of its own.
    recipe.stages[1].data.as_mut().unwrap().sequence_length = Some(16);
    let longer = open_training(&recipe, 64).unwrap();
    assert!((40..60).all(|number| longer[1].locate(number).1.is_multiple_of(16)));
    assert_eq!(longer[1].samples_by_source(40..60).iter().sum::<u64>(), 20);
}
