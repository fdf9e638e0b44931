//! A run directory is marked by a run or it is refused. A directory that is moved or removed while the run trains is
//! not created again.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use crate::support::driver::{
    Start, finish, reference, resumed, run, run_on, stop_at, warnings, watch,
};
use crate::support::results::Results;
use crate::support::{TestRun, files, run_of, write_tokens};
use moh_checkpoint::run_directory::RunDirectory;
use moh_comm::World;
use moh_kernels::open_device::OpenDevice;
use moh_recipe::Recipe;
use moh_testkit::programs::copy_all;
use moh_train::{Error, Event, Outcome, RunOptions};

fn refusal_at(recipe: &Recipe, path: &Path) -> String {
    let (stop, world) = (AtomicBool::new(false), World::single());
    let directory = recipe.model.from.as_deref().map(Path::new);
    let (device, options) = (OpenDevice::Cpu, RunOptions::new(&stop));
    let done =
        moh_train::run(&mut recipe.clone(), path, directory, device, &world, options, &mut |_| {});
    done.unwrap_err().to_string()
}

/// Starts a new run, in a directory that may have a run.
const ANEW: Start<'_> = Start { resume_step: None, begin_anew: true, stop_at: 0, copies: &[] };

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
        for start in [Start::default(), ANEW] {
            let error = start.run(&recipe).unwrap_err().to_string();
            let expected = format!("run: is not a run directory, and {holds}");
            assert!(error.contains(&expected) && error.contains("/run-2"), "{error}");
            assert_eq!(files(root), before);
        }
        fs::remove_dir_all(root).unwrap();
    }
    // An empty directory is accepted, also with the files of a process that ended before it marked the directory.
    fs::create_dir_all(root).unwrap();
    fs::write(root.join(".lock"), "").unwrap();
    fs::write(root.join(".tmp-.moh-run-abcdef"), "").unwrap();
    finish(&recipe);
    assert!(root.join(".moh-run").is_file());
}

#[test]
fn a_new_run_does_not_touch_what_it_reads() {
    let place = TestRun::new();
    let earlier = place.recipe_in("earlier", &[]);
    finish(&earlier);
    let (dir, model) = (place.dir.path(), run_of(&earlier).export());
    let mut recipe = place.recipe_from("", "run", &[]);
    recipe.stages.remove(0);
    // A directory that a run has marked, which ended before its first checkpoint.
    let marked = dir.join("marked");
    fs::create_dir(&marked).unwrap();
    fs::copy(earlier.run.dir.join(".moh-run"), marked.join(".moh-run")).unwrap();
    copy_all(&model, &marked.join("mine"));
    write_tokens(&marked.join("tokens"), 1, 60);
    fs::write(marked.join("variant.toml"), "").unwrap();
    let other = Path::new("recipe.toml");
    let source = &recipe.data.sources[0].path.clone();
    for (run_dir, from, tokens, path, expected) in [
        (&marked, &marked.join("mine"), source, other, "run.dir holds"),
        (&marked, &marked, source, other, "run.dir is"),
        (&model.join("run"), &model, source, other, "run.dir lies inside"),
        (&marked, &model, &marked.join("tokens"), other, "data.sources names"),
        (&marked, &model, source, &marked.join("variant.toml"), "--recipe names"),
    ] {
        recipe.run.dir = run_dir.clone();
        recipe.model.from = Some(from.display().to_string());
        recipe.data.sources[0].path = tokens.clone();
        let before = files(dir);
        let error = refusal_at(&recipe, path);
        assert!(error.contains(expected), "{error}");
        assert_eq!(files(dir), before, "{expected}");
    }
    recipe.data.sources[0].path.clone_from(source);
    finish(&recipe);
    assert!(marked.join("mine/model.safetensors").is_file());
}

#[test]
fn beginning_anew_renames_the_directory_with_all_that_is_in_it() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let root = &recipe.run.dir;
    finish(&recipe);
    fs::write(root.join("notes.txt"), "mine").unwrap();
    let all = files(root);
    // As a run of an earlier version.
    fs::remove_file(root.join(".moh-run")).unwrap();
    ANEW.finish(&recipe);
    assert!(root.join(".moh-run").is_file() && !root.join("notes.txt").exists());
    let before = root.with_file_name("run.before-1");
    for (path, bytes) in all {
        let name = path.strip_prefix(root).unwrap();
        assert!(name.ends_with(".moh-run") || fs::read(before.join(name)).unwrap() == bytes);
    }
    // The renamed directory is still a run.
    let moved = place.recipe_in("run.before-1", &[]);
    assert!(matches!(run(&moved), Ok(Outcome::AlreadyFinished(_))));
    // Another process that trains is not disturbed.
    let _lock = RunDirectory::new(root).lock().unwrap();
    let error = ANEW.run(&recipe).unwrap_err().to_string();
    assert!(error.contains("run: another process trains in this run directory"), "{error}");
}

#[cfg(unix)]
#[test]
fn a_link_to_the_directory_of_a_run_that_begins_anew_stays() {
    let place = TestRun::new();
    let (recipe, linked) = (place.recipe(&[]), place.recipe_in("link", &[]));
    finish(&recipe);
    std::os::unix::fs::symlink(&recipe.run.dir, &linked.run.dir).unwrap();
    ANEW.finish(&linked);
    assert!(linked.run.dir.is_symlink() && linked.run.dir.join("summary.json").is_file());
    assert!(recipe.run.dir.with_file_name("run.before-1").join("summary.json").is_file());
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
        assert_eq!(resumed(&recipe), [3]);
        assert!(root.join(".moh-run").is_file());
        fs::remove_dir_all(root).unwrap();
    }
}

#[test]
fn a_run_whose_files_have_what_only_earlier_versions_wrote_resumes() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let run = run_of(&recipe);
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
    let stored = RunDirectory::load_recipe(&run.recipe(), &[]).unwrap();
    assert_eq!(resumed(&stored), [3]);
    assert_eq!(Results::of(&recipe), *reference());
    assert!(!run.root().join("recipe-edited.toml").exists());
}

#[test]
fn an_edited_recipe_of_the_run_is_compared_and_kept() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let path = run_of(&recipe).recipe();
    stop_at(&recipe, 3);
    let text = fs::read_to_string(&path).unwrap();
    let load = |text: &str| {
        fs::write(&path, text).unwrap();
        Recipe::load(&path, &[]).unwrap()
    };
    // The run's first recipe is known, whatever the file has.
    let error = refusal_at(&load(&text.replace("seed = 1", "seed = 2 # mine")), &path);
    assert!(error.contains("run.seed: was 1, now 2"), "{error}");
    assert!(fs::read_to_string(&path).unwrap().contains("# mine"));
    let edited = format!("# Longer.\n{}", text.replace("every_steps = 1", "every_steps = 5"));
    let edited = edited.replacen("tokens = 320", "tokens = 320 # as planned", 1);
    finish(&load(&edited));
    assert_eq!(fs::read_to_string(path.with_file_name("recipe-edited.toml")).unwrap(), edited);
    let stored = run_of(&recipe).stored_recipe().unwrap();
    assert_eq!(Recipe::load(&path, &[]).unwrap(), stored);
    assert!(!path.with_file_name("recipe-edited-2.toml").exists());
}

#[test]
fn a_run_whose_directory_is_moved_ends_and_goes_on_in_the_new_place() {
    let place = TestRun::new();
    let moved = place.recipe_in("moved", &[]);
    for other_is_made in [false, true] {
        let recipe = place.recipe(&[]);
        let dir = &recipe.run.dir;
        let done = watch(&recipe, |event, _| {
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
            true => assert!(files(dir).into_keys().eq([dir.join("mine")])),
            false => assert!(!dir.exists()),
        }
        assert_eq!(finish(&moved), *reference());
        fs::remove_dir_all(&moved.run.dir).unwrap();
        let _ = fs::remove_dir_all(dir);
    }
}

#[test]
fn ranks_end_together_when_their_directory_is_moved() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let ended = run_on((2, 0..0), &recipe, &|event, _| {
        if matches!(event, Event::Step { step: 3, .. }) {
            fs::rename(&recipe.run.dir, place.path("moved")).unwrap();
        }
    });
    let [Err(error), Err(other)] = &ended[..] else { panic!("{ended:?}") };
    let is_file = matches!(error, Error::Checkpoint(moh_checkpoint::Error::File(_)));
    assert!(is_file, "{error}");
    assert!(matches!(other, Error::Step(moh_step::Error::OtherRank { rank: 0 })), "{other}");
    assert!(!recipe.run.dir.exists());
}

#[cfg(unix)]
#[test]
fn a_removed_directory_ends_the_run_and_is_not_made_again() {
    let place = TestRun::new();
    for every in ["checkpoint.every_steps=1", "checkpoint.every_steps=0"] {
        let recipe = place.recipe(&[every]);
        let done = watch(&recipe, |event, _| {
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
    let done = watch(&recipe, |event, _| {
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
    let (root, export) = (&recipe.run.dir, run_of(&recipe).export());
    finish(&recipe);
    fs::write(export.join("README.md"), "mine").unwrap();
    fs::write(export.join("model.gguf"), "mine").unwrap();
    let earlier = files(&export);
    let heard = warnings(&place.recipe(&["stage.moh.tokens=384"]));
    assert!(heard.iter().any(|text| text.ends_with("export-before-step-11")), "{heard:?}");
    for (path, bytes) in earlier {
        let kept = root.join("export-before-step-11").join(path.file_name().unwrap());
        assert_eq!(fs::read(kept).unwrap(), bytes);
    }
    assert!(!export.join("model.gguf").exists() && export.join("config.json").is_file());
    // A directory that is not a model is kept too, and a directory with the names of an export is replaced. Records of
    // an export by earlier versions are not read.
    fs::remove_file(export.join("config.json")).unwrap();
    let heard = warnings(&place.recipe(&["stage.moh.tokens=448"]));
    assert!(heard.iter().any(|text| text.ends_with("export-before-step-12")), "{heard:?}");
    let record = root.join("exported-files.json");
    fs::write(&record, "{").unwrap();
    fs::write(export.join("README.md"), "mine").unwrap();
    assert!(warnings(&place.recipe(&["stage.moh.tokens=512"])).is_empty());
    assert!(!root.join("export-before-step-13").exists());
    assert_ne!(fs::read(export.join("README.md")).unwrap(), b"mine");
    assert_eq!(fs::read(&record).unwrap(), b"{");
}
