//! Starts a run, in three phases: its recipe is resolved (`resolve.rs`), its directory is locked and checked
//! (`lock.rs`), and its remaining steps are trained (`train.rs`). Each phase takes the result of the
//! one before it.

mod lock;
mod resolve;
mod train;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::TraceSteps;
use moh_comm::{Group, World};
use moh_kernels::Backend;
use moh_kernels::open_device::{OnDevice, OpenDevice};
use moh_recipe::Recipe;
use moh_step::Ranks;

use self::resolve::Resolved;
use crate::run_inputs::InputCheck;
use crate::{Event, FreeSpace, Outcome, Result, TimeLimit, free_space};

pub(crate) use self::resolve::adopt_origin;
pub use self::resolve::first_that_keeps_model;
pub(crate) use self::train::types;

static NO_STEPS: TraceSteps = TraceSteps::NONE;

/// How a run is started and stopped.
#[derive(Debug, Clone, Copy)]
pub struct RunOptions<'a> {
    /// Setting it on any rank ends the run after the current step, or within the evaluation, the check of
    /// its inputs or the export that it is at, with a checkpoint if it has taken a step.
    pub stop: &'a AtomicBool,
    /// The steps of which each rank writes a timeline.
    pub trace: &'a TraceSteps,
    /// Renames the run directory of an earlier run, and begins again.
    pub begin_anew: bool,
    /// Resumes from the checkpoint of this step, counted over all stages, and moves later checkpoints aside.
    pub resume_step: Option<u64>,
    /// The run stops with a checkpoint before this limit ends, by the first rank's clock.
    pub time_limit: Option<TimeLimit>,
    /// Tells the free bytes of a file system: for tests.
    #[doc(hidden)]
    pub free_space: FreeSpace,
    /// The run that has trained the recipe's first stages: a run whose directory is absent or empty continues
    /// it, with its checkpoints and logs as its own.
    pub parent: Option<&'a RunDirectory>,
    /// The name of the first rank's processor, for `machine.json`; empty if it is not known.
    pub processor: &'a str,
    /// The command that started the program, for errors that name another one; if it is empty, that of the recipe
    /// alone.
    pub command: &'a str,
}

impl<'a> RunOptions<'a> {
    /// Resumes an earlier run from its newest checkpoint, traces no steps, and has no time limit.
    pub fn new(stop: &'a AtomicBool) -> Self {
        RunOptions {
            stop,
            trace: &NO_STEPS,
            begin_anew: false,
            resume_step: None,
            time_limit: None,
            free_space,
            parent: None,
            processor: "",
            command: "",
        }
    }
}

/// Runs `recipe`, or resumes it if its run directory has checkpoints. Errors name the recipe
/// `path`; `directory` is the local directory of its `[model] from`, which a run that
/// [keeps its model](RunDirectory::keeps_model) does not need. All ranks of `world` call this
/// function with the same recipe and share each step's micro-batches; the first rank writes the run
/// directory and receives the events.
///
/// # Errors
/// Fails if the recipe, the model, the data or the run directory is invalid, if the run directory is not empty and no
/// run's, or is moved or removed while the run trains, if the device or another rank fails, if a run that has
/// completed checkpoints has none left, if it has none of the step to resume from, if as many steps in a row are not
/// applied as `guard.patience` says, or if the last checkpoint cannot be written.
pub fn run(
    recipe: &mut Recipe,
    path: &Path,
    directory: Option<&Path>,
    device: OpenDevice,
    world: &World,
    options: RunOptions<'_>,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome> {
    let job = Job { path, directory, group: world.group(), options };
    device.run(Start { job: &job, recipe, events })
}

/// A run before its device is known.
struct Start<'a> {
    job: &'a Job<'a>,
    recipe: &'a mut Recipe,
    events: &'a mut dyn FnMut(Event<'_>),
}

impl OnDevice for Start<'_> {
    type Output = Result<Outcome>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let Start { job, recipe, events } = self;
        let ranks = Ranks::new(backend.clone(), job.group.clone())?;
        let (run, summary) = Resolved::new(job, ranks, recipe)?.lock(events)?;
        let Some(summary) = summary else { return run.train(backend, events) };
        Ok(match run.check_finished(events)? {
            InputCheck::Passed => Outcome::AlreadyFinished(summary),
            InputCheck::Stopped => Outcome::StoppedBeforeTraining,
        })
    }
}

/// The inputs of a run beside its recipe.
struct Job<'a> {
    path: &'a Path,
    directory: Option<&'a Path>,
    group: &'a Group,
    options: RunOptions<'a>,
}
