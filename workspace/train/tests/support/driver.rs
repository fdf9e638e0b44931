//! Runs a recipe in this process: from a checkpoint, until a step, or with what a kill would leave.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use moh_comm::World;
use moh_device::OpenDevice;
use moh_recipe::Recipe;
use moh_train::{Error, Event, Outcome, RunOptions};

use super::copy_running;

/// How a run starts and ends.
#[derive(Debug, Clone, Copy, Default)]
pub struct Start<'a> {
    pub resume_step: Option<u64>,
    /// Asked to stop during this step; 0 for never.
    pub stop_at: u64,
    /// Where its directory is copied to after the report of a step.
    pub copy_at: Option<(u64, &'a Path)>,
}

impl Start<'_> {
    pub fn run(self, recipe: &Recipe) -> Result<Outcome, Error> {
        self.run_and_hear(recipe, &mut |_| {})
    }

    pub fn run_and_hear(
        self,
        recipe: &Recipe,
        heard: &mut dyn FnMut(&Event<'_>),
    ) -> Result<Outcome, Error> {
        let (stop, world) = (AtomicBool::new(false), World::single());
        let options = RunOptions { resume_step: self.resume_step, ..RunOptions::new(&stop) };
        let directory = recipe.model.from.as_deref().map(Path::new).filter(|path| path.is_dir());
        let (path, ranks) = (Path::new("recipe.toml"), (OpenDevice::Cpu, &world));
        let mut recipe = recipe.clone();
        let dir = recipe.run.dir.clone();
        moh_train::run(&mut recipe, path, directory, ranks, options, &mut |event| {
            if let Event::Step { step, .. } = event {
                if step == self.stop_at {
                    stop.store(true, Ordering::Relaxed);
                }
                if let Some((_, copy)) = self.copy_at.filter(|(at, _)| *at == step) {
                    copy_running(&dir, copy);
                }
            }
            heard(&event);
        })
    }
}

/// Runs or resumes a recipe to its end.
pub fn finish(recipe: &Recipe) {
    let done = Start::default().run(recipe);
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
}

/// Runs or resumes a recipe until it stops with a checkpoint of `step`.
pub fn stop_at(recipe: &Recipe, step: u64) {
    let stopped = Start { stop_at: step, ..Start::default() }.run(recipe);
    assert_eq!(stopped.unwrap(), Outcome::Stopped { step });
}
