//! `moh-train`: runs or resumes a recipe, and replays a step of a run.

#[path = "train/replay.rs"]
mod replay;

use std::io::{Write as _, stdout};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use moh_cli::exit::{self, StoppedEarly};
use moh_cli::model_location;
use moh_cli::run_view::RunView;
use moh_cli::signals::stop_on_signals;
use moh_cli::summary_table::{draw, invocation, table};
use moh_cli::time_limit::{parse_time_limit, time_limit};
use moh_comm::{Fault, Launch, OPERATION_LIMIT, Options, RENDEZVOUS_LIMIT, World};
use moh_data::TokenFile;
use moh_kernels::span;
use moh_model::ModelConfig;
use moh_train::plan::{Hardware, Suggestions};
use moh_train::recipe::ValidationSet;
use moh_train::{
    OpenDevice, Outcome, Plan, RankSpeed, Recipe, RunDirectory, RunOptions, Summary, TimeLimit,
    TraceSteps, open_device,
};

/// Train a recipe's stages in order, or resume an interrupted run.
///
/// Running the same command again continues from the newest checkpoint and ends with the same bits as
/// a run that was never interrupted; on a GPU, this takes run.deterministic = true. SIGINT, SIGTERM,
/// SIGUSR1 and SIGHUP (unless ignored, as by nohup) stop it after the current step, with a checkpoint
/// and exit code 75: run it again. So does a time limit, before it ends.
#[derive(Parser)]
#[command(
    name = "moh-train",
    version,
    arg_required_else_help = true,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Example, from the repository's root, about two minutes:\n  \
        moh-train --recipe recipes/quickstart.toml\n\
        The plan of the paper's run, without weights or data, and on 64 GPUs:\n  \
        moh-train --recipe recipes/moh-llama3-8b.toml --plan --device-tflops 600\n  \
        moh-train --recipe recipes/moh-llama3-8b.toml --plan --ranks 64 \\\n    \
            --hardware recipes/hardware/h100-sxm.toml --suggest"
)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Recipe, a TOML file
    #[arg(long, value_name = "FILE", required = true)]
    recipe: Option<PathBuf>,
    /// Override a key of the recipe, stages by name: stage.moh.tokens=1e9
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Address at which the ranks meet; overrides the launcher's
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<String>,
    /// Time limit of the rendezvous
    #[arg(long, value_name = "SECONDS", env = "MOH_RENDEZVOUS_TIMEOUT")]
    #[arg(default_value_t = RENDEZVOUS_LIMIT.as_secs(), value_parser = seconds())]
    rendezvous_timeout: u64,
    /// Time limit of an operation between ranks, after which it counts as stuck
    #[arg(long, value_name = "SECONDS", env = "MOH_OPERATION_TIMEOUT")]
    #[arg(default_value_t = OPERATION_LIMIT.as_secs(), value_parser = seconds())]
    operation_timeout: u64,
    /// Measure every rank's matmuls and network, report slow ranks, and do not train
    #[arg(long, conflicts_with = "plan")]
    preflight: bool,
    /// Write a timeline of these steps, such as 3,10-12, counted over all stages, into the run
    /// directory: trace-step-N.json, for Perfetto. On a GPU these steps are slower
    #[arg(long, value_name = "STEPS", conflicts_with_all = ["plan", "preflight"])]
    trace: Option<TraceSteps>,
    /// Begin again, even where the run directory has checkpoints: the files of the earlier run are moved
    /// into before-1 (or the next free number) in the run directory
    #[arg(long, conflicts_with_all = ["plan", "preflight"])]
    begin_anew: bool,
    /// Stop before this time is over, with a checkpoint and exit code 75: 90m, 1h30m, or as Slurm writes
    /// times, 12:00:00 or 2-12:00:00. Without it, a Slurm job's own end (SLURM_JOB_END_TIME) is the limit
    #[arg(long, value_name = "TIME", value_parser = parse_time_limit)]
    #[arg(conflicts_with_all = ["plan", "preflight"])]
    time_limit: Option<Duration>,
    /// Take the run directory from another process, on a file system without locks, where a file names the
    /// process that trains and a killed one counts for 90 seconds. Give it only if that process has ended: two
    /// at once destroy the run. It changes nothing where the file system has locks
    #[arg(long, conflicts_with_all = ["plan", "preflight"])]
    break_lock: bool,
    /// Print parameters, steps, memory, FLOPs and time, and do not train
    #[arg(long)]
    plan: bool,
    /// Achieved TFLOP/s of the plan's device, for its times
    #[arg(long, value_name = "TFLOPS", requires = "plan")]
    device_tflops: Option<f64>,
    /// Plan this many ranks: layout, memory per rank and communication
    #[arg(long, value_name = "N", requires = "plan")]
    ranks: Option<NonZeroUsize>,
    /// Hardware of the ranks, a TOML file as in recipes/hardware: adds times and what fits
    #[arg(long, value_name = "FILE", requires = "ranks")]
    hardware: Option<PathBuf>,
    /// Show the fastest layouts that fit in memory, instead of the recipe's own
    #[arg(long, requires = "hardware", conflicts_with = "device_tflops")]
    suggest: bool,
}

impl Arguments {
    /// The recipe's path.
    fn recipe(&self) -> &Path {
        // Required without a command.
        self.recipe.as_deref().unwrap_or(Path::new(""))
    }
}

/// What else the program does.
#[derive(Subcommand)]
enum Command {
    Replay(replay::Arguments),
}

/// Parses a time limit of up to 30 days.
fn seconds() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=30 * 24 * 3600)
}

fn main() -> ExitCode {
    let start = Instant::now();
    exit::run(|| {
        let arguments = Arguments::parse();
        if let Some(Command::Replay(arguments)) = &arguments.command {
            return replay::run(arguments);
        }
        let recipe = Recipe::load(arguments.recipe(), &arguments.overrides)?;
        if arguments.plan { plan(&arguments, recipe) } else { train(&arguments, recipe, start) }
    })
}

fn plan(arguments: &Arguments, mut recipe: Recipe) -> anyhow::Result<()> {
    if let Some(tflops) = arguments.device_tflops
        && !(tflops > 0.0 && tflops.is_finite())
    {
        return Err(exit::Usage(format!("--device-tflops {tflops}: must be above 0")).into());
    }
    let path = arguments.recipe();
    let config = recipe.local_model_config(path)?.with_context(|| {
        format!(
            "{}: model.config: the plan needs the model's shape, but model.from is not on this \
             machine: name its config.json",
            path.display()
        )
    })?;
    recipe.resolve(path, &config)?;
    let hardware = arguments.hardware.as_deref().map(Hardware::load).transpose()?;
    match (arguments.ranks, hardware) {
        (Some(ranks), Some(hardware)) if arguments.suggest => {
            let found = Suggestions::new(&recipe, &config, ranks.get(), hardware);
            write!(stdout(), "{found}")?;
        }
        (ranks, hardware) => {
            let plan = plan_of(arguments, &recipe, &config, (ranks, hardware))?;
            write!(stdout(), "{plan}")?;
        }
    }
    Ok(())
}

/// The plan of the recipe's own layout.
fn plan_of(
    arguments: &Arguments,
    recipe: &Recipe,
    config: &ModelConfig,
    (ranks, hardware): (Option<NonZeroUsize>, Option<Hardware>),
) -> anyhow::Result<Plan> {
    let mut plan = Plan::new(recipe, config)?.with_sources(recipe)?;
    if let Some(tflops) = arguments.device_tflops {
        plan = plan.with_device_tflops(tflops);
    }
    if let Some(ranks) = ranks {
        plan = plan.on_ranks(recipe, (config, arguments.recipe()), ranks.get(), hardware)?;
    }
    Ok(plan)
}

fn train(arguments: &Arguments, recipe: Recipe, start: Instant) -> anyhow::Result<()> {
    let limit = time_limit(start, arguments.time_limit);
    check_trace(arguments, &recipe)?;
    span::connect_profiler()?;
    let launch = Launch::from_environment(arguments.rendezvous.as_deref())?;
    // Opened first: a missing device then leaves no run directory, and makes no other rank wait.
    let device = open_device(&recipe, arguments.recipe(), launch.local_rank)?;
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
        train_as_rank(arguments, recipe, (device, &world), limit)
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
    mut recipe: Recipe,
    (device, world): (OpenDevice, &World),
    time_limit: Option<TimeLimit>,
) -> anyhow::Result<()> {
    let directory = model_location::locate(&recipe, arguments.begin_anew, &device, world)?;
    let stop = Arc::new(AtomicBool::new(false));
    stop_on_signals(&stop)?;
    let first = world.rank() == 0;
    let mut view = first.then(|| RunView::new(&recipe, world.size()));
    let path = arguments.recipe();
    let no_steps = TraceSteps::NONE;
    let options = RunOptions {
        trace: arguments.trace.as_ref().unwrap_or(&no_steps),
        begin_anew: arguments.begin_anew,
        time_limit,
        break_lock: arguments.break_lock,
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
            "stopped while the token files were checked: run the same command again to continue"
                .to_owned(),
        )
        .into()),
        Outcome::Stopped { step } => Err(StoppedEarly(format!(
            "stopped after step {step} with a checkpoint: run the same command again to continue"
        ))
        .into()),
        _ if !first => Ok(()),
        Outcome::AlreadyFinished(summary) => {
            writeln!(stdout(), "this run has already finished\n")?;
            report(arguments, &recipe, &run, &summary)
        }
        Outcome::Finished(summary) => report(arguments, &recipe, &run, &summary),
    }
}

/// Prints the end of a run: losses, output files and next commands.
fn report(
    arguments: &Arguments,
    recipe: &Recipe,
    run: &RunDirectory,
    summary: &Summary,
) -> anyhow::Result<()> {
    let picture = draw(run, summary)?;
    let mut out = stdout();
    let losses = table(summary);
    if !losses.is_empty() {
        writeln!(out, "{losses}")?;
    }
    for (what, path) in
        [("model", &run.export()), ("metrics", &run.metrics()), ("picture", &picture)]
    {
        writeln!(out, "{what:<8} {}", path.display())?;
    }
    let export = run.export();
    writeln!(out, "\nTry next:")?;
    for command in next_commands(arguments.recipe(), recipe, &export, summary) {
        writeln!(out, "  {command}")?;
    }
    Ok(())
}

/// A comment for the shell if moh-eval reads more windows of the validation data than the run did.
fn other_windows(recipe: &Recipe, validation: &ValidationSet) -> String {
    let sequences = recipe.stages.first().map_or(1, |stage| stage.micro_batch);
    let read = (validation.batches as u64).saturating_mul(sequences as u64);
    let windows = TokenFile::open(&validation.path)
        .map_or(0, |file| file.num_tokens() / recipe.data.sequence_length.max(1) as u64);
    if windows > read {
        format!("  # all {windows} windows; the table's losses are of the first {read}")
    } else {
        String::new()
    }
}

/// Three commands that use the run's output.
fn next_commands(path: &Path, recipe: &Recipe, export: &Path, summary: &Summary) -> Vec<String> {
    let mut commands = Vec::new();
    if export.join("tokenizer.json").is_file() {
        let generate = invocation("moh-generate");
        commands.push(format!("{generate} --model {} --prompt \"One day\"", export.display()));
    }
    if let Some(validation) = recipe.data.validation.first() {
        commands.push(format!(
            "{} loss --model {} --data {} --sequence-length {}{}",
            invocation("moh-eval"),
            export.display(),
            validation.path.display(),
            recipe.data.sequence_length,
            other_windows(recipe, validation),
        ));
    }
    let routed = recipe.stages.iter().find(|stage| stage.moh.is_some());
    if let Some(stage) = routed.filter(|_| summary.heads.is_multiple_of(4)) {
        commands.push(format!(
            "{} --recipe {} --set run.dir={}-half --set stage.{name}.moh.shared_heads={quarter} \
             --set stage.{name}.moh.routed_top_k={quarter}",
            invocation("moh-train"),
            path.display(),
            recipe.run.dir.display(),
            name = stage.name,
            quarter = summary.heads / 4,
        ));
    }
    commands
}
