//! Starts a run, in three phases: its recipe is resolved (`resolve.rs`), its directory is locked and checked
//! (`lock.rs`), and its remaining steps are trained (`train.rs`). Each phase uses the result of the phase before it.

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

static NO_STEPS: TraceSteps = TraceSteps::NONE;

/// Options to start and stop a run.
#[derive(Debug, Clone, Copy)]
pub struct RunOptions<'a> {
    /// If set on any rank, the run ends after the current step, or within an evaluation, the check of its inputs or the
    /// export. It ends with a checkpoint if it has done a step.
    pub stop: &'a AtomicBool,
    /// The steps for which each rank writes a timeline.
    pub trace: &'a TraceSteps,
    /// Renames the run directory of an earlier run, and starts a new run.
    pub begin_anew: bool,
    /// Resumes from the checkpoint of this step, counted over all stages, and moves later checkpoints aside.
    pub resume_step: Option<u64>,
    /// The run stops with a checkpoint before this limit ends, by the first rank's clock.
    pub time_limit: Option<TimeLimit>,
    /// Returns the free bytes of a file system. Tests replace it.
    #[doc(hidden)]
    pub free_space: FreeSpace,
    /// The run that has trained the recipe's first stages. If the run directory is missing or empty, the run continues
    /// this parent, with the parent's checkpoints and logs as its own.
    pub parent: Option<&'a RunDirectory>,
    /// The name of the first rank's processor, for `machine.json`; empty if it is not known.
    pub processor: &'a str,
    /// The command that started the program, for errors that suggest a command. If it is empty, the command of the
    /// recipe alone is used.
    pub command: &'a str,
}

impl<'a> RunOptions<'a> {
    /// Returns options that resume an earlier run from its newest checkpoint, trace no steps, and have no time limit.
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

/// Runs `recipe`, or resumes it if its run directory has checkpoints. Errors name the recipe by `path`. `directory` is
/// the local directory of its `[model] from`, which a run that [keeps its model](RunDirectory::keeps_model) does not
/// need. All ranks of `world` call this function with the same recipe, and share each step's micro-batches. The first
/// rank writes the run directory and receives the events.
///
/// # Errors
/// Fails if the recipe, the model, the data or the run directory is invalid, or if the device or another rank fails.
/// Fails if the run directory has files but is not a run's, or if it is moved or removed while the run trains. Fails if
/// no completed checkpoint is left, or if the checkpoint of the step to resume from is missing. Fails if
/// `guard.patience` steps in a row are not applied, or if the last checkpoint cannot be written.
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

/// The inputs of a run besides its recipe.
struct Job<'a> {
    path: &'a Path,
    directory: Option<&'a Path>,
    group: &'a Group,
    options: RunOptions<'a>,
}
