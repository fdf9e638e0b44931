//! The token files of a run are part of its state by content: other content is refused, the same content is
//! accepted at any path, and ids outside the vocabulary are found before the first step.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::driver::{stop_at, watch};
use crate::support::results::Results;
use crate::support::{TestRun, copy_all, files, write_tokens};
use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::Summary;
use moh_comm::World;
use moh_data::{Provenance, TokenFileWriter};
use moh_kernels::open_device::OpenDevice;
use moh_recipe::Recipe;
use moh_train::{Error, Event, Outcome, RunOptions};
use serde_json::Value;

/// Stops a run after its third step.
fn interrupt(recipe: &Recipe) {
    stop_at(recipe, 3);
}

fn train(recipe: &Recipe) -> Result<Outcome, Error> {
    watch(recipe, |_, _| {})
}

fn move_files(from: &Path, to: &Path) {
    for ending in ["bin", "idx", "json"] {
        fs::rename(from.with_extension(ending), to.with_extension(ending)).unwrap();
    }
}

fn remove_files(prefix: &Path) {
    for ending in ["bin", "idx", "json"] {
        fs::remove_file(prefix.with_extension(ending)).unwrap();
    }
}

#[test]
fn a_token_file_that_was_prepared_again_is_refused_and_nothing_changes() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    interrupt(&recipe);
    let prefix = place.dir.path().join("text");
    remove_files(&prefix);
    write_tokens(&prefix, 1, 61);
    let before = files(&recipe.run.dir);
    let error = train(&recipe).unwrap_err();
    let Error::InputChanged { path, key, .. } = &error else { panic!("{error}") };
    assert_eq!(path, &PathBuf::from(format!("{}.idx", prefix.display())));
    assert_eq!(key, "data.sources.0");
    assert_eq!(files(&recipe.run.dir), before);
}

#[test]
fn other_tokens_in_documents_of_the_same_lengths_are_refused() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    interrupt(&recipe);
    let bin = place.dir.path().join("text.bin");
    let mut bytes = fs::read(&bin).unwrap();
    bytes[100] ^= 1;
    fs::write(&bin, bytes).unwrap();
    // Its record would be noticed first.
    fs::remove_file(place.dir.path().join("text.json")).unwrap();
    let error = train(&recipe).unwrap_err().to_string();
    assert!(error.contains("text.bin: data.sources.0 is not the file"), "{error}");
    assert!(error.contains("it has other tokens"), "{error}");
}

#[test]
fn moved_token_files_continue_with_the_same_bits() {
    let place = TestRun::new();
    train(&place.recipe_in("whole")).unwrap();
    let whole = Results::of(&place.recipe_in("whole"));
    let recipe = place.recipe(&[]);
    interrupt(&recipe);
    let elsewhere = place.dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    for name in ["text", "held-out"] {
        move_files(&place.dir.path().join(name), &elsewhere.join(name));
    }
    let source = format!("data.sources.0.path={}", elsewhere.join("text").display());
    let validation = format!("data.validation.path={}", elsewhere.join("held-out").display());
    let moved = place.recipe(&[&source, &validation]);
    train(&moved).unwrap();
    assert_eq!(Results::of(&moved), whole);
    let stored = Recipe::load(&RunDirectory::new(&moved.run.dir).recipe(), &[]).unwrap();
    assert_eq!(stored.data, moved.data);
}

#[test]
fn other_content_at_another_path_is_refused() {
    let place = TestRun::new();
    interrupt(&place.recipe(&[]));
    let other = place.dir.path().join("other");
    write_tokens(&other, 9, 60);
    let recipe = place.recipe(&[&format!("data.sources.0.path={}", other.display())]);
    let error = train(&recipe).unwrap_err();
    assert!(matches!(error, Error::InputChanged { .. }), "{error}");
    let stored = Recipe::load(&RunDirectory::new(&recipe.run.dir).recipe(), &[]).unwrap();
    assert_ne!(stored.data, recipe.data);
}

#[test]
fn without_a_record_the_paths_must_stay_and_a_warning_is_given() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    interrupt(&recipe);
    let record = RunDirectory::new(&recipe.run.dir).inputs();
    fs::remove_file(&record).unwrap();
    let moved = place.dir.path().join("moved");
    move_files(&place.dir.path().join("text"), &moved);
    let elsewhere = place.recipe(&[&format!("data.sources.0.path={}", moved.display())]);
    let error = train(&elsewhere).unwrap_err();
    assert!(
        matches!(
            error,
            Error::RunDirectory(moh_checkpoint::run_directory::Error::RecipeChanged { .. })
        ),
        "{error}"
    );
    move_files(&moved, &place.dir.path().join("text"));
    let mut warnings = Vec::new();
    watch(&recipe, |event, _| {
        if let Event::Warning { text } = event {
            warnings.push((*text).to_owned());
        }
    })
    .unwrap();
    assert!(warnings.iter().any(|text| text.contains("inputs.json is missing")), "{warnings:?}");
    assert!(record.is_file());
}

#[test]
fn a_finished_run_refuses_other_content_and_takes_the_same_at_another_path() {
    let place = TestRun::new();
    let finished = place.recipe(&[]);
    train(&finished).unwrap();
    let other = place.dir.path().join("other");
    write_tokens(&other, 9, 60);
    let before = files(&finished.run.dir);
    let recipe = place.recipe(&[&format!("data.sources.0.path={}", other.display())]);
    let error = train(&recipe).unwrap_err();
    assert!(matches!(error, Error::InputChanged { .. }), "{error}");
    // Nothing is there to compare with.
    remove_files(&other);
    assert!(train(&recipe).is_err());
    assert!(files(&finished.run.dir) == before);
    move_files(&place.dir.path().join("text"), &other);
    assert!(matches!(train(&recipe).unwrap(), Outcome::AlreadyFinished(_)));
    let stored = Recipe::load(&RunDirectory::new(&recipe.run.dir).recipe(), &[]).unwrap();
    assert_eq!(stored.data, recipe.data);
}

#[test]
fn losses_say_on_which_text_and_on_how_many_of_its_tokens_they_are() {
    let place = TestRun::new();
    let held_out = place.dir.path().join("other");
    write_tokens(&held_out, 7, 30);
    let path = format!("data.validation.path={}", held_out.display());
    for change in ["data.validation.batches=1", &path] {
        let recipe = place.recipe(&[change]);
        let _ = fs::remove_dir_all(&recipe.run.dir);
        interrupt(&place.recipe(&[]));
        train(&recipe).unwrap();
        let summary =
            Summary::read(&RunDirectory::new(&recipe.run.dir).summary()).unwrap().unwrap();
        let [loaded, adapted, .., end] = &summary.evaluations[..] else { panic!("{summary:?}") };
        assert!(adapted.is_comparable(end) && !loaded.is_comparable(end), "{change}: {summary:?}");
        // Windows of 8 tokens, in micro-batches of 4.
        let windows = if change == path { 8 } else { 4 };
        let targets = [loaded, end].map(|evaluation| evaluation.texts["validation"].targets);
        assert_eq!(targets, [8 * 7, windows * 7]);
    }
}

#[test]
fn several_sources_continue_only_in_the_recorded_order() {
    let place = TestRun::new();
    let mut recipe = place.recipe(&[]);
    for is_mixture in [false, true] {
        interrupt(&recipe);
        let run = RunDirectory::new(&recipe.run.dir);
        let written = fs::read_to_string(run.inputs()).unwrap();
        let earlier = written.replace("  \"order_version\": 1,\n", "");
        assert_ne!(earlier, written);
        for record in [Some(&earlier), Some(&written.replace("version\": 1", "version\": 2")), None]
        {
            match record {
                Some(record) => fs::write(run.inputs(), record).unwrap(),
                None => fs::remove_file(run.inputs()).unwrap(),
            }
            if is_mixture {
                let replay = || {
                    moh_train::replay(
                        &run,
                        recipe.clone(),
                        "recipe.toml".as_ref(),
                        None,
                        OpenDevice::Cpu,
                        1,
                    )
                };
                for error in [train(&recipe).unwrap_err(), replay().unwrap_err()] {
                    assert!(
                        error.to_string().contains("in the order of this version: go on with"),
                        "{error}"
                    );
                }
            } else {
                let copy = place.dir.path().join("copy");
                copy_all(&recipe.run.dir, &copy);
                let mut recipe = recipe.clone();
                recipe.run.dir = copy.clone();
                train(&recipe).unwrap();
                fs::remove_dir_all(copy).unwrap();
            }
        }
        fs::write(run.inputs(), written).unwrap();
        train(&recipe).unwrap();
        recipe.run.dir = place.dir.path().join("mixture");
        recipe.data.sources.push(recipe.data.sources[0].clone());
    }
}

/// A token file with the id 63 at `position` of 3,000 tokens, and without a record of its vocabulary.
fn without_proof(prefix: &Path, position: usize) {
    let mut writer = TokenFileWriter::create(prefix, 64).unwrap();
    let mut tokens = vec![5; 3000];
    tokens[position] = 63;
    writer.push_document(&tokens).unwrap();
    writer.finish(Provenance::default()).unwrap();
    fs::remove_file(prefix.with_extension("json")).unwrap();
}

fn is_check(event: &Event<'_>) -> bool {
    matches!(event, Event::CheckingIds { .. })
}

#[test]
fn an_id_outside_the_vocabulary_ends_a_run_before_its_first_step() {
    let place = TestRun::new();
    // The last tokens are no part of a window, so training would never read them.
    without_proof(&place.dir.path().join("late"), 2999);
    let path = format!("data.sources.0.path={}/late", place.dir.path().display());
    let recipe = place.recipe(&[&path, "model.new.vocab_size=63"]);
    let mut steps = 0;
    let error = watch(&recipe, |event, _| steps += u32::from(matches!(event, Event::Step { .. })));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("late.bin: token 2999 has the id 63, outside the vocabulary of 63"),
        "{error}"
    );
    assert_eq!(steps, 0);
}

#[test]
fn ids_are_read_once_in_a_run_and_never_with_a_proof() {
    let place = TestRun::new();
    without_proof(&place.dir.path().join("late"), 7);
    let path = format!("data.sources.0.path={}/late", place.dir.path().display());
    let recipe = place.recipe(&[&path]);
    let mut checked = Vec::new();
    let stopped = watch(&recipe, |event, stop| {
        if let Event::CheckingIds { path, done, total } = event {
            checked.push((path.file_name().unwrap().to_owned(), *done, *total));
        }
        if matches!(event, Event::Step { step: 3, .. }) {
            stop.store(true, Ordering::Relaxed);
        }
    });
    assert_eq!(stopped.unwrap(), Outcome::Stopped { step: 3 });
    assert_eq!(checked, [("late".into(), 0, 3000), ("late".into(), 3000, 3000)]);
    let record = fs::read(RunDirectory::new(&recipe.run.dir).inputs()).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    assert_eq!(record["token_files"]["data.sources.0"]["ids_below"], 64);
    assert_eq!(record["token_files"]["data.validation"]["ids_below"], 64);
    watch(&recipe, |event, _| assert!(!is_check(event))).unwrap();
}

#[test]
fn a_stop_while_ids_are_read_ends_the_run_and_the_next_one_reads_them() {
    let place = TestRun::new();
    without_proof(&place.dir.path().join("late"), 7);
    let path = format!("data.sources.0.path={}/late", place.dir.path().display());
    let recipe = place.recipe(&[&path]);
    let stopped = watch(&recipe, |event, stop| {
        if is_check(event) {
            stop.store(true, Ordering::Relaxed);
        }
    });
    assert_eq!(stopped.unwrap(), Outcome::StoppedBeforeTraining);
    let mut checks = 0;
    watch(&recipe, |event, _| checks += u32::from(is_check(event))).unwrap();
    assert_eq!(checks, 2);
}

/// The recipe of a run that starts from the model in `from`.
fn recipe_from(place: &TestRun, from: &Path, name: &str) -> Recipe {
    let mut recipe = place.recipe_in(name);
    recipe.model.new = None;
    recipe.model.from = Some(from.display().to_string());
    recipe
}

/// As [`train`], of a recipe whose model lies in `directory`.
fn train_from(
    recipe: &Recipe,
    directory: Option<&Path>,
    stop_at: Option<u64>,
) -> Result<Outcome, Error> {
    let (stop, world) = (AtomicBool::new(false), World::single());
    let (device, options) = (OpenDevice::Cpu, RunOptions::new(&stop));
    let path = Path::new("recipe.toml");
    moh_train::run(&mut recipe.clone(), path, directory, device, &world, options, &mut |event| {
        if matches!(event, Event::Step { step, .. } if Some(step) == stop_at) {
            stop.store(true, Ordering::Relaxed);
        }
    })
}

/// A model in `place`, of a finished run, without its Mixture-of-Head attention.
fn dense_model(place: &TestRun) -> PathBuf {
    let mut recipe = place.recipe_in("earlier");
    recipe.stages.truncate(1);
    train(&recipe).unwrap();
    let export = RunDirectory::new(&recipe.run.dir).export();
    fs::write(export.join("generation_config.json"), "{\"temperature\": 0.5}").unwrap();
    export
}

#[test]
fn a_run_resumes_and_exports_without_the_model_that_it_started_from() {
    let place = TestRun::new();
    let model = dense_model(&place);
    let whole = recipe_from(&place, &model, "whole");
    train_from(&whole, Some(&model), None).unwrap();
    let recipe = recipe_from(&place, &model, "run");
    let stopped = train_from(&recipe, Some(&model), Some(3)).unwrap();
    assert_eq!(stopped, Outcome::Stopped { step: 3 });
    fs::remove_dir_all(&model).unwrap();
    assert!(RunDirectory::new(&recipe.run.dir).keeps_model(&recipe).unwrap());
    train_from(&recipe, None, None).unwrap();
    assert_eq!(Results::of(&recipe), Results::of(&whole));
    let copied = RunDirectory::new(&recipe.run.dir).export().join("generation_config.json");
    assert_eq!(fs::read_to_string(copied).unwrap(), "{\"temperature\": 0.5}");
}

#[test]
fn a_run_without_a_checkpoint_needs_the_model() {
    let place = TestRun::new();
    let model = dense_model(&place);
    let recipe = recipe_from(&place, &model, "run");
    let run = RunDirectory::new(&recipe.run.dir);
    fs::create_dir_all(run.model()).unwrap();
    fs::write(run.root().join(".moh-run"), "").unwrap();
    assert!(!RunDirectory::new(&recipe.run.dir).keeps_model(&recipe).unwrap());
    assert!(matches!(train_from(&recipe, None, None), Err(Error::NoModel { .. })));
}

#[test]
fn the_model_may_move_but_not_change() {
    let place = TestRun::new();
    let model = dense_model(&place);
    let recipe = recipe_from(&place, &model, "run");
    train_from(&recipe, Some(&model), Some(3)).unwrap();
    let elsewhere = place.dir.path().join("elsewhere");
    fs::rename(&model, &elsewhere).unwrap();
    let moved = recipe_from(&place, &elsewhere, "run");
    assert!(!RunDirectory::new(&recipe.run.dir).keeps_model(&moved).unwrap());
    fs::write(elsewhere.join("generation_config.json"), "{}").unwrap();
    let error = train_from(&moved, Some(&elsewhere), None).unwrap_err().to_string();
    assert!(error.contains("generation_config.json: model.from is not the file"), "{error}");
    fs::write(elsewhere.join("generation_config.json"), "{\"temperature\": 0.5}").unwrap();
    train_from(&moved, Some(&elsewhere), None).unwrap();
}

#[test]
fn a_changed_file_of_the_kept_model_is_named() {
    let place = TestRun::new();
    let model = dense_model(&place);
    let recipe = recipe_from(&place, &model, "run");
    train_from(&recipe, Some(&model), Some(3)).unwrap();
    let kept = RunDirectory::new(&recipe.run.dir).model().join("generation_config.json");
    fs::write(&kept, "{}").unwrap();
    let error = train_from(&recipe, None, None).unwrap_err().to_string();
    assert!(error.contains(&kept.display().to_string()), "{error}");
}

/// The quickstart's tokenizer in a directory of `place`, its file after a change.
fn copy_tokenizer(place: &TestRun, name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
    let tokenizer = place.dir.path().join(name);
    fs::create_dir(&tokenizer).unwrap();
    let quickstart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart");
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        fs::copy(quickstart.join(name), tokenizer.join(name)).unwrap();
    }
    let text = fs::read(quickstart.join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&text).unwrap();
    change(&mut json);
    fs::write(tokenizer.join("tokenizer.json"), json.to_string()).unwrap();
    tokenizer
}

/// A recipe of one stage for a new model with this tokenizer.
fn recipe_with_tokenizer(place: &TestRun, tokenizer: &Path) -> Recipe {
    let vocabulary = moh_data::TokenizerFile::load(tokenizer).unwrap().vocab_size();
    let mut recipe = place.recipe(&[
        &format!("model.tokenizer={}", tokenizer.display()),
        &format!("model.new.vocab_size={vocabulary}"),
    ]);
    recipe.stages.truncate(1);
    recipe
}

#[test]
fn a_new_model_resumes_without_its_tokenizer() {
    let place = TestRun::new();
    let tokenizer = copy_tokenizer(&place, "tokenizer", |_| {});
    let recipe = recipe_with_tokenizer(&place, &tokenizer);
    interrupt(&recipe);
    fs::remove_dir_all(&tokenizer).unwrap();
    train(&recipe).unwrap();
    assert!(RunDirectory::new(&recipe.run.dir).export().join("tokenizer.json").is_file());
}

#[test]
fn a_tokenizer_may_be_written_again_but_not_change() {
    let place = TestRun::new();
    let tokenizer = copy_tokenizer(&place, "tokenizer", |_| {});
    interrupt(&recipe_with_tokenizer(&place, &tokenizer));
    let changed = copy_tokenizer(&place, "changed", |json| {
        json["normalizer"] = serde_json::json!({"type": "NFC"});
    });
    let error = train(&recipe_with_tokenizer(&place, &changed)).unwrap_err().to_string();
    let difference = "it has other content: normalizer: {\"type\":\"NFC\"}, not null";
    assert!(error.contains(difference), "{error}");
    let again = copy_tokenizer(&place, "again", Value::sort_all_objects);
    let again = recipe_with_tokenizer(&place, &again);
    // The second time the files that the run keeps are read.
    for (stop_at, is_said) in [(4, true), (5, false)] {
        let mut warnings = Vec::new();
        let outcome = watch(&again, |event, stop| match event {
            Event::Warning { text } => warnings.push((*text).to_owned()),
            Event::Step { step, .. } if *step == stop_at => stop.store(true, Ordering::Relaxed),
            _ => {}
        });
        outcome.unwrap();
        let same = |text: &String| text.contains("again/tokenizer.json: has other bytes than ");
        assert_eq!(warnings.iter().any(same), is_said, "{warnings:?}");
    }
}

#[test]
fn another_tokenizer_than_that_of_a_token_file_must_be_accepted() {
    let place = TestRun::new();
    let tokenizer = copy_tokenizer(&place, "tokenizer", |_| {});
    let info = place.dir.path().join("text.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&info).unwrap()).unwrap();
    json["tokenizer_hash"] = "00".into();
    fs::write(&info, json.to_string()).unwrap();
    let recipe = recipe_with_tokenizer(&place, &tokenizer);
    let error = train(&recipe).unwrap_err().to_string();
    assert!(error.contains("prepared with another tokenizer"), "{error}");
    let [tokenizer, text] = [tokenizer.join("tokenizer.json"), place.dir.path().join("text")]
        .map(|path| path.display().to_string());
    let command = format!("moh-data accept --tokenizer {tokenizer} {text}");
    assert!(error.ends_with(&command), "{error}");
    // As that command records it.
    let hash = blake3::hash(&fs::read(&tokenizer).unwrap()).to_hex();
    json["accepted_tokenizers"] = serde_json::json!([hash.as_str()]);
    fs::write(&info, json.to_string()).unwrap();
    interrupt(&recipe);
}
