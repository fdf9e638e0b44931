//! Training as one of the ranks, and the measurement of all ranks before it.

use std::io::{Write as _, stdout};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use moh_cli::exit::{self, StoppedEarly};
use moh_cli::model_location;
use moh_cli::processor::Processor;
use moh_cli::run_view::RunView;
use moh_cli::signals::{Say, stop_on_signals};
use moh_cli::time_limit::time_limit;
use moh_comm::{Fault, Launch, Launcher, Options, World};
use moh_kernels::span;
use moh_train::run_directory::shell_word;
use moh_train::{
    OpenDevice, Outcome, RankSpeed, Recipe, RunDirectory, RunOptions, TimeLimit, TraceSteps,
    open_device,
};

use crate::Arguments;
use crate::report::report;

/// Runs or resumes `recipe` as one rank.
pub(crate) fn train(
    arguments: &Arguments,
    path: &Path,
    mut recipe: Recipe,
    start: Instant,
) -> anyhow::Result<()> {
    let limit = time_limit(start, arguments.time_limit);
    let moved = take_place(arguments, path, &mut recipe)?;
    check_trace(arguments, &recipe)?;
    span::connect_profiler()?;
    let launch = Launch::from_environment(arguments.rendezvous.as_deref())?;
    if let Some(text) = moved.filter(|_| launch.rank == 0) {
        exit::stderr_line(format_args!("{text}"));
    }
    // Opened first: a missing device then leaves no run directory, and makes no other rank wait.
    let device = open_device(&recipe, path, launch.local_rank)?;
    let rank = launch.rank;
    let options = Options {
        rendezvous_limit: Duration::from_secs(arguments.rendezvous_timeout),
        operation_limit: Duration::from_secs(arguments.operation_timeout),
        on_fault: Arc::new(move |fault| {
            // A failed rank reports its own error.
            if !matches!(fault, Fault::Failed { .. }) {
                exit::stderr_line(format_args!("error: rank {rank}: {fault}"));
            }
            std::process::exit(exit::ERROR.into());
        }),
        ..Options::default()
    };
    let world = moh_train::connect(&launch, &device, &recipe, options)?;
    let done = if arguments.preflight {
        preflight(&recipe, device, &world)
    } else {
        train_as_rank(arguments, (path, recipe), (device, &world, launch.launcher), limit)
    };
    match done {
        Ok(()) => Ok(world.close()?),
        Err(error) if error.is::<StoppedEarly>() => {
            world.close()?;
            Err(error)
        }
        Err(error) if world.size() > 1 => {
            if !matches!(error.downcast_ref(), Some(moh_train::Error::OtherRank { .. })) {
                exit::stderr_line(format_args!("error: rank {rank}: {error:#}"));
            }
            world.abort(&format!("{error:#}"), exit::ERROR.into())
        }
        Err(error) => Err(error),
    }
}

/// Gives the recipe of a run the directory in which it lies as `run.dir`, wherever the run was moved, unless the
/// command names another one. Returns a sentence if that is another directory than the recipe says.
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
        "{} is the recipe of the run beside it, so run.dir is {}, not {}",
        path.display(),
        run.root().display(),
        before.display()
    )))
}

/// The command that started this program, without the options of one start.
fn command(arguments: &Arguments, path: &Path) -> String {
    let sets = arguments.overrides.iter().map(|text| format!(" --set {}", shell_word(text)));
    let path = shell_word(&path.to_string_lossy());
    format!("moh-train --recipe {path}{}", sets.collect::<String>())
}

/// Refuses to trace steps beyond the run's last.
fn check_trace(arguments: &Arguments, recipe: &Recipe) -> anyhow::Result<()> {
    let (last, steps) = (arguments.trace.as_ref().map_or(0, TraceSteps::last), recipe.num_steps());
    if last > steps {
        return Err(exit::Usage(format!("--trace: step {last}: the run has {steps} steps")).into());
    }
    Ok(())
}

/// Prints every rank's measurements and the slow ranks.
fn preflight(recipe: &Recipe, device: OpenDevice, world: &World) -> anyhow::Result<()> {
    let Some(found) = moh_train::preflight(recipe.run.dtype, device, world)? else { return Ok(()) };
    let rate =
        |bytes: Option<f64>| bytes.map_or("-".to_owned(), |b| format!("{:.2} GB/s", b / 1e9));
    let mut out = stdout();
    for RankSpeed { rank, host, matmul, receives } in &found.ranks {
        let (matmul, receives) = (matmul / 1e9, rate(*receives));
        writeln!(out, "rank {rank:<4} {host:<20} {matmul:>10.1} GFLOP/s  receives {receives}")?;
    }
    writeln!(out, "all_reduce over all ranks: {}", rate(found.all_reduce))?;
    for (rank, what, share) in found.slow() {
        writeln!(out, "rank {rank} is slow: {what} at {:.0}% of the median", 100.0 * share)?;
    }
    Ok(())
}

fn train_as_rank(
    arguments: &Arguments,
    (path, mut recipe): (&Path, Recipe),
    (device, world, launcher): (OpenDevice, &World, Launcher),
    time_limit: Option<TimeLimit>,
) -> anyhow::Result<()> {
    let directory = model_location::locate(&recipe, arguments.begin_anew, &device, world)?;
    let stop = Arc::new(AtomicBool::new(false));
    let first = world.rank() == 0;
    let mut view = first.then(|| RunView::new(&recipe, world.size()));
    let say: Say = match &view {
        Some(view) => Box::new(view.printer()),
        None => Box::new(|_| {}),
    };
    stop_on_signals(&stop, launcher, say)?;
    // The first rank describes the machine.
    let processor = if first { Processor::read().label() } else { String::new() };
    let no_steps = TraceSteps::NONE;
    let command = command(arguments, path);
    let options = RunOptions {
        trace: arguments.trace.as_ref().unwrap_or(&no_steps),
        begin_anew: arguments.begin_anew,
        resume_step: arguments.resume_step,
        time_limit,
        break_lock: arguments.break_lock,
        allow_other_tokenizer: arguments.allow_other_tokenizer,
        processor: &processor,
        command: &command,
        ..RunOptions::new(&stop)
    };
    let outcome = moh_train::run(
        &mut recipe,
        path,
        directory.as_deref(),
        (device, world),
        options,
        &mut |event| {
            if let Some(view) = &mut view {
                view.show(event);
            }
        },
    );
    if let Some(view) = view {
        view.finish();
    }
    let run = RunDirectory::new(&recipe.run.dir);
    match outcome? {
        Outcome::StoppedBeforeTraining => Err(StoppedEarly(
            "stopped before a step was taken: run the same command again to continue".to_owned(),
        )
        .into()),
        Outcome::Stopped { step } => {
            let command = match arguments.resume_step {
                None => "the same command again",
                Some(_) => "the command again without --resume-step",
            };
            let text =
                format!("stopped after step {step} with a checkpoint: run {command} to continue");
            Err(StoppedEarly(text).into())
        }
        _ if !first => Ok(()),
        Outcome::AlreadyFinished(summary) => {
            writeln!(stdout(), "this run has already finished\n")?;
            report(&recipe, &run, &summary)
        }
        Outcome::Finished(summary) => report(&recipe, &run, &summary),
    }
}
