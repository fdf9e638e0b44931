//! A run that was interrupted, at any moment and in any way, ends as a run without interruption: the same weights bit
//! for bit, the same metrics except the speed, the same summary.

mod damage;
mod evaluations;
mod interruption;
mod results;
mod stage_data;

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::driver::{Start, finish};
use crate::support::results::Results;
use crate::support::{TestRun, copy_running, files, run_of};
use moh_checkpoint::run_directory::RunDirectory;
use moh_recipe::Recipe;
use moh_train::Event;

/// Steps of the recipe below: five of each stage.
const STEPS: u64 = 10;

/// Waits until the newest checkpoint is complete and older checkpoints are removed.
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

/// Runs a recipe to its end, and copies its directory after the report of a step, before anything follows. A process
/// that was killed there would leave the same files, if the checkpoint of the step before was written by then.
fn killed_at(recipe: &Recipe, copies: &[(u64, &Path)]) -> Results {
    Start::default().finish_and_hear(recipe, |event, _| {
        for (_, copy) in
            copies.iter().filter(|(at, _)| matches!(event, Event::Step { step, .. } if step == at))
        {
            wait_for_checkpoints(&run_of(recipe), 2);
            copy_running(&recipe.run.dir, copy);
        }
    })
}

/// Returns the results of a recipe's uninterrupted run.
fn uninterrupted(overrides: &[&str]) -> Results {
    finish(&TestRun::new().recipe(overrides))
}

/// Returns the names below a run directory that no finished run has.
fn remains(recipe: &Recipe) -> Vec<PathBuf> {
    let is_remain = |path: &PathBuf| path.to_string_lossy().contains(".tmp-");
    files(&recipe.run.dir).into_keys().filter(is_remain).collect()
}
