//! A run directory is the run's own or it is refused: nothing that a run has not written is lost, and a directory that
//! is moved or removed under a run is not made again.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use moh_comm::World;
use moh_device::OpenDevice;
use moh_recipe::Recipe;
use moh_run_directory::RunDirectory;
use moh_train::{Error, Event, Outcome, RunOptions};
use support::driver::{Start, finish, run_in, stop_at};
use support::on_ranks::on_ranks;
use support::results::Results;
use support::{TestRun, copy_all, files, write_tokens};

/// Runs a recipe, which lies at `path`, with a model in `model`.
fn train_at(
    recipe: &Recipe,
    path: &Path,
    model: Option<&Path>,
    begin_anew: bool,
) -> Result<Outcome, Error> {
    let (stop, world) = (AtomicBool::new(false), World::single());
    let options = RunOptions { begin_anew, ..RunOptions::new(&stop) };
    moh_train::run(&mut recipe.clone(), path, model, OpenDevice::Cpu, &world, options, &mut |_| {})
}

fn train(recipe: &Recipe) -> Result<Outcome, Error> {
    train_at(recipe, Path::new("recipe.toml"), None, false)
}

/// Trains, and hears the warnings.
fn warnings(recipe: &Recipe) -> Vec<String> {
    let mut found = Vec::new();
    let done = Start::default().run_and_hear(recipe, &mut |event| {
        if let Event::Warning { text } = event {
            found.push((*text).to_owned());
        }
    });
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
    found
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_directory_with_files_of_a_user_is_refused_and_unchanged() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let root = &recipe.run.dir;
    for (files_in, holds) in [
        (&["model/model.safetensors"][..], "holds model: "),
        (&["export/config.json", "export/chapter1.txt"], "holds export: "),
        (&["summary.json"], "holds summary.json: "),
        (&["recipe.toml"], "holds recipe.toml: "),
        (&["metrics.jsonl", "notes"], "holds metrics.jsonl, notes: "),
        (&["a", "b", "c", "d", ".lock"], "holds a, b, c and 1 more: "),
        (&["checkpoints/step-5/weights"], "holds checkpoints: "),
    ] {
        for name in files_in {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "# mine").unwrap();
        }
        let before = files(root);
        for begin_anew in [false, true] {
            let error = train_at(&recipe, Path::new("recipe.toml"), None, begin_anew).unwrap_err();
            assert!(
                matches!(error, Error::RunDirectory(moh_run_directory::Error::NotARun { .. })),
                "{error}"
            );
            let error = error.to_string();
            assert!(error.contains(holds) && error.contains("/run-2"), "{error}");
            assert_eq!(files(root), before);
        }
        fs::remove_dir_all(root).unwrap();
    }
    // An empty one is taken, also with what a process leaves that ends before it marks the directory.
    fs::create_dir_all(root).unwrap();
    fs::write(root.join(".lock"), "").unwrap();
    fs::write(root.join(".tmp-.moh-run-abcdef"), "").unwrap();
    finish(&recipe);
    assert!(root.join(".moh-run").is_file());
}

#[test]
fn a_new_run_does_not_touch_what_it_reads() {
    let place = TestRun::new();
    finish(&place.recipe_in("earlier"));
    let model = RunDirectory::new(place.dir.path().join("earlier")).export();
    let dir = place.dir.path();
    let mut recipe = place.recipe(&[]);
    recipe.model.new = None;
    recipe.stages.remove(0);
    // A directory that a run has marked, which ended before its first checkpoint.
    let marked = dir.join("marked");
    fs::create_dir(&marked).unwrap();
    fs::copy(dir.join("earlier/.moh-run"), marked.join(".moh-run")).unwrap();
    for name in ["mine", "model"] {
        copy_all(&model, &marked.join(name));
    }
    write_tokens(&marked.join("tokens"), 1, 60);
    fs::write(marked.join("variant.toml"), "").unwrap();
    let other = Path::new("recipe.toml");
    let source = &mut recipe.clone().data.sources[0];
    for (run_dir, from, tokens, path, expected) in [
        (&marked, &marked.join("mine"), &source.path, other, "run.dir holds"),
        (&marked, &marked, &source.path, other, "run.dir is"),
        (&model.join("run"), &model, &source.path, other, "run.dir lies inside"),
        (&marked, &model, &marked.join("tokens"), other, "data.sources names"),
        (&marked, &model, &source.path, &marked.join("variant.toml"), "--recipe names"),
        // Not read, but in the way.
        (&marked, &model, &source.path, other, "modeling_moh_llama.py, which no run has written"),
    ] {
        recipe.run.dir = run_dir.clone();
        recipe.model.from = Some(from.display().to_string());
        recipe.data.sources[0].path = tokens.clone();
        let model_files: BTreeMap<PathBuf, Vec<u8>> = files(dir);
        let error = train_at(&recipe, path, Some(from), false).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        let mut after = files(dir);
        // The last one has been begun: the lock is the run's.
        after.remove(&marked.join(".lock"));
        assert_eq!(after, model_files, "{expected}");
    }
    fs::remove_dir_all(marked.join("model")).unwrap();
    train_at(&recipe, other, Some(&model), false).unwrap();
    assert!(marked.join("mine/model.safetensors").is_file());
}

#[test]
fn beginning_anew_moves_the_runs_own_files_and_no_others() {
    let place = TestRun::new();
    let recipe = place.recipe(&["log.norms_every_steps=2"]);
    let root = &recipe.run.dir;
    finish(&recipe);
    let run = names(root);
    for name in ["notes.txt", "trace-step-mine.json", "before-work", "recipe.toml.bak"] {
        fs::write(root.join(name), "mine").unwrap();
    }
    fs::create_dir(root.join("data")).unwrap();
    // As a run of an earlier version.
    fs::remove_file(root.join(".moh-run")).unwrap();
    train_at(&recipe, Path::new("recipe.toml"), None, true).unwrap();
    let expected: Vec<String> = run.iter().filter(|name| *name != ".lock").cloned().collect();
    assert_eq!(names(&root.join("before-1")), expected, "every file of a run is on its list");
    for name in ["notes.txt", "trace-step-mine.json", "before-work", "recipe.toml.bak"] {
        assert_eq!(fs::read_to_string(root.join(name)).unwrap(), "mine");
    }
    assert!(root.join("data").is_dir());
    // The earlier run is one.
    let moved = place.recipe(&["log.norms_every_steps=2", &dir_of(&root.join("before-1"))]);
    assert!(matches!(train(&moved), Ok(Outcome::AlreadyFinished(_))));
}

fn dir_of(path: &Path) -> String {
    format!("run.dir={}", path.display())
}

#[test]
fn a_run_of_an_earlier_version_resumes_and_is_marked() {
    let place = TestRun::new();
    for kept in [&["has-checkpoints", ".lock"][..], &["has-checkpoints"], &[".lock"], &[]] {
        let recipe = place.recipe(&[]);
        let root = &recipe.run.dir;
        stop_at(&recipe, 3);
        fs::remove_file(root.join(".moh-run")).unwrap();
        for name in ["has-checkpoints", ".lock"] {
            if !kept.contains(&name) {
                fs::remove_file(root.join(name)).unwrap();
            }
        }
        let mut resumed = 0;
        let done = Start::default().run_and_hear(&recipe, &mut |event| {
            if let Event::Resumed { step } = event {
                resumed = *step;
            }
        });
        assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
        assert!(resumed == 3 && root.join(".moh-run").is_file());
        fs::remove_dir_all(root).unwrap();
    }
}

#[test]
fn an_edited_recipe_of_the_run_is_compared_and_kept() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let path = RunDirectory::new(&recipe.run.dir).recipe();
    stop_at(&recipe, 3);
    let text = fs::read_to_string(&path).unwrap();
    let load = |text: &str| {
        fs::write(&path, text).unwrap();
        Recipe::load(&path, &[]).unwrap()
    };
    // What the run was started with is known, whatever the file says.
    let seed = load(&text.replace("seed = 1", "seed = 2 # mine"));
    let error = train_at(&seed, &path, None, false).unwrap_err();
    assert!(error.to_string().contains("run.seed: was 1, now 2"), "{error}");
    assert!(fs::read_to_string(&path).unwrap().contains("# mine"));
    let edited = format!("# Longer.\n{}", text.replace("every_steps = 1", "every_steps = 5"));
    let edited = edited.replacen("tokens = 320", "tokens = 320 # as planned", 1);
    finish(&load(&edited));
    assert_eq!(fs::read_to_string(path.with_file_name("recipe-edited.toml")).unwrap(), edited);
    let stored = RunDirectory::new(&recipe.run.dir).stored_recipe().unwrap();
    assert_eq!(Recipe::load(&path, &[]).unwrap(), stored);
    assert!(!path.with_file_name("recipe-edited-2.toml").exists());
}

/// What happens to a run directory after the report of step 3.
fn disturbed(recipe: &Recipe, disturb: impl Fn(&Path)) -> Error {
    let disturbed = Start::default().run_and_hear(recipe, &mut |event| {
        if matches!(event, Event::Step { step: 3, .. }) {
            disturb(&recipe.run.dir);
        }
    });
    disturbed.unwrap_err()
}

#[cfg(target_os = "linux")]
#[test]
fn a_moved_directory_gets_the_last_checkpoint_and_nothing_is_made_at_its_old_place() {
    let place = TestRun::new();
    let whole = place.recipe_in("whole");
    finish(&whole);
    let root = place.dir.path().canonicalize().unwrap();
    let archive = root.join("archive");
    for other_is_made in [false, true] {
        let recipe = place.recipe(&["checkpoint.every_steps=1"]);
        let error = disturbed(&recipe, |dir| {
            fs::rename(dir, &archive).unwrap();
            if other_is_made {
                fs::create_dir(dir).unwrap();
                fs::write(dir.join("mine"), "mine").unwrap();
            }
        });
        let Error::RunMoved { place: found, step, .. } = &error else { panic!("{error}") };
        assert_eq!((found, step), (&archive, &Some(3)));
        assert!(error.to_string().ends_with("archive/recipe.toml"), "{error}");
        match other_is_made {
            true => assert_eq!(names(&recipe.run.dir), ["mine"]),
            false => assert!(!recipe.run.dir.exists()),
        }
        let moved = place.recipe(&["checkpoint.every_steps=1", &dir_of(&archive)]);
        let mut resumed = 0;
        let done = Start::default().run_and_hear(&moved, &mut |event| {
            if let Event::Resumed { step } = event {
                resumed = *step;
            }
        });
        assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
        assert_eq!(resumed, 3);
        assert_eq!(Results::of(&moved), Results::of(&whole));
        fs::remove_dir_all(&archive).unwrap();
        let _ = fs::remove_dir_all(&recipe.run.dir);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_stop_together_when_their_directory_is_moved() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let archive = place.dir.path().canonicalize().unwrap().join("archive");
    let stop = AtomicBool::new(false);
    let ended = on_ranks(2, |world| {
        run_in(world, &recipe, RunOptions::new(&stop), &mut |event| {
            if matches!(event, Event::Step { step: 3, .. }) {
                fs::rename(&recipe.run.dir, &archive).unwrap();
            }
        })
    });
    assert!(matches!(&ended[0], Err(Error::RunMoved { step: Some(3), .. })), "{:?}", ended[0]);
    assert!(
        matches!(&ended[1], Err(Error::Step(moh_step::Error::OtherRank { rank: 0 }))),
        "{:?}",
        ended[1]
    );
    assert!(!recipe.run.dir.exists());
    assert!(archive.join("checkpoints/step-3/manifest.json").is_file());
}

#[cfg(unix)]
#[test]
fn a_removed_directory_ends_the_run_and_is_not_made_again() {
    let place = TestRun::new();
    for every in ["checkpoint.every_steps=1", "checkpoint.every_steps=0"] {
        let recipe = place.recipe(&[every]);
        let error = disturbed(&recipe, |dir| while fs::remove_dir_all(dir).is_err() {});
        assert!(matches!(error, Error::RunRemoved { .. }), "{error}");
        assert!(!recipe.run.dir.exists());
    }
    // After the last step, before the export.
    let recipe = place.recipe(&[]);
    let done = Start::default().run_and_hear(&recipe, &mut |event| {
        if matches!(event, Event::Checkpoint { step: 10, .. }) {
            fs::remove_dir_all(&recipe.run.dir).unwrap();
        }
    });
    assert!(matches!(done, Err(Error::RunRemoved { .. })), "{done:?}");
    assert!(!recipe.run.dir.exists());
}

#[test]
fn an_export_with_other_files_is_kept_when_the_run_goes_on() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let export = RunDirectory::new(&recipe.run.dir).export();
    finish(&recipe);
    fs::write(export.join("README.md"), "mine").unwrap();
    fs::write(export.join("model.gguf"), "mine").unwrap();
    let earlier = files(&export);
    let longer = place.recipe(&["stage.moh.tokens=384"]);
    let heard = warnings(&longer);
    let aside = recipe.run.dir.join("export-before-step-11");
    assert!(heard.iter().any(|text| text.ends_with("export-before-step-11")), "{heard:?}");
    for (path, bytes) in earlier {
        let name = path.file_name().unwrap();
        assert_eq!(fs::read(aside.join(name)).unwrap(), bytes);
    }
    assert!(!export.join("model.gguf").exists() && export.join("config.json").is_file());
    // One that is no model is kept too, and one with the names of an export is replaced. What earlier versions
    // recorded of an export is not read.
    fs::remove_file(export.join("config.json")).unwrap();
    let heard = warnings(&place.recipe(&["stage.moh.tokens=448"]));
    assert!(heard.iter().any(|text| text.ends_with("export-before-step-12")), "{heard:?}");
    let record = recipe.run.dir.join("exported-files.json");
    fs::write(&record, "{").unwrap();
    fs::write(export.join("README.md"), "mine").unwrap();
    assert!(warnings(&place.recipe(&["stage.moh.tokens=512"])).is_empty());
    assert!(!recipe.run.dir.join("export-before-step-13").exists());
    assert_ne!(fs::read(export.join("README.md")).unwrap(), b"mine");
    assert_eq!(fs::read(&record).unwrap(), b"{");
}
