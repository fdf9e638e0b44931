//! A run directory is marked by a run or it is refused, and a directory that is moved or removed under a run is not made
//! again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::support::driver::{Start, finish, run_in, stop_at};
use crate::support::results::Results;
use crate::support::{TestRun, copy_all, files, write_tokens};
use moh_checkpoint::run_directory::RunDirectory;
use moh_comm::World;
use moh_kernels::open_device::OpenDevice;
use moh_recipe::Recipe;
use moh_testkit::ranks::on_ranks;
use moh_train::{Error, Event, Outcome, RunOptions};

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
                matches!(
                    error,
                    Error::RunDirectory(moh_checkpoint::run_directory::Error::NotARun { .. })
                ),
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
    copy_all(&model, &marked.join("mine"));
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
    ] {
        recipe.run.dir = run_dir.clone();
        recipe.model.from = Some(from.display().to_string());
        recipe.data.sources[0].path = tokens.clone();
        let model_files: BTreeMap<PathBuf, Vec<u8>> = files(dir);
        let error = train_at(&recipe, path, Some(from), false).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(files(dir), model_files, "{expected}");
    }
    train_at(&recipe, other, Some(&model), false).unwrap();
    assert!(marked.join("mine/model.safetensors").is_file());
}

#[test]
fn beginning_anew_renames_the_directory_with_all_that_is_in_it() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let root = &recipe.run.dir;
    finish(&recipe);
    fs::write(root.join("notes.txt"), "mine").unwrap();
    let run = files(root);
    // As a run of an earlier version.
    fs::remove_file(root.join(".moh-run")).unwrap();
    train_at(&recipe, Path::new("recipe.toml"), None, true).unwrap();
    assert!(root.join(".moh-run").is_file() && !root.join("notes.txt").exists());
    let before = root.with_file_name("run.before-1");
    for (path, bytes) in run {
        let name = path.strip_prefix(root).unwrap();
        assert!(name.ends_with(".moh-run") || fs::read(before.join(name)).unwrap() == bytes);
    }
    // The earlier run is one.
    let moved = place.recipe(&[&dir_of(&before)]);
    assert!(matches!(train(&moved), Ok(Outcome::AlreadyFinished(_))));
    // Another process that trains is not disturbed.
    let _lock = RunDirectory::new(root).lock().unwrap();
    let error = train_at(&recipe, Path::new("recipe.toml"), None, true).unwrap_err();
    assert!(
        matches!(error, Error::RunDirectory(moh_checkpoint::run_directory::Error::Locked { .. })),
        "{error}"
    );
}

#[cfg(unix)]
#[test]
fn a_link_to_the_directory_of_a_run_that_begins_anew_stays() {
    let place = TestRun::new();
    let (recipe, linked) = (place.recipe(&[]), place.recipe_in("link"));
    finish(&recipe);
    std::os::unix::fs::symlink(&recipe.run.dir, &linked.run.dir).unwrap();
    train_at(&linked, Path::new("recipe.toml"), None, true).unwrap();
    assert!(linked.run.dir.is_symlink() && linked.run.dir.join("summary.json").is_file());
    assert!(recipe.run.dir.with_file_name("run.before-1").join("summary.json").is_file());
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
fn a_run_whose_files_have_what_only_earlier_versions_wrote_resumes() {
    let place = TestRun::new();
    let whole = place.recipe_in("whole");
    finish(&whole);
    let recipe = place.recipe(&[]);
    let run = RunDirectory::new(&recipe.run.dir);
    stop_at(&recipe, 3);
    let edit = |path: &Path, from: &str, to: &str| {
        let text = fs::read_to_string(path).unwrap();
        assert_eq!(text.matches(from).count(), 1, "{text}");
        fs::write(path, text.replace(from, to)).unwrap();
    };
    for path in [run.recipe(), run.root().join(".moh-run")] {
        edit(&path, "patience = 10\n", "patience = 10\nrewind = 100\n");
    }
    let manifest = run.checkpoint(3).join("manifest.json");
    let hash = || blake3::hash(&fs::read(&manifest).unwrap()).to_hex().to_string();
    let before = hash();
    edit(&manifest, "\"in_a_row\":0,", "\"in_a_row\":0,\"rewinds\":1,");
    edit(&manifest.with_extension("json.b3"), &before, &hash());
    let mut resumed = 0;
    let stored = RunDirectory::load_recipe(&run.recipe(), &[]).unwrap();
    let done = Start::default().run_and_hear(&stored, &mut |event| {
        if let Event::Resumed { step } = event {
            resumed = *step;
        }
    });
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
    assert_eq!(resumed, 3);
    assert_eq!(Results::of(&recipe), Results::of(&whole));
    assert!(!run.root().join("recipe-edited.toml").exists());
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

#[test]
fn a_run_whose_directory_is_moved_ends_and_goes_on_in_the_new_place() {
    let place = TestRun::new();
    let whole = place.recipe_in("whole");
    finish(&whole);
    let moved = place.recipe_in("moved");
    for other_is_made in [false, true] {
        let recipe = place.recipe(&[]);
        let dir = &recipe.run.dir;
        let done = Start::default().run_and_hear(&recipe, &mut |event| {
            if matches!(event, Event::Checkpoint { step: 2, .. }) {
                fs::rename(dir, &moved.run.dir).unwrap();
                if other_is_made {
                    fs::create_dir(dir).unwrap();
                    fs::write(dir.join("mine"), "mine").unwrap();
                }
            }
        });
        let (error, mark) = (done.unwrap_err(), dir.join(".moh-run"));
        assert!(error.to_string().starts_with(mark.to_str().unwrap()), "{error}");
        match other_is_made {
            true => assert_eq!(names(dir), ["mine"]),
            false => assert!(!dir.exists()),
        }
        finish(&moved);
        assert_eq!(Results::of(&moved), Results::of(&whole));
        fs::remove_dir_all(&moved.run.dir).unwrap();
        let _ = fs::remove_dir_all(dir);
    }
}

#[test]
fn ranks_end_together_when_their_directory_is_moved() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let stop = AtomicBool::new(false);
    let ended = on_ranks(2, |world| {
        run_in(world, &recipe, RunOptions::new(&stop), &mut |event| {
            if matches!(event, Event::Step { step: 3, .. }) {
                fs::rename(&recipe.run.dir, place.dir.path().join("moved")).unwrap();
            }
        })
    });
    assert!(
        matches!(
            &ended[0],
            Err(Error::RunDirectory(moh_checkpoint::run_directory::Error::File(_)))
        ),
        "{:?}",
        ended[0]
    );
    assert!(
        matches!(&ended[1], Err(Error::Step(moh_step::Error::OtherRank { rank: 0 }))),
        "{:?}",
        ended[1]
    );
    assert!(!recipe.run.dir.exists());
}

#[cfg(unix)]
#[test]
fn a_removed_directory_ends_the_run_and_is_not_made_again() {
    let place = TestRun::new();
    for every in ["checkpoint.every_steps=1", "checkpoint.every_steps=0"] {
        let recipe = place.recipe(&[every]);
        let done = Start::default().run_and_hear(&recipe, &mut |event| {
            if matches!(event, Event::Step { step: 3, .. }) {
                while fs::remove_dir_all(&recipe.run.dir).is_err() {}
            }
        });
        let (error, mark) = (done.unwrap_err(), recipe.run.dir.join(".moh-run"));
        assert!(error.to_string().starts_with(mark.to_str().unwrap()), "{error}");
        assert!(!recipe.run.dir.exists());
    }
    // After the last step, before the export.
    let recipe = place.recipe(&[]);
    let done = Start::default().run_and_hear(&recipe, &mut |event| {
        if matches!(event, Event::Checkpoint { step: 10, .. }) {
            fs::remove_dir_all(&recipe.run.dir).unwrap();
        }
    });
    let error = done.unwrap_err().to_string();
    assert!(error.starts_with(recipe.run.dir.to_str().unwrap()), "{error}");
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
