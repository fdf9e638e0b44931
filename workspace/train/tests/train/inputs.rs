//! The token files of a run are part of its state by content. Other content is refused, and the same content is
//! accepted at any path. Ids outside the vocabulary are found before the first step.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use crate::support::driver::{
    finish, heard, refusal, refuses, replay, run, stop_at, stop_when, warnings, watch,
};
use crate::support::{
    TestRun, files, move_tokens, remove_tokens, run_of, summary_of, write_tokens,
};
use moh_data::{TokenFileInfo, TokenFileWriter};
use moh_recipe::Recipe;
use moh_testkit::assert_refused;
use moh_testkit::programs::{assert_has, copy_all, edit_json, flip, read_json};
use moh_testkit::small_tokenizer::{WORDS, write_tokenizer};
use moh_train::{Event, Outcome};
use serde_json::Value;

fn source(prefix: &Path) -> String {
    format!("data.sources.0.path={}", prefix.display())
}

fn stored(recipe: &Recipe) -> Recipe {
    Recipe::load(&run_of(recipe).recipe(), &[]).unwrap()
}

#[test]
fn a_token_file_that_was_prepared_again_is_refused_and_nothing_changes() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 3);
    let prefix = place.path("text");
    remove_tokens(&prefix);
    write_tokens(&prefix, 1, 61);
    let before = files(&recipe.run.dir);
    let error = refusal(&recipe);
    let expected = format!("{}.idx: data.sources.0 is not the file", prefix.display());
    assert!(error.starts_with(&expected), "{error}");
    assert_eq!(files(&recipe.run.dir), before);
}

#[test]
fn other_tokens_in_documents_of_the_same_lengths_are_refused() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 3);
    flip(&place.path("text.bin"), |_| 100);
    // Otherwise the record in text.json would be noticed first.
    fs::remove_file(place.path("text.json")).unwrap();
    let parts = ["text.bin: data.sources.0 is not the file", "it has other tokens"];
    assert_has(&refusal(&recipe), &parts);
}

#[test]
fn moved_token_files_continue_with_the_same_bits() {
    let place = TestRun::new();
    let whole = finish(&place.recipe_in("whole", &[]));
    stop_at(&place.recipe(&[]), 3);
    let elsewhere = place.path("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    for name in ["text", "held-out"] {
        move_tokens(&place.path(name), &elsewhere.join(name));
    }
    let validation = format!("data.validation.path={}", elsewhere.join("held-out").display());
    let moved = place.recipe(&[&source(&elsewhere.join("text")), &validation]);
    assert_eq!(finish(&moved), whole);
    assert_eq!(stored(&moved).data, moved.data);
}

#[test]
fn other_content_at_another_path_is_refused() {
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 3);
    let other = place.path("other");
    write_tokens(&other, 9, 60);
    let recipe = place.recipe(&[&source(&other)]);
    refuses(&recipe, "data.sources.0 is not the file that the run was started");
    assert_ne!(stored(&recipe).data, recipe.data);
}

#[test]
fn without_a_record_the_paths_must_stay_and_a_warning_is_given() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 3);
    let record = run_of(&recipe).inputs();
    fs::remove_file(&record).unwrap();
    let (text, moved) = (place.path("text"), place.path("moved"));
    move_tokens(&text, &moved);
    refuses(&place.recipe(&[&source(&moved)]), "the recipe differs from the run's");
    move_tokens(&moved, &text);
    let warnings = warnings(&recipe);
    assert!(warnings.iter().any(|text| text.contains("inputs.json is missing")), "{warnings:?}");
    assert!(record.is_file());
}

#[test]
fn a_finished_run_refuses_other_content_and_takes_the_same_at_another_path() {
    let place = TestRun::new();
    let finished = place.recipe(&[]);
    finish(&finished);
    let other = place.path("other");
    write_tokens(&other, 9, 60);
    let before = files(&finished.run.dir);
    let recipe = place.recipe(&[&source(&other)]);
    refuses(&recipe, "data.sources.0 is not the file that the run was started");
    // The token file is missing, so its content cannot be compared.
    remove_tokens(&other);
    refusal(&recipe);
    assert!(files(&finished.run.dir) == before);
    move_tokens(&place.path("text"), &other);
    assert!(matches!(run(&recipe).unwrap(), Outcome::AlreadyFinished(_)));
    assert_eq!(stored(&recipe).data, recipe.data);
}

#[test]
fn losses_say_on_which_text_and_on_how_many_of_its_tokens_they_are() {
    let place = TestRun::new();
    let held_out = place.path("other");
    write_tokens(&held_out, 7, 30);
    let path = format!("data.validation.path={}", held_out.display());
    for change in ["data.validation.batches=1", &path] {
        let recipe = place.recipe(&[change]);
        let _ = fs::remove_dir_all(&recipe.run.dir);
        stop_at(&place.recipe(&[]), 3);
        finish(&recipe);
        let summary = summary_of(&recipe);
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
        stop_at(&recipe, 3);
        let record = run_of(&recipe).inputs();
        let written = fs::read_to_string(&record).unwrap();
        let earlier = written.replace("  \"order_version\": 1,\n", "");
        assert_ne!(earlier, written);
        let later = written.replace("version\": 1", "version\": 2");
        for changed in [Some(earlier), Some(later), None] {
            match changed {
                Some(changed) => fs::write(&record, changed).unwrap(),
                None => fs::remove_file(&record).unwrap(),
            }
            if is_mixture {
                let expected = "in the order of this version: go on with";
                refuses(&recipe, expected);
                assert_refused(replay(&recipe, 1), expected);
            } else {
                let copy = place.recipe_in("copy", &[]);
                copy_all(&recipe.run.dir, &copy.run.dir);
                finish(&copy);
                fs::remove_dir_all(copy.run.dir).unwrap();
            }
        }
        fs::write(record, written).unwrap();
        finish(&recipe);
        recipe.run.dir = place.path("mixture");
        recipe.data.sources.push(recipe.data.sources[0].clone());
    }
}

/// Returns a recipe with a token file that has the id 63 at `position` of 3,000 tokens, and no record of its
/// vocabulary.
fn without_proof(place: &TestRun, position: usize, vocabulary: usize) -> Recipe {
    let prefix = place.path("late");
    let mut writer = TokenFileWriter::create(&prefix, 64).unwrap();
    let mut tokens = vec![5; 3000];
    tokens[position] = 63;
    writer.push_document(&tokens).unwrap();
    writer.finish(TokenFileInfo::default()).unwrap();
    fs::remove_file(prefix.with_extension("json")).unwrap();
    place.recipe(&[&source(&prefix), &format!("model.new.vocab_size={vocabulary}")])
}

fn is_check(event: &Event<'_>) -> bool {
    matches!(event, Event::CheckingIds { .. })
}

#[test]
fn an_id_outside_the_vocabulary_ends_a_run_before_its_first_step() {
    let place = TestRun::new();
    // The last tokens are not part of a window, so training would never read them.
    let recipe = without_proof(&place, 2999, 63);
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
    let recipe = without_proof(&place, 7, 64);
    let mut checked = Vec::new();
    let stopped = watch(&recipe, |event, stop| {
        if let Event::CheckingIds { path, done, total } = event {
            checked.push((path.file_name().unwrap().to_owned(), *done, *total));
        }
        stop.fetch_or(matches!(event, Event::Step { step: 3, .. }), Ordering::Relaxed);
    });
    assert_eq!(stopped.unwrap(), Outcome::Stopped { step: 3 });
    assert_eq!(checked, [("late".into(), 0, 3000), ("late".into(), 3000, 3000)]);
    let record = read_json(&run_of(&recipe).inputs());
    assert_eq!(record["token_files"]["data.sources.0"]["ids_below"], 64);
    assert_eq!(record["token_files"]["data.validation"]["ids_below"], 64);
    watch(&recipe, |event, _| assert!(!is_check(event))).unwrap();
}

#[test]
fn a_stop_while_ids_are_read_ends_the_run_and_the_next_one_reads_them() {
    let place = TestRun::new();
    let recipe = without_proof(&place, 7, 64);
    assert_eq!(stop_when(&recipe, is_check), Outcome::StoppedBeforeTraining);
    assert_eq!(heard(&recipe, |event| is_check(event).then_some(())).len(), 2);
}

/// Returns a model in `place`, of a finished run, without its Mixture-of-Head attention, and a recipe that starts from
/// it.
fn dense_model(place: &TestRun) -> (PathBuf, Recipe) {
    let mut recipe = place.recipe_in("earlier", &[]);
    recipe.stages.truncate(1);
    finish(&recipe);
    let export = run_of(&recipe).export();
    fs::write(export.join("generation_config.json"), "{\"temperature\": 0.5}").unwrap();
    let recipe = place.recipe_from(export.display().to_string(), "run", &[]);
    (export, recipe)
}

#[test]
fn a_run_resumes_and_exports_without_the_model_that_it_started_from() {
    let place = TestRun::new();
    let (model, recipe) = dense_model(&place);
    let whole = finish(&place.recipe_from(model.display().to_string(), "whole", &[]));
    stop_at(&recipe, 3);
    fs::remove_dir_all(&model).unwrap();
    assert!(run_of(&recipe).keeps_model(&recipe).unwrap());
    assert_eq!(finish(&recipe), whole);
    let copied = run_of(&recipe).export().join("generation_config.json");
    assert_eq!(fs::read_to_string(copied).unwrap(), "{\"temperature\": 0.5}");
}

#[test]
fn a_run_without_a_checkpoint_needs_the_model() {
    let place = TestRun::new();
    let (model, recipe) = dense_model(&place);
    let run = run_of(&recipe);
    fs::create_dir_all(run.model()).unwrap();
    fs::write(run.root().join(".moh-run"), "").unwrap();
    assert!(!run.keeps_model(&recipe).unwrap());
    fs::remove_dir_all(&model).unwrap();
    let error = refusal(&recipe);
    let expected = "recipe.toml: model.from: no such directory, and the model is not downloaded";
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn the_model_may_move_but_not_change() {
    let place = TestRun::new();
    let (model, recipe) = dense_model(&place);
    stop_at(&recipe, 3);
    let elsewhere = place.path("elsewhere");
    fs::rename(&model, &elsewhere).unwrap();
    let moved = place.recipe_from(elsewhere.display().to_string(), "run", &[]);
    assert!(!run_of(&recipe).keeps_model(&moved).unwrap());
    fs::write(elsewhere.join("generation_config.json"), "{}").unwrap();
    refuses(&moved, "generation_config.json: model.from is not the file");
    fs::write(elsewhere.join("generation_config.json"), "{\"temperature\": 0.5}").unwrap();
    finish(&moved);
}

#[test]
fn a_changed_file_of_the_kept_model_is_named() {
    let place = TestRun::new();
    let (model, recipe) = dense_model(&place);
    stop_at(&recipe, 3);
    fs::remove_dir_all(&model).unwrap();
    let kept = run_of(&recipe).model().join("generation_config.json");
    fs::write(&kept, "{}").unwrap();
    refuses(&recipe, &kept.display().to_string());
}

/// Returns a small tokenizer in a directory of `place`, its file after a change, and a recipe of one stage for a new
/// model with it.
fn with_tokenizer(
    place: &TestRun,
    name: &str,
    change: impl FnOnce(&mut Value),
) -> (PathBuf, Recipe) {
    let tokenizer = place.path(name);
    write_tokenizer(&tokenizer, &WORDS);
    edit_json(&tokenizer.join("tokenizer.json"), change);
    let vocabulary = moh_data::TokenizerFile::load(&tokenizer).unwrap().vocab_size();
    let mut recipe = place.recipe(&[
        &format!("model.tokenizer={}", tokenizer.display()),
        &format!("model.new.vocab_size={vocabulary}"),
    ]);
    recipe.stages.truncate(1);
    (tokenizer, recipe)
}

#[test]
fn a_new_model_resumes_without_its_tokenizer() {
    let place = TestRun::new();
    let (tokenizer, recipe) = with_tokenizer(&place, "tokenizer", |_| {});
    stop_at(&recipe, 3);
    fs::remove_dir_all(&tokenizer).unwrap();
    finish(&recipe);
    assert!(run_of(&recipe).export().join("tokenizer.json").is_file());
}

#[test]
fn a_tokenizer_may_be_written_again_but_not_change() {
    let place = TestRun::new();
    stop_at(&with_tokenizer(&place, "tokenizer", |_| {}).1, 3);
    let (_, changed) = with_tokenizer(&place, "changed", |json| {
        json["normalizer"] = serde_json::json!({"type": "NFC"});
    });
    refuses(&changed, "it has other content: normalizer: {\"type\":\"NFC\"}, not null");
    let (_, again) = with_tokenizer(&place, "again", Value::sort_all_objects);
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
    let (tokenizer, recipe) = with_tokenizer(&place, "tokenizer", |_| {});
    let info = place.path("text.json");
    edit_json(&info, |json| json["tokenizer_hash"] = "00".into());
    let error = refusal(&recipe);
    assert!(error.contains("prepared with another tokenizer"), "{error}");
    let [tokenizer, text] = [tokenizer.join("tokenizer.json"), place.path("text")]
        .map(|path| path.display().to_string());
    let command = format!("moh-data accept --tokenizer {tokenizer} {text}");
    assert!(error.ends_with(&command), "{error}");
    // The tokenizer is accepted, as the command records it.
    let hash = blake3::hash(&fs::read(&tokenizer).unwrap()).to_hex();
    edit_json(&info, |json| json["accepted_tokenizers"] = serde_json::json!([hash.as_str()]));
    stop_at(&recipe, 3);
}
