//! Training as one of the ranks.

use std::io::{Write as _, stdout};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::{Summary, TraceSteps};
use moh_comm::{Fault, Launch, Launcher, World, WorldOptions};
use moh_kernels::open_device::OpenDevice;
use moh_kernels::span;
use moh_program::exit::{self, StoppedEarly};
use moh_program::processor;
use moh_recipe::Recipe;
use moh_recipe::shell::command;
use moh_train::{Comparison, Outcome, RunOptions, TimeLimit, open_device};

use crate::report::report;
use crate::run_view::RunView;
use crate::signals::{Say, stop_on_signals};
use crate::time_limit::time_limit;
use crate::{Arguments, comparison, model_location};

/// Runs or resumes `recipe`, or a comparison of variants of it, as one rank.
pub(crate) fn train(
    arguments: &Arguments,
    path: &Path,
    mut recipe: Recipe,
    comparison: Option<&Comparison>,
    start: Instant,
) -> anyhow::Result<()> {
    let limit = time_limit(start, arguments.time_limit);
    let moved = match comparison {
        Some(_) => None,
        None => take_place(arguments, path, &mut recipe)?,
    };
    check_trace(arguments, &recipe)?;
    span::connect_profiler()?;
    let launch = Launch::from_environment(arguments.rendezvous.as_deref())?;
    if let Some(text) = moved.filter(|_| launch.rank == 0) {
        exit::stderr_line(format_args!("{text}"));
    }
    // Opened first, so that a missing device creates no run directory and lets no other rank wait.
    let device = open_device(&recipe, path, launch.local_rank)?;
    let rank = launch.rank;
    let options = WorldOptions {
        rendezvous_limit: Duration::from_secs(arguments.rendezvous_timeout),
        operation_limit: Duration::from_secs(arguments.operation_timeout),
        on_fault: Arc::new(move |fault| {
            // A failed rank reports its own error.
            if !matches!(fault, Fault::Failed { .. }) {
                exit::stderr_line(format_args!("error: rank {rank}: {fault}"));
            }
            std::process::exit(exit::ERROR.into());
        }),
        ..WorldOptions::default()
    };
    let recipes: Vec<&Recipe> = match comparison {
        Some(comparison) => comparison.runs().iter().map(|run| &run.recipe).collect(),
        None => vec![&recipe],
    };
    let world = moh_train::connect(&launch, &device, &recipes, options)?;
    let session = || Session::new(arguments, path, &device, &world, launch.launcher, limit);
    let done = match comparison {
        Some(comparison) => session().and_then(|session| comparison::train(&session, comparison)),
        None => session().and_then(|session| train_recipe(&session, recipe)),
    };
    match done {
        Ok(()) => Ok(world.close()?),
        Err(error) if error.is::<StoppedEarly>() => {
            world.close()?;
            Err(error)
        }
        Err(error) if world.size() > 1 => {
            if !matches!(
                error.downcast_ref(),
                Some(moh_train::Error::Step(moh_step::Error::OtherRank { .. }))
            ) {
                exit::stderr_line(format_args!("error: rank {rank}: {error:#}"));
            }
            world.abort(&format!("{error:#}"), exit::ERROR.into())
        }
        Err(error) => Err(error),
    }
}

/// Sets `run.dir` of a run's own recipe to the run's directory, wherever it was moved, unless the command sets
/// `run.dir`. A link may name the recipe. Returns a sentence if the recipe has another directory.
fn take_place(
    arguments: &Arguments,
    path: &Path,
    recipe: &mut Recipe,
) -> anyhow::Result<Option<String>> {
    let key = |text: &str| text.split_once('=').map(|(key, _)| key.trim().to_owned());
    let is_named = |text: &String| key(text).is_some_and(|key| key == "run.dir" || key == "run");
    if arguments.overrides.iter().any(is_named) {
        return Ok(None);
    }
    let Some(run) = RunDirectory::of_recipe(path)? else { return Ok(None) };
    if recipe.run.dir.canonicalize().is_ok_and(|dir| Some(dir) == run.root().canonicalize().ok()) {
        return Ok(None);
    }
    let before = std::mem::replace(&mut recipe.run.dir, run.root().to_owned());
    Ok(Some(format!(
        "{} is {}, so run.dir is {}, not {}",
        path.display(),
        match moh_files::parent(path) == run.root() {
            true => "the recipe of the run beside it",
            false => "a link to the recipe of a run",
        },
        run.root().display(),
        before.display()
    )))
}

/// Rejects a trace of steps beyond the run's last step.
fn check_trace(arguments: &Arguments, recipe: &Recipe) -> anyhow::Result<()> {
    let (last, steps) = (arguments.trace.as_ref().map_or(0, TraceSteps::last), recipe.num_steps());
    if last > steps {
        return Err(exit::Usage(format!("--trace: step {last}: the run has {steps} steps")).into());
    }
    Ok(())
}

/// The data that all runs of one command share, on one rank.
pub(crate) struct Session<'a> {
    pub(crate) arguments: &'a Arguments,
    /// The recipe's file.
    path: &'a Path,
    pub(crate) device: &'a OpenDevice,
    pub(crate) world: &'a World,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) time_limit: Option<TimeLimit>,
    /// The first rank's processor, for `machine.json`; empty on other ranks.
    processor: String,
    /// Prints a sentence at once, above the progress of the run.
    say: Arc<Mutex<Say>>,
}

impl<'a> Session<'a> {
    fn new(
        arguments: &'a Arguments,
        path: &'a Path,
        device: &'a OpenDevice,
        world: &'a World,
        launcher: Launcher,
        time_limit: Option<TimeLimit>,
    ) -> anyhow::Result<Self> {
        let processor = match world.rank() {
            0 => processor::label(),
            _ => String::new(),
        };
        let (stop, say) = (Arc::default(), Arc::new(Mutex::new(say_between_runs(world))));
        let said = Arc::clone(&say);
        stop_on_signals(&stop, launcher, Box::new(move |text| (*hold(&said))(text)))?;
        Ok(Session { arguments, path, device, world, stop, time_limit, processor, say })
    }

    /// Returns whether this rank writes files and prints.
    pub(crate) fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// Runs or resumes `recipe`. A new run starts after the stages of its `parent`. Errors suggest `command` with other
    /// keys. Returns whether the run had finished before, and its results.
    pub(crate) fn run(
        &self,
        recipe: &mut Recipe,
        parent: Option<&RunDirectory>,
        command: &str,
    ) -> anyhow::Result<(bool, Summary)> {
        let Session { arguments, path, device, world, .. } = *self;
        let own = RunDirectory::new(&recipe.run.dir);
        let keepers: Vec<&RunDirectory> = match arguments.begin_anew {
            true => Vec::new(),
            false => [&own].into_iter().chain(parent).collect(),
        };
        let directory = model_location::locate(recipe, &keepers, device, world)?;
        let mut view = self.is_first().then(|| RunView::new(recipe, world.size()));
        if let Some(view) = &view {
            *hold(&self.say) = Box::new(view.printer());
        }
        let no_steps = TraceSteps::NONE;
        let options = RunOptions {
            trace: arguments.trace.as_ref().unwrap_or(&no_steps),
            begin_anew: arguments.begin_anew,
            resume_step: arguments.resume_step,
            time_limit: self.time_limit,
            parent,
            processor: &self.processor,
            command,
            ..RunOptions::new(&self.stop)
        };
        let outcome = moh_train::run(
            recipe,
            path,
            directory.as_deref(),
            device.clone(),
            world,
            options,
            &mut |event| {
                if let Some(view) = &mut view {
                    view.show(event);
                }
            },
        );
        if let Some(view) = view {
            *hold(&self.say) = say_between_runs(world);
            view.finish();
        }
        match outcome? {
            Outcome::StoppedBeforeTraining => Err(StoppedEarly(
                "stopped before a step was taken: run the same command again to continue"
                    .to_owned(),
            )
            .into()),
            Outcome::Stopped { step } => {
                let command = match arguments.resume_step {
                    None => "the same command again",
                    Some(_) => "the command again without --resume-step",
                };
                let text = format!(
                    "stopped after step {step} with a checkpoint: run {command} to continue"
                );
                Err(StoppedEarly(text).into())
            }
            Outcome::AlreadyFinished(summary) => Ok((true, summary)),
            Outcome::Finished(summary) => Ok((false, summary)),
        }
    }
}

/// Returns the printer while no run is in progress: on the first rank, it prints a line to the terminal.
fn say_between_runs(world: &World) -> Say {
    match world.rank() {
        0 => Box::new(|text| exit::stderr_line(format_args!("{text}"))),
        _ => Box::new(|_| {}),
    }
}

/// Locks the current printer, also after a panic in another thread, which does not damage it.
fn hold(say: &Mutex<Say>) -> MutexGuard<'_, Say> {
    say.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Trains a single recipe, and prints its end.
fn train_recipe(session: &Session<'_>, mut recipe: Recipe) -> anyhow::Result<()> {
    let command = command(session.path, &session.arguments.overrides);
    let (had_finished, summary) = session.run(&mut recipe, None, &command)?;
    if !session.is_first() {
        return Ok(());
    }
    if had_finished {
        writeln!(stdout(), "this run has already finished\n")?;
    }
    let run = RunDirectory::new(&recipe.run.dir);
    report(&recipe, &run, &summary)
}
