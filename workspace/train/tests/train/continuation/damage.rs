//! Damaged and lost files of a run.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use moh_checkpoint::run_directory::RunDirectory;
use moh_recipe::Recipe;
use moh_train::{Error, Event, Outcome};

use super::{alone, killed_at, reference, stop_at, train, train_and_hear, watch, watch_anew};
use crate::support::results::Results;
use crate::support::{TestRun, copy_all, files};

const FILES: [&str; 6] = [
    "manifest.json",
    "manifest.json.b3",
    "tensors.json",
    "weights.safetensors",
    "first_moment.safetensors",
    "second_moment.safetensors",
];

/// Damages a file.
type Damage = fn(&Path);

fn flip(path: &Path, position: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[position] ^= 1;
    fs::write(path, bytes).unwrap();
}

fn shorten(path: &Path) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() - 7]).unwrap();
}

#[test]
fn a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used() {
    let place = TestRun::new();
    let killed = place.dir.path().join("killed");
    killed_at(&place.recipe(&[]), 9, &killed);
    let damages: [(&str, Damage); 3] = [
        ("flipped", |path| flip(path, fs::read(path).unwrap().len() / 2)),
        ("shortened", shorten),
        ("missing", |path| fs::remove_file(path).unwrap()),
    ];
    for (what, damage) in damages {
        for file in FILES {
            let recipe = place.recipe_in(&format!("{what}-{file}"));
            copy_all(&killed, &recipe.run.dir);
            let run = RunDirectory::new(&recipe.run.dir);
            assert_eq!(run.checkpoint_steps().unwrap(), [6, 8]);
            damage(&run.checkpoint(8).join(file));
            let mut heard = Vec::new();
            train_and_hear(&recipe, &mut heard);
            assert_eq!(heard[0], "damaged damaged-step-8", "{file} {what}");
            assert_eq!(heard[1], "resumed 6", "{file} {what}");
            assert!(run.checkpoints().join("damaged-step-8").is_dir());
            assert!(Results::of(&recipe) == *reference(), "{file} {what}");
        }
    }
}

#[test]
fn what_cannot_be_read_is_not_taken_for_damage() {
    let place = TestRun::new();
    let recipe = place.recipe_in("copy");
    killed_at(&place.recipe(&[]), 9, &recipe.run.dir);
    let run = RunDirectory::new(&recipe.run.dir);
    let newest = run.checkpoint(8);
    for file in FILES {
        // Reading a directory fails with another error than reading damaged or missing bytes does.
        let (path, saved) = (newest.join(file), newest.join("saved"));
        fs::rename(&path, &saved).unwrap();
        fs::create_dir(&path).unwrap();
        // The stored recipe gets the name of the copy.
        train(&recipe).unwrap_err();
        let before = files(&recipe.run.dir);
        let error = train(&recipe).unwrap_err().to_string();
        assert!(error.contains(file), "{error}");
        assert!(files(&recipe.run.dir) == before, "{file}");
        fs::remove_dir(&path).unwrap();
        fs::rename(&saved, &path).unwrap();
    }
    // Another version's format, whose other fields are unknown.
    let manifest = fs::read(newest.join("manifest.json")).unwrap();
    let hash = fs::read(newest.join("manifest.json.b3")).unwrap();
    let text = r#"{"format":99,"new":{}}"#;
    fs::write(newest.join("manifest.json"), text).unwrap();
    let line = format!("{}  manifest.json\n", blake3::hash(text.as_bytes()));
    fs::write(newest.join("manifest.json.b3"), line).unwrap();
    let before = files(&recipe.run.dir);
    let error = train(&recipe).unwrap_err().to_string();
    assert!(error.ends_with("format 99: this program reads format 4"), "{error}");
    assert!(files(&recipe.run.dir) == before);
    fs::write(newest.join("manifest.json"), manifest).unwrap();
    fs::write(newest.join("manifest.json.b3"), hash).unwrap();
    assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == *reference());
}

#[test]
fn a_second_damaged_checkpoint_of_a_step_leaves_the_first() {
    let place = TestRun::new();
    let recipe = place.recipe_in("copy");
    killed_at(&place.recipe(&[]), 9, &recipe.run.dir);
    let run = RunDirectory::new(&recipe.run.dir);
    let earlier = run.checkpoints().join("damaged-step-8");
    fs::create_dir(&earlier).unwrap();
    fs::write(earlier.join("weights.safetensors"), "theirs").unwrap();
    shorten(&run.checkpoint(8).join("weights.safetensors"));
    let mut heard = Vec::new();
    train_and_hear(&recipe, &mut heard);
    assert_eq!(heard[..2], ["damaged damaged-step-8-2", "resumed 6"]);
    assert_eq!(fs::read(earlier.join("weights.safetensors")).unwrap(), b"theirs");
}

#[test]
fn lost_metrics_are_begun_again_with_a_warning() {
    let place = TestRun::new();
    let copy = place.dir.path().join("killed");
    killed_at(&place.recipe(&[]), 9, &copy);
    for lost in ["missing", "short", "garbled"] {
        let recipe = place.recipe_in(lost);
        copy_all(&copy, &recipe.run.dir);
        let run = RunDirectory::new(&recipe.run.dir);
        let text = fs::read_to_string(run.metrics()).unwrap();
        match lost {
            "missing" => fs::remove_file(run.metrics()).unwrap(),
            "short" => fs::write(run.metrics(), text.lines().next().unwrap()).unwrap(),
            _ => fs::write(run.metrics(), format!("?\n{text}")).unwrap(),
        }
        let mut warnings = Vec::new();
        let mut heard = |event: &Event<'_>, _: &AtomicBool| {
            if let Event::Warning { text } = event {
                warnings.push((*text).to_owned());
            }
        };
        assert!(matches!(watch(&recipe, &mut heard).unwrap(), Outcome::Finished(_)), "{lost}");
        assert!(warnings.iter().any(|text| text.contains("metrics.jsonl: ")), "{warnings:?}");
        let found = Results::of(&recipe);
        assert!(found.weights == reference().weights && found.summary == reference().summary);
        assert_eq!(found.metrics, reference().metrics[8..], "{lost}");
        let aside = run.root().join("metrics-before-step-8.jsonl");
        assert_eq!(aside.is_file(), lost != "missing");
    }
    // A run whose metrics begin later resumes as any other.
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    assert_eq!(stop_at(&recipe, 3), Outcome::Stopped { step: 3 });
    fs::remove_file(RunDirectory::new(&recipe.run.dir).metrics()).unwrap();
    assert_eq!(stop_at(&recipe, 7), Outcome::Stopped { step: 7 });
    assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
    let found = Results::of(&recipe);
    assert!(found.weights == reference().weights);
    assert_eq!(found.metrics, reference().metrics[3..]);
}

#[test]
fn no_flipped_byte_of_a_checkpoint_goes_unseen() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 3);
    let run = RunDirectory::new(&recipe.run.dir);
    let (good, aside) = (run.checkpoint(3), run.checkpoints().join("damaged-step-3"));
    fs::remove_dir_all(run.checkpoint(2)).unwrap();
    let mut ignore = |_: &Path, _: &moh_checkpoint::Error| {};
    for file in FILES {
        let length = fs::read(good.join(file)).unwrap().len();
        // Every byte of what is text, and some of the numbers.
        let text = length.min(if file.ends_with(".json") { 600 } else { 300 });
        for position in (0..text).step_by(3).chain((text..length).step_by(length / 50 + 1)) {
            flip(&good.join(file), position);
            let found =
                moh_checkpoint::newest(&run.checkpoint_directory(), &mut alone(), &mut ignore)
                    .unwrap();
            match found {
                Some(found) => {
                    found.verify().expect_err(&format!("{file}, byte {position} of {length}"));
                }
                None => fs::rename(&aside, &good).unwrap(),
            }
            flip(&good.join(file), position);
        }
    }
    let found =
        moh_checkpoint::newest(&run.checkpoint_directory(), &mut alone(), &mut ignore).unwrap();
    found.unwrap().verify().unwrap();
}

#[test]
fn without_a_good_checkpoint_a_run_begins_anew_only_when_asked() {
    let place = TestRun::new();
    let recipe = place.recipe_in("copy");
    killed_at(&place.recipe(&[]), 9, &recipe.run.dir);
    let run = RunDirectory::new(&recipe.run.dir);
    let metrics = fs::read(run.metrics()).unwrap();
    for step in [6, 8] {
        shorten(&run.checkpoint(step).join("manifest.json"));
    }
    // The damage is found once; then nothing is left, as if the checkpoints had been removed.
    for _ in 0..2 {
        let error = train(&recipe).unwrap_err();
        assert!(matches!(error, Error::NoneLeft { .. }), "{error}");
        assert!(error.to_string().contains("--begin-anew"), "{error}");
        assert!(fs::read(run.metrics()).unwrap() == metrics);
    }
    for step in [6, 8] {
        assert!(run.checkpoints().join(format!("damaged-step-{step}")).is_dir());
    }
    fs::remove_dir_all(run.checkpoints()).unwrap();
    assert!(matches!(train(&recipe).unwrap_err(), Error::NoneLeft { .. }), "by its marker");
    begin_anew(&recipe);
    assert!(Results::of(&recipe) == *reference());
    let before = RunDirectory::new(place.dir.path().join("copy.before-1"));
    assert!(fs::read(before.metrics()).unwrap() == metrics);
    assert!(before.recipe().is_file());
}

/// Begins a run again, in a directory that has one, and finishes it.
fn begin_anew(recipe: &Recipe) {
    let done = watch_anew(recipe, |event, _| {
        assert!(!matches!(event, Event::Resumed { .. }));
    });
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
}

#[test]
fn a_run_with_good_checkpoints_or_a_result_begins_anew_beside_them() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    assert_eq!(stop_at(&recipe, 4), Outcome::Stopped { step: 4 });
    let before = |n| RunDirectory::new(place.dir.path().join(format!("run.before-{n}")));
    begin_anew(&recipe);
    assert!(Results::of(&recipe) == *reference());
    assert!(before(1).checkpoint(4).join("manifest.json").is_file());
    begin_anew(&recipe);
    assert!(before(2).summary().is_file() && before(1).root().is_dir());
    assert!(Results::of(&recipe) == *reference());
}
