//! Tests of the run directory and of the recipes that it accepts.

use moh_recipe::Recipe;

use super::stored_recipe::may_change;
use super::*;

use moh_testkit::{SMALL_RECIPE, assert_refused};

fn empty() -> (tempfile::TempDir, RunDirectory) {
    let temporary = tempfile::tempdir().unwrap();
    let run = RunDirectory::new(temporary.path());
    (temporary, run)
}

fn stored(recipe: &Recipe) -> (tempfile::TempDir, RunDirectory) {
    let (temporary, run) = empty();
    store(&run, recipe).unwrap();
    (temporary, run)
}

/// Returns a run directory with a stored recipe and a checkpoint.
fn begun(recipe: &Recipe) -> (tempfile::TempDir, RunDirectory) {
    let (temporary, run) = stored(recipe);
    std::fs::create_dir_all(run.checkpoint(5)).unwrap();
    (temporary, run)
}

fn found(run: &RunDirectory) -> Recipe {
    Recipe::load(&run.recipe(), &[]).unwrap()
}

/// Checks and writes the recipe, as a run does at its start.
fn store(run: &RunDirectory, recipe: &Recipe) -> Result<()> {
    run.check_recipe(recipe, "moh-train --recipe small.toml")?;
    run.write_recipe(recipe).map(|_| ())
}

fn recipe(overrides: &[&str]) -> Recipe {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    Recipe::parse(SMALL_RECIPE, Path::new("small.toml"), &overrides).unwrap()
}

#[test]
fn two_processes_cannot_lock_one_directory() {
    let temporary = tempfile::tempdir().unwrap();
    let run = RunDirectory::new(temporary.path().join("a/b"));
    let lock = run.lock().unwrap();
    let error = run.lock().unwrap_err().to_string();
    assert!(error.ends_with(
        "b: another process trains in this run directory: wait for it, or use another run.dir"
    ));
    drop(lock);
    run.lock().unwrap();
}

#[test]
fn the_layout_has_the_documented_names() {
    let run = RunDirectory::new("r");
    assert_eq!(run.recipe(), Path::new("r/recipe.toml"));
    assert_eq!(run.metrics(), Path::new("r/metrics.jsonl"));
    assert_eq!(run.checkpoint(12), Path::new("r/checkpoints/step-12"));
    assert_eq!(run.tensorboard(), Path::new("r/tensorboard"));
    assert_eq!(run.export(), Path::new("r/export"));
    assert_eq!(run.trace(12, None), Path::new("r/trace-step-12.json"));
    assert_eq!(run.trace(12, Some(3)), Path::new("r/trace-step-12-rank-3.json"));
}

#[test]
fn only_complete_checkpoints_are_listed() {
    let (_temporary, run) = empty();
    assert!(run.checkpoint_steps().unwrap().is_empty());
    for name in [
        "step-100",
        "step-20",
        ".tmp-step-30",
        "damaged-step-40",
        "step-",
        "step-+5",
        "step-007",
        "step-9x",
    ] {
        std::fs::create_dir_all(run.checkpoints().join(name)).unwrap();
    }
    assert_eq!(run.checkpoint_steps().unwrap(), [20, 100]);
}

#[test]
fn what_was_being_written_is_cleared_and_the_rest_stays() {
    let (_temporary, run) = empty();
    run.clear_remains().unwrap();
    let remains = [run.checkpoints().join(".tmp-step-9"), run.root().join(".tmp-export-Ab3dE9")];
    let kept = [
        run.checkpoint(8),
        run.checkpoints().join("damaged-step-7"),
        run.checkpoints().join(".tmp-mine"),
        run.root().join(".tmp-mine"),
        run.root().join(".tmp-export-mine"),
        run.tensorboard(),
    ];
    for directory in remains.iter().chain(&kept) {
        std::fs::create_dir_all(directory).unwrap();
        std::fs::write(directory.join("file"), "").unwrap();
    }
    run.clear_remains().unwrap();
    assert!(remains.iter().all(|path| !path.exists()));
    assert!(kept.iter().all(|path| path.join("file").is_file()));
}

#[test]
fn a_recipe_that_an_earlier_version_has_stored_is_read_and_is_no_users() {
    let recipe = recipe(&[]);
    let (temporary, run) = stored(&recipe);
    for path in [run.recipe(), run.mark_path()] {
        let text = std::fs::read_to_string(&path).unwrap();
        let earlier = text.replace("patience = 10\n", "patience = 10\nrewind = 50\n");
        assert_ne!(earlier, text);
        std::fs::write(path, earlier).unwrap();
    }
    assert_eq!(run.stored_recipe().unwrap(), recipe);
    let overrides = ["run.seed=1".to_owned()];
    assert_eq!(RunDirectory::load_recipe(&run.recipe(), &overrides).unwrap(), recipe);
    // In any other recipe the key is unknown.
    let copy = temporary.path().join("copy.toml");
    std::fs::copy(run.recipe(), &copy).unwrap();
    assert_refused(RunDirectory::load_recipe(&copy, &[]), "guard.rewind: unknown key");
    assert_eq!(run.write_recipe(&recipe).unwrap(), None);
    assert_eq!(found(&run), recipe);
}

#[test]
fn a_run_without_checkpoints_takes_any_recipe() {
    let first = recipe(&[]);
    let (_temporary, run) = stored(&first);
    assert_eq!(found(&run), first);
    let other = recipe(&["run.seed=9"]);
    store(&run, &other).unwrap();
    assert_eq!(found(&run), other);
}

#[test]
fn a_continued_run_reports_every_changed_key_and_keeps_the_stored_recipe() {
    let first = recipe(&[]);
    let (_temporary, run) = begun(&first);
    store(&run, &first).unwrap();

    let changed = recipe(&["run.seed=9", "stage.moh.learning_rate.min=0", "log.every_steps=7"]);
    let error = store(&run, &changed).unwrap_err().to_string();
    assert!(error.contains("recipe.toml: the recipe differs from the run's"), "{error}");
    let changes: Vec<&str> = error.lines().filter(|line| line.contains(": was ")).collect();
    assert_eq!(changes[0], "  run.seed: was 1, now 9");
    assert!(
        changes.len() == 2 && changes[1].starts_with("  stage.moh.learning_rate.min: "),
        "{error}"
    );
    assert_eq!(found(&run), first);
}

#[test]
fn a_resumed_run_accepts_allowed_changes_and_stores_them() {
    let (_temporary, run) = begun(&recipe(&[]));
    let changed = recipe(&[
        "run.dir=elsewhere",
        "log.tensorboard=false",
        "checkpoint.keep=9",
        "data.validation.every_steps=3",
        "memory.recompute=none",
        "guard.patience=3",
    ]);
    store(&run, &changed).unwrap();
    assert_eq!(found(&run), changed);
}

#[test]
fn a_resumed_run_accepts_longer_stages_and_refuses_shorter_ones() {
    let first = recipe(&[]);
    let (_temporary, run) = begun(&first);
    assert!(!run.check_recipe(&first, "").unwrap());
    let tokens = |change: i64| {
        let stage = &first.stages[1];
        let tokens = stage.tokens.checked_add_signed(change).unwrap();
        recipe(&[&format!("stage.{}.tokens={tokens}", stage.name)])
    };
    assert!(run.check_recipe(&tokens(1), "").unwrap());
    assert_refused(run.check_recipe(&tokens(-1), ""), "the recipe differs from the run's");
}

#[test]
fn a_stage_named_like_a_key_may_change_that_key_alone() {
    assert!(may_change("stage.parallel.parallel.tensor"));
    for key in [
        "stage.parallel.tokens",
        "stage.parallel.learning_rate.max",
        "parallel.tensor",
        "data.validations",
    ] {
        assert!(!may_change(key), "{key}");
    }
}

#[test]
fn a_damaged_stored_recipe_is_an_error_that_names_it() {
    let (_temporary, run) = empty();
    std::fs::create_dir_all(run.checkpoint(5)).unwrap();
    assert_refused(store(&run, &recipe(&[])), "recipe.toml");
    std::fs::write(run.recipe(), "[run]\nseed = ").unwrap();
    assert_refused(store(&run, &recipe(&[])), "recipe.toml");
}
