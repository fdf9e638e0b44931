//! Runs a recipe in this process: on threads that act as ranks, from a checkpoint, until a step, or from the files that
//! a kill would leave.

use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use moh_comm::World;
use moh_kernels::open_device::OpenDevice;
use moh_recipe::Recipe;
use moh_train::{Event, Outcome, Replay, Result, RunOptions};

use super::results::Results;
use super::{TestRun, copy_running, run_of};
use moh_testkit::assert_refused;
use moh_testkit::ranks::on_ranks;

/// The start and the end of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Start<'a> {
    pub resume_step: Option<u64>,
    pub begin_anew: bool,
    /// Asked to stop during this step; 0 for never.
    pub stop_at: u64,
    /// Steps and paths: after the report of a step, the directory is copied to the path, as a process that was killed
    /// there leaves it.
    pub copies: &'a [(u64, &'a Path)],
}

impl Start<'_> {
    pub fn run(self, recipe: &Recipe) -> Result<Outcome> {
        self.run_and_hear(recipe, |_, _| {})
    }

    /// Runs or resumes a recipe, and passes the events to `heard`, with the flag that stops the run.
    pub fn run_and_hear(
        self,
        recipe: &Recipe,
        mut heard: impl FnMut(&Event<'_>, &AtomicBool),
    ) -> Result<Outcome> {
        let Start { resume_step, begin_anew, stop_at, copies } = self;
        let stop = AtomicBool::new(false);
        let options = RunOptions { resume_step, begin_anew, ..RunOptions::new(&stop) };
        run_in(&World::single(), recipe, options, &mut |event| {
            if let Event::Step { step, .. } = event {
                stop.fetch_or(step == stop_at, Ordering::Relaxed);
                for (_, copy) in copies.iter().filter(|(at, _)| *at == step) {
                    copy_running(&recipe.run.dir, copy);
                }
            }
            heard(&event, &stop);
        })
    }

    /// Runs or resumes a recipe to its end.
    #[track_caller]
    pub fn finish(self, recipe: &Recipe) -> Results {
        self.finish_and_hear(recipe, |_, _| {})
    }

    #[track_caller]
    pub fn finish_and_hear(
        self,
        recipe: &Recipe,
        heard: impl FnMut(&Event<'_>, &AtomicBool),
    ) -> Results {
        let done = self.run_and_hear(recipe, heard);
        assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
        Results::of(recipe)
    }
}

/// Runs or resumes a recipe on the CPU, as a rank of `world`.
pub fn run_in(
    world: &World,
    recipe: &Recipe,
    options: RunOptions<'_>,
    heard: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome> {
    let directory = recipe.model.from.as_deref().map(Path::new).filter(|path| path.is_dir());
    let (path, device) = (Path::new("recipe.toml"), OpenDevice::Cpu);
    moh_train::run(&mut recipe.clone(), path, directory, device, world, options, heard)
}

/// Runs or resumes a recipe, and passes its events to `heard`, with the flag that stops the run.
pub fn watch(recipe: &Recipe, heard: impl FnMut(&Event<'_>, &AtomicBool)) -> Result<Outcome> {
    Start::default().run_and_hear(recipe, heard)
}

pub fn run(recipe: &Recipe) -> Result<Outcome> {
    Start::default().run(recipe)
}

/// Returns the message of the error with which a recipe ends.
#[track_caller]
pub fn refusal(recipe: &Recipe) -> String {
    run(recipe).unwrap_err().to_string()
}

/// Checks that a recipe ends with an error that has this part in its message.
#[track_caller]
pub fn refuses(recipe: &Recipe, part: &str) {
    assert_refused(run(recipe), part);
}

/// Runs or resumes a recipe to its end.
#[track_caller]
pub fn finish(recipe: &Recipe) -> Results {
    Start::default().finish(recipe)
}

/// Resumes a recipe from the checkpoint of a step, and runs it to its end.
#[track_caller]
pub fn finish_from(recipe: &Recipe, step: u64) -> Results {
    Start { resume_step: Some(step), ..Start::default() }.finish(recipe)
}

/// Runs a recipe as [`finish`]; returns the values that `of` returns for the events.
#[track_caller]
pub fn heard<R>(recipe: &Recipe, of: impl Fn(&Event<'_>) -> Option<R>) -> Vec<R> {
    let mut found = Vec::new();
    Start::default().finish_and_hear(recipe, |event, _| found.extend(of(event)));
    found
}

/// Runs a recipe as [`finish`]; returns the warnings.
#[track_caller]
pub fn warnings(recipe: &Recipe) -> Vec<String> {
    heard(recipe, |event| match event {
        Event::Warning { text } => Some((*text).to_owned()),
        _ => None,
    })
}

/// Runs a recipe as [`finish`]; returns the steps after which the run was resumed.
#[track_caller]
pub fn resumed(recipe: &Recipe) -> Vec<u64> {
    heard(recipe, |event| match event {
        Event::Resumed { step } => Some(*step),
        _ => None,
    })
}

/// Runs or resumes a recipe until it stops with a checkpoint of `step`.
#[track_caller]
pub fn stop_at(recipe: &Recipe, step: u64) {
    let stopped = Start { stop_at: step, ..Start::default() }.run(recipe);
    assert_eq!(stopped.unwrap(), Outcome::Stopped { step });
}

/// Runs or resumes a recipe to its end, with a stop and a checkpoint at each of these steps.
#[track_caller]
pub fn finish_in_parts(recipe: &Recipe, steps: impl IntoIterator<Item = u64>) -> Results {
    steps.into_iter().for_each(|step| stop_at(recipe, step));
    finish(recipe)
}

/// Runs a recipe until an event asks it to stop.
pub fn stop_when(recipe: &Recipe, asks: impl Fn(&Event<'_>) -> bool) -> Outcome {
    let stopped = watch(recipe, |event, stop| {
        stop.fetch_or(asks(event), Ordering::Relaxed);
    });
    stopped.unwrap()
}

/// Returns the results of the recipe as it stands.
pub fn reference() -> &'static Results {
    static REFERENCE: OnceLock<Results> = OnceLock::new();
    REFERENCE.get_or_init(|| finish(&TestRun::new().recipe(&[])))
}

/// Runs a recipe on threads that act as ranks, each with one thread for the operators. Passes the first rank's events
/// on, with a flag that stops the `reached` ranks.
pub fn run_on(
    (ranks, reached): (usize, Range<usize>),
    recipe: &Recipe,
    heard: &(dyn Fn(&Event<'_>, &AtomicBool) + Sync),
) -> Vec<Result<Outcome>> {
    let stop = AtomicBool::new(false);
    on_ranks(ranks, |world| {
        let never = AtomicBool::new(false);
        let asked = if reached.contains(&world.rank()) { &stop } else { &never };
        run_in(world, recipe, RunOptions::new(asked), &mut |event| heard(&event, &stop))
    })
}

/// Runs a recipe on ranks until an event asks the `reached` ranks to stop. Checks that all ranks have the same outcome.
pub fn stop_ranks_when(
    ranks: (usize, Range<usize>),
    recipe: &Recipe,
    asks: impl Fn(&Event<'_>) -> bool + Sync,
) -> Outcome {
    let outcomes = run_on(ranks, recipe, &|event, stop| {
        stop.fetch_or(asks(event), Ordering::Relaxed);
    });
    let outcomes: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
    outcomes[0].clone()
}

#[track_caller]
pub fn finish_on(ranks: usize, recipe: &Recipe) -> Results {
    for done in run_on((ranks, 0..0), recipe, &|_, _| {}) {
        assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
    }
    Results::of(recipe)
}

/// Replays a step of a run, and reads the recipe as the program does.
pub fn replay(recipe: &Recipe, step: u64) -> Result<Replay> {
    let run = run_of(recipe);
    let stored = Recipe::load(&run.recipe(), &[])?;
    moh_train::replay(&run, stored, &run.recipe(), None, OpenDevice::Cpu, step)
}
