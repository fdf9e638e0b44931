//! A run that was interrupted, at any moment and in any way, ends as one that never was: the same
//! weights bit for bit, the same metrics but for the speed, the same summary.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use moh_comm::World;
use moh_kernels::Cpu;
use moh_train::checkpoint;
use moh_train::{
    Error, Event, OpenDevice, Outcome, Ranks, Recipe, RunDirectory, RunOptions, Schedule, metrics,
};
use serde_json::Value;
use support::results::Results;
use support::{Workplace, copy_all, copy_running, files};

/// Steps of the recipe below: five of each stage.
const STEPS: u64 = 10;

/// Runs a recipe and hears its events.
fn watch(recipe: &Recipe, heard: impl FnMut(&Event<'_>, &AtomicBool)) -> Result<Outcome, Error> {
    watch_from(recipe, false, heard)
}

/// As [`watch`]; with `begin_anew`, an earlier run in its directory is moved aside.
fn watch_from(
    recipe: &Recipe,
    begin_anew: bool,
    mut heard: impl FnMut(&Event<'_>, &AtomicBool),
) -> Result<Outcome, Error> {
    let stop = AtomicBool::new(false);
    let path = Path::new("recipe.toml");
    let world = World::single();
    let ranks = (OpenDevice::Cpu, &world);
    let options = RunOptions { begin_anew, ..RunOptions::new(&stop) };
    moh_train::run(&mut recipe.clone(), path, None, ranks, options, &mut |event| {
        heard(&event, &stop);
    })
}

fn alone() -> Ranks<Cpu> {
    Ranks::new(Cpu, World::single().group().clone()).unwrap()
}

fn train(recipe: &Recipe) -> Result<Outcome, Error> {
    watch(recipe, |_, _| {})
}

/// Runs a recipe, asking it to stop during `step`.
fn stop_at(recipe: &Recipe, step: u64) -> Outcome {
    watch(recipe, |event, stop| {
        if matches!(event, Event::Step { step: now, .. } if *now == step) {
            stop.store(true, Ordering::Relaxed);
        }
    })
    .unwrap()
}

/// Waits until the checkpoint that was begun last is complete and the older ones are removed.
fn wait_for_checkpoints(run: &RunDirectory, keep: usize) {
    let is_written = || {
        let in_flight = |name: &str| name.starts_with(".tmp-");
        let names = fs::read_dir(run.checkpoints()).map_or(Vec::new(), |entries| {
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        });
        let is_marked = names.is_empty() || run.marker().is_file();
        is_marked && !names.iter().any(|name| in_flight(name)) && names.len() <= keep
    };
    while !is_written() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Runs a recipe to its end, and copies its directory to `copy` after `step` was reported and
/// before what follows a step: what a process that was killed there leaves, if the checkpoint of the
/// step before was written by then.
fn killed_at(recipe: &Recipe, step: u64, copy: &Path) {
    let done = watch(recipe, |event, _| {
        if matches!(event, Event::Step { step: now, .. } if *now == step) {
            wait_for_checkpoints(&RunDirectory::new(&recipe.run.dir), 2);
            copy_running(&recipe.run.dir, copy);
        }
    });
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
}

/// Of a recipe's uninterrupted run.
fn uninterrupted(overrides: &[&str]) -> Results {
    let place = Workplace::new();
    let recipe = place.recipe(overrides);
    assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
    Results::of(&recipe)
}

/// The results of the recipe as it stands.
fn reference() -> &'static Results {
    static REFERENCE: OnceLock<Results> = OnceLock::new();
    REFERENCE.get_or_init(|| uninterrupted(&[]))
}

/// Names below a run directory that no finished run has.
fn remains(recipe: &Recipe) -> Vec<PathBuf> {
    let is_remain = |path: &PathBuf| path.to_string_lossy().contains(".tmp-");
    files(&recipe.run.dir).into_keys().filter(is_remain).collect()
}

#[test]
fn a_stopped_run_continues_to_the_same_end() {
    // Between checkpoints, at one, at the last step of a stage, after the first of the next.
    for step in [1, 3, 4, 5, 6, 9] {
        let place = Workplace::new();
        let recipe = place.recipe(&[]);
        assert_eq!(stop_at(&recipe, step), Outcome::Stopped { step });
        let run = RunDirectory::new(&recipe.run.dir);
        assert_eq!(run.checkpoint_steps().unwrap().last(), Some(&step));
        let mut resumed = Vec::new();
        let done = watch(&recipe, |event, _| {
            if let Event::Resumed { step } = event {
                resumed.push(*step);
            }
        });
        assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
        assert_eq!(resumed, [step]);
        assert!(Results::of(&recipe) == *reference(), "stopped at step {step}");
    }
    // After the last step nothing is left to stop.
    let place = Workplace::new();
    let recipe = place.recipe(&[]);
    assert!(matches!(stop_at(&recipe, STEPS), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == *reference());
}

#[test]
fn a_run_continues_with_another_recomputation_and_the_same_bits() {
    let place = Workplace::new();
    assert_eq!(stop_at(&place.recipe(&["memory.recompute=none"]), 4), Outcome::Stopped { step: 4 });
    let middle = place.recipe(&["memory.recompute=block"]);
    assert_eq!(stop_at(&middle, 7), Outcome::Stopped { step: 7 });
    let last = place.recipe(&["memory.recompute=cheap"]);
    assert!(matches!(train(&last).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&last) == *reference());
}

#[test]
fn a_run_that_is_stopped_at_every_step_ends_the_same() {
    let place = Workplace::new();
    let recipe = place.recipe(&[]);
    for step in 1..STEPS {
        assert_eq!(stop_at(&recipe, step), Outcome::Stopped { step });
    }
    assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == *reference());
}

#[test]
fn a_killed_run_continues_to_the_same_end() {
    // Before the first checkpoint, between two, at a stage's end, at the run's end.
    for step in [1, 3, 5, 7, STEPS] {
        let place = Workplace::new();
        let mut recipe = place.recipe_in("copy");
        killed_at(&place.recipe(&[]), step, &recipe.run.dir);
        let run = RunDirectory::new(&recipe.run.dir);
        // Beyond the checkpoint, and torn.
        let mut text = fs::read_to_string(run.metrics()).unwrap();
        assert_eq!(text.lines().count() as u64, step);
        let first = text.lines().next().unwrap().to_owned();
        text += &first[..first.len() / 2];
        fs::write(run.metrics(), text).unwrap();
        // A checkpoint and an export that were being written.
        for half in [
            run.checkpoints().join(format!(".tmp-step-{step}-abc/weights.safetensors")),
            run.root().join(".tmp-export-abc/model.safetensors"),
            run.root().join(".tmp-metrics-abc"),
            run.export().join("model.safetensors"),
        ] {
            fs::create_dir_all(half.parent().unwrap()).unwrap();
            fs::write(half, b"half").unwrap();
        }
        assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)), "killed at {step}");
        assert!(Results::of(&recipe) == *reference(), "killed at {step}");
        assert!(remains(&recipe).is_empty(), "{:?}", remains(&recipe));
        // And once more, to be sure that it is finished.
        recipe.log.tensorboard = false;
        assert!(matches!(train(&recipe).unwrap(), Outcome::AlreadyFinished(_)));
    }
}

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
    let place = Workplace::new();
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

fn train_and_hear(recipe: &Recipe, heard: &mut Vec<String>) {
    let done = watch(recipe, |event, _| match event {
        Event::DamagedCheckpoint { path, .. } => {
            heard.push(format!("damaged {}", path.file_name().unwrap().to_string_lossy()));
        }
        Event::Resumed { step } => heard.push(format!("resumed {step}")),
        Event::Stage { stage, done, .. } => heard.push(format!("{} {done}", stage.name)),
        _ => {}
    });
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
}

#[test]
fn without_a_good_checkpoint_a_run_begins_anew_only_when_asked() {
    let place = Workplace::new();
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
    assert!(fs::read(run.root().join("before-1/metrics.jsonl")).unwrap() == metrics);
    assert!(run.root().join("before-1/recipe.toml").is_file());
}

/// Begins a run again, in a directory that has one, and finishes it.
fn begin_anew(recipe: &Recipe) {
    let done = watch_from(recipe, true, |event, _| {
        assert!(!matches!(event, Event::Resumed { .. }));
    });
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
}

#[test]
fn a_run_with_good_checkpoints_or_a_result_begins_anew_beside_them() {
    let place = Workplace::new();
    let recipe = place.recipe(&[]);
    assert_eq!(stop_at(&recipe, 4), Outcome::Stopped { step: 4 });
    let root = RunDirectory::new(&recipe.run.dir).root().to_owned();
    begin_anew(&recipe);
    assert!(Results::of(&recipe) == *reference());
    assert!(root.join("before-1/checkpoints/step-4/manifest.json").is_file());
    begin_anew(&recipe);
    assert!(root.join("before-2/summary.json").is_file() && root.join("before-1").is_dir());
    assert!(Results::of(&recipe) == *reference());
}

#[test]
fn what_cannot_be_read_is_not_taken_for_damage() {
    let place = Workplace::new();
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
    let place = Workplace::new();
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
fn a_finished_run_stays_finished_without_its_checkpoints() {
    let place = Workplace::new();
    let recipe = place.recipe(&[]);
    let Outcome::Finished(summary) = train(&recipe).unwrap() else { panic!("did not finish") };
    let run = RunDirectory::new(&recipe.run.dir);
    fs::remove_dir_all(run.checkpoints()).unwrap();
    let before = files(&recipe.run.dir);
    assert_eq!(train(&recipe).unwrap(), Outcome::AlreadyFinished(summary));
    assert!(files(&recipe.run.dir) == before);
    let error = train(&place.recipe(&["run.seed=77"])).unwrap_err();
    assert!(matches!(error, Error::RecipeChanged { .. }), "{error}");
    // Nothing is left to export it again from.
    fs::remove_dir_all(run.export()).unwrap();
    let before = files(&recipe.run.dir);
    assert!(matches!(train(&recipe).unwrap_err(), Error::NoneLeft { .. }));
    assert!(files(&recipe.run.dir) == before);
}

#[test]
fn lost_metrics_are_begun_again_with_a_warning() {
    let place = Workplace::new();
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
    let place = Workplace::new();
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
    let place = Workplace::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 3);
    let run = RunDirectory::new(&recipe.run.dir);
    let (good, aside) = (run.checkpoint(3), run.checkpoints().join("damaged-step-3"));
    fs::remove_dir_all(run.checkpoint(2)).unwrap();
    let mut ignore = |_: &Path, _: &Error| {};
    for file in FILES {
        let length = fs::read(good.join(file)).unwrap().len();
        // Every byte of what is text, and some of the numbers.
        let text = length.min(if file.ends_with(".json") { 600 } else { 300 });
        for position in (0..text).step_by(3).chain((text..length).step_by(length / 50 + 1)) {
            flip(&good.join(file), position);
            let found = checkpoint::newest(&run, &mut alone(), &mut ignore).unwrap();
            match found {
                Some(found) => {
                    found.verify().expect_err(&format!("{file}, byte {position} of {length}"));
                }
                None => fs::rename(&aside, &good).unwrap(),
            }
            flip(&good.join(file), position);
        }
    }
    let found = checkpoint::newest(&run, &mut alone(), &mut ignore).unwrap();
    found.unwrap().verify().unwrap();
}

#[test]
fn a_finished_run_says_so_and_changes_nothing() {
    let place = Workplace::new();
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
    let place = Workplace::new();
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
fn layers_with_other_heads_continue_with_the_same_bits() {
    let changes = ["stage.moh.moh={shared_heads=[4,1],routed_top_k=[0,2]}"];
    let expected = uninterrupted(&changes);
    let config: Value = serde_json::from_str(&expected.config).unwrap();
    assert_eq!(config["moh_shared_heads"], serde_json::json!([4, 1]));
    let summary: Value = serde_json::from_str(&expected.summary).unwrap();
    let converted = &summary["evaluations"][2]["moment"]["converted"];
    assert_eq!(converted["active_heads"], serde_json::json!([4, 3]));
    assert!(expected.metrics[9]["balance_loss"].as_f64().unwrap() > 0.0);
    let place = Workplace::new();
    let recipe = place.recipe(&changes);
    for step in [3, 7] {
        assert_eq!(stop_at(&recipe, step), Outcome::Stopped { step });
    }
    assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == expected);
}

#[test]
fn a_list_of_equal_counts_continues_a_run_with_the_count() {
    let place = Workplace::new();
    assert_eq!(stop_at(&place.recipe(&[]), 7), Outcome::Stopped { step: 7 });
    let recipe = place.recipe(&["stage.moh.moh={shared_heads=[1,1],routed_top_k=[2,2]}"]);
    assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == *reference());
}

#[test]
fn a_new_run_in_the_place_of_a_finished_one_is_not_taken_for_it() {
    let place = Workplace::new();
    train(&place.recipe(&[])).unwrap();
    let recipe = place.recipe(&["run.seed=2"]);
    fs::remove_dir_all(recipe.run.dir.join("checkpoints")).unwrap();
    assert!(matches!(train(&recipe).unwrap_err(), Error::RecipeChanged { .. }));
    let stopped = watch_from(&recipe, true, |event, stop| {
        stop.fetch_or(matches!(event, Event::Step { step: 3, .. }), Ordering::Relaxed);
    });
    assert_eq!(stopped.unwrap(), Outcome::Stopped { step: 3 });
    assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == uninterrupted(&["run.seed=2"]));
}

#[test]
fn another_recipe_is_refused_and_a_harmless_change_is_not() {
    let place = Workplace::new();
    stop_at(&place.recipe(&[]), 3);
    for change in ["run.seed=2", "stage.moh.tokens=256", "stage.adapt.learning_rate.max=1e-1"] {
        let error = train(&place.recipe(&[change])).unwrap_err();
        assert!(matches!(error, Error::RecipeChanged { .. }), "{error}");
        let (key, _) = change.split_once('=').unwrap();
        assert!(error.to_string().contains(key), "{error}");
    }
    let harmless = ["log.every_steps=5", "log.tensorboard=false", "checkpoint.every_steps=3"];
    let recipe = place.recipe(&harmless);
    assert!(matches!(train(&recipe).unwrap(), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == *reference());
}

#[test]
fn the_newest_checkpoints_and_every_nth_are_kept() {
    let place = Workplace::new();
    let every = ["checkpoint.every_steps=1", "checkpoint.keep=2", "checkpoint.keep_every=3"];
    let recipe = place.recipe(&every);
    train(&recipe).unwrap();
    let run = RunDirectory::new(&recipe.run.dir);
    assert_eq!(run.checkpoint_steps().unwrap(), [3, 6, 9, 10]);

    let place = Workplace::new();
    let recipe = place.recipe(&["checkpoint.every_steps=0", "checkpoint.keep=9"]);
    train(&recipe).unwrap();
    let run = RunDirectory::new(&recipe.run.dir);
    assert_eq!(run.checkpoint_steps().unwrap(), [5, 10], "the stages' ends, always");
}

#[test]
fn runs_of_every_element_type_and_data_option_continue_exactly() {
    for overrides in [
        &["run.dtype=bf16"][..],
        &["precision.moments=bf16"],
        &["precision.gradients=bf16"],
        &["run.dtype=bf16", "precision.gradients=bf16", "precision.moments=bf16"],
        &["data.document_mask=true"],
        &["data.order=sequential"],
    ] {
        let expected = uninterrupted(overrides);
        assert!(expected.metrics != reference().metrics, "{overrides:?} had no effect");
        let place = Workplace::new();
        let recipe = place.recipe(overrides);
        for step in [3, 5, 7] {
            assert_eq!(stop_at(&recipe, step), Outcome::Stopped { step });
        }
        train(&recipe).unwrap();
        assert!(Results::of(&recipe) == expected, "{overrides:?}");
    }
}

#[test]
fn recomputing_gives_the_same_bits() {
    for dtype in ["run.dtype=f32", "run.dtype=bf16"] {
        let expected = uninterrupted(&[dtype]);
        for recompute in ["memory.recompute=cheap", "memory.recompute=block"] {
            let found = uninterrupted(&[dtype, recompute]);
            assert!(found == expected, "{dtype} {recompute}");
        }
    }
}

/// Relative, above 1: float sums in another order, over 20 steps.
const ACCUMULATION_TOLERANCE: f64 = 1e-5;

#[test]
fn accumulating_micro_batches_is_one_large_batch() {
    // The balance loss is a mean over micro-batches, not over tokens: it is left out here.
    let base = ["stage.adapt.batch_tokens=32", "stage.moh.batch_tokens=32"];
    let with = |micro_batch: usize| {
        let sizes = [
            format!("stage.adapt.micro_batch={micro_batch}"),
            format!("stage.moh.micro_batch={micro_batch}"),
            "stage.moh.moh.balance_loss_weight=0".to_owned(),
            // The windows of an evaluation go by the micro-batch.
            format!("data.validation.batches={}", 4 / micro_batch),
        ];
        let overrides: Vec<&str> =
            base.into_iter().chain(sizes.iter().map(String::as_str)).collect();
        uninterrupted(&overrides)
    };
    let (whole, split) = (with(4), with(1));
    assert_eq!(whole.metrics.len(), 20);
    for (whole, split) in whole.metrics.iter().zip(&split.metrics) {
        for field in ["loss", "grad_norm", "validation_loss"] {
            let [Some(a), Some(b)] = [whole, split].map(|line| line[field].as_f64()) else {
                assert_eq!((field, whole.get(field)), ("validation_loss", None));
                continue;
            };
            let tolerance = ACCUMULATION_TOLERANCE * a.abs().max(1.0);
            assert!((a - b).abs() < tolerance, "{field}: {a} and {b}");
        }
    }
}

#[test]
fn metrics_have_the_documented_fields() {
    let place = Workplace::new();
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
