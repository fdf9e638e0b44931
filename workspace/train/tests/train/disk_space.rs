//! The room that a run needs is known before its first step.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::driver::run_in;
use crate::support::{TestRun, files, run_of};
use moh_comm::World;
use moh_recipe::Recipe;
use moh_train::{Error, Event, FreeSpace, Outcome, Result, RunOptions};

/// Runs a recipe on a file system with `free_space`, until `stop_at`, and returns its warnings.
fn run_with(
    recipe: &Recipe,
    free_space: FreeSpace,
    stop_at: Option<u64>,
) -> (Result<Outcome>, Vec<String>) {
    let (stop, mut warnings) = (AtomicBool::new(false), Vec::new());
    let options = RunOptions { free_space, ..RunOptions::new(&stop) };
    let done = run_in(&World::single(), recipe, options, &mut |event| match event {
        Event::Warning { text } => warnings.push(text.to_owned()),
        Event::Step { step, .. } if Some(step) == stop_at => stop.store(true, Ordering::Relaxed),
        _ => {}
    });
    (done, warnings)
}

/// Returns the bytes that the run writes and the bytes of one checkpoint, as its refusal reports them.
fn needed(recipe: &Recipe) -> (u64, u64) {
    match run_with(recipe, |_| Ok(Some(1)), None).0 {
        Err(Error::NoRoom { needed, checkpoint, .. }) => (needed, checkpoint),
        other => panic!("{other:?}"),
    }
}

/// Returns the bytes of the checkpoints and of the export.
fn written(recipe: &Recipe) -> u64 {
    let run = run_of(recipe);
    [run.checkpoints(), run.export()].iter().map(|path| bytes(path)).sum()
}

fn bytes(path: &Path) -> u64 {
    files(path).values().map(|file| file.len() as u64).sum()
}

/// All six checkpoints are kept.
const ALL_KEPT: [&str; 4] = [
    "checkpoint.keep=9",
    "model.new.hidden_size=64",
    "model.new.head_dim=16",
    "model.new.intermediate_size=128",
];

#[test]
fn what_a_run_needs_is_what_it_writes_and_hardly_more() {
    let learned = "stage.moh.moh={ router = 'two-stage', shared_heads = 1, routed_top_k = 2 }";
    let fitted = "stage.moh.moh={ router = 'linear', shared_heads = 1, routed_top_k = 2, \
                  calibration = { tokens = 128 } }";
    for types in [
        &["run.dtype=f32"][..],
        &["run.dtype=bf16", "precision.moments=bf16"],
        &["run.dtype=f32", learned],
        &["run.dtype=f32", fitted],
    ] {
        let place = TestRun::new();
        let recipe = place.recipe(&[&ALL_KEPT[..], types].concat());
        let (needed, _) = needed(&recipe);
        assert!(matches!(
            run_with(&recipe, |_| Ok(Some(u64::MAX)), None).0,
            Ok(Outcome::Finished(_))
        ));
        let written = written(&recipe);
        assert!(needed >= written, "{types:?}: {needed} for {written}");
        assert!(needed as f64 <= 1.1 * written as f64, "{types:?}: {needed} for {written}");
    }
}

#[test]
fn a_run_without_room_is_refused_before_any_work() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let (done, _) = run_with(&recipe, |_| Ok(Some(1000)), None);
    let text = done.unwrap_err().to_string();
    assert!(text.contains("run: the run writes ") && text.contains("1000 B free"), "{text}");
    let advice = "free some, lower checkpoint.keep, or choose another run.dir";
    assert!(text.contains("for 3 checkpoints of ") && text.ends_with(advice), "{text}");
    let run = run_of(&recipe);
    assert!(!run.metrics().exists() && !run.inputs().exists() && !run.checkpoints().exists());
}

#[test]
fn what_older_checkpoints_have_is_not_needed_again() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let (before, checkpoint) = needed(&recipe);
    let stopped = run_with(&recipe, |_| Ok(Some(u64::MAX)), Some(6)).0;
    assert_eq!(stopped.unwrap(), Outcome::Stopped { step: 6 });
    let (after, _) = needed(&recipe);
    let existing = bytes(&run_of(&recipe).checkpoints());
    assert!(existing > checkpoint && after == before - existing, "{before}, {after}, {existing}");
    // A run that has finished needs nothing.
    assert!(matches!(run_with(&recipe, |_| Ok(Some(u64::MAX)), None).0, Ok(Outcome::Finished(_))));
    let again = run_with(&recipe, |_| Ok(Some(1)), None).0;
    assert!(matches!(again, Ok(Outcome::AlreadyFinished(_))), "{again:?}");
}

#[test]
fn a_file_system_that_does_not_say_its_room_is_warned_of() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let (done, warnings) = run_with(&recipe, |_| Ok(None), Some(1));
    assert_eq!(done.unwrap(), Outcome::Stopped { step: 1 });
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("does not say how much room it has: the run writes "), "{warning}");
    let failed: FreeSpace = |_| Err(std::io::ErrorKind::Unsupported.into());
    let (done, warnings) = run_with(&recipe, failed, Some(2));
    assert_eq!(done.unwrap(), Outcome::Stopped { step: 2 });
    assert!(warnings[0].contains("how much room it has (unsupported): "), "{warnings:?}");
}
