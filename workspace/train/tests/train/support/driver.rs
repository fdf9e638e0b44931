//! Runs a recipe in this process: from a checkpoint, until a step, or with what a kill would leave.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use moh_comm::World;
use moh_kernels::open_device::OpenDevice;
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
        let stop = AtomicBool::new(false);
        let options = RunOptions { resume_step: self.resume_step, ..RunOptions::new(&stop) };
        run_in(&World::single(), recipe, options, &mut |event| {
            if let Event::Step { step, .. } = event {
                if step == self.stop_at {
                    stop.store(true, Ordering::Relaxed);
                }
                if let Some((_, copy)) = self.copy_at.filter(|(at, _)| *at == step) {
                    copy_running(&recipe.run.dir, copy);
                }
            }
            heard(&event);
        })
    }
}

/// Runs or resumes a recipe on the CPU, as a rank of `world`.
pub fn run_in(
    world: &World,
    recipe: &Recipe,
    options: RunOptions<'_>,
    heard: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, Error> {
    let directory = recipe.model.from.as_deref().map(Path::new).filter(|path| path.is_dir());
    let (path, device) = (Path::new("recipe.toml"), OpenDevice::Cpu);
    moh_train::run(&mut recipe.clone(), path, directory, device, world, options, heard)
}

/// Runs or resumes a recipe, and hears its events with what asks it to stop.
pub fn watch(
    recipe: &Recipe,
    mut heard: impl FnMut(&Event<'_>, &AtomicBool),
) -> Result<Outcome, Error> {
    let stop = AtomicBool::new(false);
    run_in(&World::single(), recipe, RunOptions::new(&stop), &mut |event| heard(&event, &stop))
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
