//! A run that was interrupted, at any moment and in any way, ends as one that never was: the same
//! weights bit for bit, the same metrics but for the speed, the same summary.

mod damage;
mod evaluations;
mod interruption;
mod results;
mod stage_data;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::driver::{run_in, watch};
use crate::support::results::Results;
use crate::support::{TestRun, copy_running, files};
use moh_checkpoint::run_directory::RunDirectory;
use moh_comm::World;
use moh_kernels::Cpu;
use moh_recipe::Recipe;
use moh_step::Ranks;
use moh_train::{Error, Event, Outcome, RunOptions};

/// Steps of the recipe below: five of each stage.
const STEPS: u64 = 10;

/// As [`watch`], after the directory of an earlier run was renamed.
fn watch_anew(
    recipe: &Recipe,
    mut heard: impl FnMut(&Event<'_>, &AtomicBool),
) -> Result<Outcome, Error> {
    let stop = AtomicBool::new(false);
    let options = RunOptions { begin_anew: true, ..RunOptions::new(&stop) };
    run_in(&World::single(), recipe, options, &mut |event| heard(&event, &stop))
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
    let place = TestRun::new();
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
