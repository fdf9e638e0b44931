//! Damaged and lost files of a run.

use std::fs;
use std::path::Path;

use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::{alone, newest};
use moh_recipe::Recipe;
use moh_testkit::programs::{copy_all, flip};
use moh_train::Event;
use serde_json::Value;

use super::killed_at;
use crate::support::driver::{
    Start, finish, heard, reference, refusal, refuses, stop_at, warnings,
};
use crate::support::results::Results;
use crate::support::{TestRun, files, run_of, shorten};

const FILES: [&str; 6] = [
    "manifest.json",
    "manifest.json.b3",
    "tensors.json",
    "weights.safetensors",
    "first_moment.safetensors",
    "second_moment.safetensors",
];

/// Returns the recipe in the directory `copy`, of a run that was killed at step 9.
fn killed(place: &TestRun) -> Recipe {
    let recipe = place.recipe_in("copy", &[]);
    killed_at(&place.recipe(&[]), &[(9, &recipe.run.dir)]);
    recipe
}

/// Runs a recipe to its end; returns its messages about checkpoints.
fn finish_and_hear(recipe: &Recipe) -> Vec<String> {
    heard(recipe, |event| match event {
        Event::DamagedCheckpoint { path, .. } => {
            Some(format!("damaged {}", path.file_name().unwrap().to_string_lossy()))
        }
        Event::Resumed { step } => Some(format!("resumed {step}")),
        _ => None,
    })
}

#[test]
fn a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used() {
    let place = TestRun::new();
    let killed = killed(&place);
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 3] = [
        ("flipped", |path| flip(path, |length| length / 2)),
        ("shortened", shorten),
        ("missing", |path| fs::remove_file(path).unwrap()),
    ];
    for (what, damage) in damages {
        for file in FILES {
            let recipe = place.recipe_in(&format!("{what}-{file}"), &[]);
            copy_all(&killed.run.dir, &recipe.run.dir);
            let run = run_of(&recipe);
            assert_eq!(run.checkpoint_steps().unwrap(), [6, 8]);
            damage(&run.checkpoint(8).join(file));
            let heard = finish_and_hear(&recipe);
            assert_eq!(heard, ["damaged damaged-step-8", "resumed 6"], "{file} {what}");
            assert!(run.checkpoints().join("damaged-step-8").is_dir());
            assert!(Results::of(&recipe) == *reference(), "{file} {what}");
        }
    }
}

#[test]
fn what_cannot_be_read_is_not_taken_for_damage() {
    let place = TestRun::new();
    let recipe = killed(&place);
    let newest = run_of(&recipe).checkpoint(8);
    for file in FILES {
        // Reading a directory fails with another error than reading damaged or missing bytes does.
        let (path, saved) = (newest.join(file), newest.join("saved"));
        fs::rename(&path, &saved).unwrap();
        fs::create_dir(&path).unwrap();
        // The stored recipe gets the name of the copy.
        refusal(&recipe);
        let before = files(&recipe.run.dir);
        refuses(&recipe, file);
        assert!(files(&recipe.run.dir) == before, "{file}");
        fs::remove_dir(&path).unwrap();
        fs::rename(&saved, &path).unwrap();
    }
    // Another version's format, with other fields that are unknown.
    let [manifest, hash] = ["manifest.json", "manifest.json.b3"].map(|name| newest.join(name));
    let saved = [&manifest, &hash].map(|path| (path, fs::read(path).unwrap()));
    let refused = |text: &str, expected: &str| {
        fs::write(&manifest, text).unwrap();
        fs::write(&hash, format!("{}  manifest.json\n", blake3::hash(text.as_bytes()))).unwrap();
        let before = files(&recipe.run.dir);
        refuses(&recipe, expected);
        assert!(files(&recipe.run.dir) == before);
    };
    refused(r#"{"format":99,"new":{}}"#, "format 99: this program reads format 4");
    // Counters that contradict each other.
    for (counter, value, expected) in [
        ("stage", 0, "has step = 8 after step 3 of stage 0, not 3"),
        ("stage", 9, "is of stage 9, but the recipe has 2"),
        ("stage_step", 4, "has step = 8 after step 4 of stage 1, not 9"),
        ("tokens", 0, "has tokens = 0 after step 3"),
        ("sample", 0, "has sample = 0 after step 3"),
        ("moment_steps", 4, "has moment_steps = 4, expected 3 to 3"),
        ("moment_steps", 2, "has moment_steps = 2, expected 3 to 3"),
    ] {
        let mut other: Value = serde_json::from_slice(&saved[0].1).unwrap();
        other["state"][counter] = value.into();
        refused(&other.to_string(), expected);
    }
    for (path, bytes) in saved {
        fs::write(path, bytes).unwrap();
    }
    assert!(finish(&recipe) == *reference());
}

#[test]
fn a_second_damaged_checkpoint_of_a_step_leaves_the_first() {
    let place = TestRun::new();
    let recipe = killed(&place);
    let run = run_of(&recipe);
    let earlier = run.checkpoints().join("damaged-step-8");
    fs::create_dir(&earlier).unwrap();
    fs::write(earlier.join("weights.safetensors"), "theirs").unwrap();
    shorten(&run.checkpoint(8).join("weights.safetensors"));
    assert_eq!(finish_and_hear(&recipe), ["damaged damaged-step-8-2", "resumed 6"]);
    assert_eq!(fs::read(earlier.join("weights.safetensors")).unwrap(), b"theirs");
}

#[test]
fn lost_metrics_are_begun_again_with_a_warning() {
    let place = TestRun::new();
    let killed = killed(&place);
    for lost in ["missing", "short", "garbled"] {
        let recipe = place.recipe_in(lost, &[]);
        copy_all(&killed.run.dir, &recipe.run.dir);
        let run = run_of(&recipe);
        let text = fs::read_to_string(run.metrics()).unwrap();
        match lost {
            "missing" => fs::remove_file(run.metrics()).unwrap(),
            "short" => fs::write(run.metrics(), text.lines().next().unwrap()).unwrap(),
            _ => fs::write(run.metrics(), format!("?\n{text}")).unwrap(),
        }
        let warnings = warnings(&recipe);
        assert!(warnings.iter().any(|text| text.contains("metrics.jsonl: ")), "{warnings:?}");
        let found = Results::of(&recipe);
        assert!(found.weights == reference().weights && found.summary == reference().summary);
        assert_eq!(found.metrics, reference().metrics[8..], "{lost}");
        let aside = run.root().join("metrics-before-step-8.jsonl");
        assert_eq!(aside.is_file(), lost != "missing");
    }
    // A run with metrics that start later resumes as any other run.
    let recipe = place.recipe_in("later", &[]);
    stop_at(&recipe, 3);
    fs::remove_file(run_of(&recipe).metrics()).unwrap();
    stop_at(&recipe, 7);
    let found = finish(&recipe);
    assert!(found.weights == reference().weights);
    assert_eq!(found.metrics, reference().metrics[3..]);
}

#[test]
fn no_flipped_byte_of_a_checkpoint_goes_unseen() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 3);
    let run = run_of(&recipe);
    let (good, aside) = (run.checkpoint(3), run.checkpoints().join("damaged-step-3"));
    fs::remove_dir_all(run.checkpoint(2)).unwrap();
    let find = || {
        let mut ignore = |_: &Path, _: &moh_checkpoint::Error| {};
        newest(&run, &mut alone().unwrap(), &mut ignore).unwrap()
    };
    for file in FILES {
        let length = fs::read(good.join(file)).unwrap().len();
        // Every third byte of text, and some bytes of numbers.
        let text = length.min(if file.ends_with(".json") { 600 } else { 300 });
        for position in (0..text).step_by(3).chain((text..length).step_by(length / 50 + 1)) {
            flip(&good.join(file), |_| position);
            match find() {
                Some(found) => {
                    found.verify().expect_err(&format!("{file}, byte {position} of {length}"));
                }
                None => fs::rename(&aside, &good).unwrap(),
            }
            flip(&good.join(file), |_| position);
        }
    }
    find().unwrap().verify().unwrap();
}

/// The message of a run without a good checkpoint.
const NONE_LEFT: &str =
    "the run has completed checkpoints, and none of them is left to resume from";

#[test]
fn without_a_good_checkpoint_a_run_begins_anew_only_when_asked() {
    let place = TestRun::new();
    let recipe = killed(&place);
    let run = run_of(&recipe);
    let metrics = fs::read(run.metrics()).unwrap();
    for step in [6, 8] {
        shorten(&run.checkpoint(step).join("manifest.json"));
    }
    // The damage is found once. Then no checkpoint is left, as if the checkpoints had been removed.
    for _ in 0..2 {
        let error = refusal(&recipe);
        assert!(error.contains(NONE_LEFT) && error.contains("--begin-anew"), "{error}");
        assert!(fs::read(run.metrics()).unwrap() == metrics);
    }
    for step in [6, 8] {
        assert!(run.checkpoints().join(format!("damaged-step-{step}")).is_dir());
    }
    fs::remove_dir_all(run.checkpoints()).unwrap();
    assert!(refusal(&recipe).contains(NONE_LEFT), "by its marker");
    begin_anew(&recipe);
    let before = RunDirectory::new(place.path("copy.before-1"));
    assert!(fs::read(before.metrics()).unwrap() == metrics);
    assert!(before.recipe().is_file());
}

/// Starts a new run in a directory that has a run, and finishes it.
fn begin_anew(recipe: &Recipe) {
    let start = Start { begin_anew: true, ..Start::default() };
    let found = start.finish_and_hear(recipe, |event, _| {
        assert!(!matches!(event, Event::Resumed { .. }));
    });
    assert!(found == *reference());
}

#[test]
fn a_run_with_good_checkpoints_or_a_result_begins_anew_beside_them() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 4);
    let before = |n| RunDirectory::new(place.path(&format!("run.before-{n}")));
    begin_anew(&recipe);
    assert!(before(1).checkpoint(4).join("manifest.json").is_file());
    begin_anew(&recipe);
    assert!(before(2).summary().is_file() && before(1).root().is_dir());
}
