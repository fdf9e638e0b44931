//! `moh-train`: runs or resumes a recipe, manages the checkpoints of a run, and replays a step of it.

mod checkpoints;
mod command_line;
mod comparison;
mod model_location;
mod plan;
mod replay;
mod report;
mod run_view;
mod signals;
mod summary_table;
mod time_limit;
mod training;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::TraceSteps;
use moh_comm::{OPERATION_LIMIT, RENDEZVOUS_LIMIT};
use moh_program::arguments::{at_least, between};
use moh_program::exit;
use moh_recipe::Recipe;
use moh_train::{Comparison, Variant};

use self::time_limit::parse_time_limit;

/// Train a recipe's stages in order, or resume an interrupted run.
///
/// Running the same command again continues from the newest checkpoint and ends with the same bits as
/// a run that was never interrupted; on a GPU, this takes run.deterministic = true. SIGINT, SIGTERM,
/// SIGQUIT, SIGUSR1 and SIGHUP (unless ignored, as by nohup) stop it after the current step or within an
/// evaluation, with a checkpoint and exit code 75: run it again. So does a time limit, before it ends. A second
/// signal, under a launcher a second SIGINT, ends it at once, without a checkpoint.
#[derive(Parser)]
#[command(
    name = "moh-train",
    version,
    arg_required_else_help = true,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Example, from the repository's root, about two minutes:\n  \
        moh-train --recipe recipes/quickstart.toml\n\
        Two variants of it, of which the first is the recipe itself:\n  \
        moh-train --recipe recipes/quickstart.toml --set run.dir=runs/compared \\\n    \
            --variant three-quarters \\\n    \
            --variant half:stage.moh.moh.shared_heads=2\n\
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
    /// Train this variant of the recipe, once for each to compare, in run.dir/NAME: the stages before the
    /// first one that a variant changes are trained once for all. half:stage.moh.moh.shared_heads=2;
    /// a name alone is the recipe itself
    #[arg(long = "variant", value_name = "NAME:KEY=VALUE,...")]
    #[arg(conflicts_with_all = ["trace", "begin_anew", "resume_step"])]
    variants: Vec<String>,
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
    /// Write a timeline of these steps, such as 3,10-12, counted over all stages, into the run
    /// directory: trace-step-N.json, for Perfetto. On a GPU these steps are slower
    #[arg(long, value_name = "STEPS", conflicts_with = "plan")]
    trace: Option<TraceSteps>,
    /// Begin again, even where the run directory has checkpoints: that of the earlier run is renamed to
    /// NAME.before-1 (or the next free number)
    #[arg(long, conflicts_with = "plan")]
    begin_anew: bool,
    /// Stop before this time is over, with a checkpoint and exit code 75: 90m, 1h30m, or as Slurm writes
    /// times, 12:00:00 or 2-12:00:00. Without it, a Slurm job's own end (SLURM_JOB_END_TIME) is the limit
    #[arg(long, value_name = "TIME", value_parser = parse_time_limit, allow_hyphen_values = true)]
    #[arg(conflicts_with = "plan")]
    time_limit: Option<Duration>,
    /// Resume from the checkpoint after step N over all stages instead of the newest: later checkpoints
    /// are renamed to aside-step-M
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(1))]
    #[arg(conflicts_with_all = ["plan", "begin_anew"])]
    resume_step: Option<u64>,
    /// Print parameters, steps, memory, FLOPs and time, and do not train
    #[arg(long)]
    plan: bool,
    /// Achieved TFLOP/s of the plan's device, for its times [default: of this CPU's matrix products, for a recipe of a CPU]
    #[arg(long, value_name = "TFLOPS", requires = "plan")]
    device_tflops: Option<f64>,
    /// Plan this many ranks: layout, memory per rank and communication
    #[arg(long, value_name = "N", requires = "plan")]
    #[arg(conflicts_with = "variants", value_parser = ranks)]
    ranks: Option<NonZeroUsize>,
    /// Hardware of the ranks, a TOML file as in recipes/hardware: adds times and what fits
    #[arg(long, value_name = "FILE", requires = "ranks")]
    hardware: Option<PathBuf>,
    /// Show the fastest layouts that fit in memory, instead of the recipe's own
    #[arg(long, requires = "hardware", conflicts_with = "device_tflops")]
    suggest: bool,
}

/// What else the program does.
#[derive(Subcommand)]
enum Command {
    Replay(replay::Arguments),
    Checkpoints(checkpoints::Arguments),
}

/// Returns a parser of time limits of up to 30 days.
fn seconds() -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    between(1, 30 * 24 * 3600)
}

fn ranks(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "must be a whole number of at least 1".to_owned())
}

/// Starts the recipe's number of threads, before any work is divided among them.
fn start_threads(recipe: &Recipe) -> anyhow::Result<()> {
    let Some(threads) = recipe.run.threads else { return Ok(()) };
    let started = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    started.with_context(|| format!("run.threads = {threads}: the threads could not be started"))
}

fn main() -> ExitCode {
    let start = Instant::now();
    exit::run(|| {
        let arguments = moh_program::arguments::parse::<Arguments>();
        match &arguments.command {
            Some(Command::Checkpoints(arguments)) => return checkpoints::run(arguments),
            Some(Command::Replay(arguments)) => return replay::run(arguments),
            None => {}
        }
        let Some(path) = &arguments.recipe else {
            return Err(exit::Usage("--recipe is missing".to_owned()).into());
        };
        let recipe = RunDirectory::load_recipe(path, &arguments.overrides)?;
        start_threads(&recipe)?;
        let variants: Vec<Variant> =
            arguments.variants.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
        let comparison = match variants.is_empty() {
            true => None,
            false => Some(Comparison::plan(path, &arguments.overrides, variants)?),
        };
        match (arguments.plan, comparison) {
            (true, None) => plan::plan(&arguments, path, recipe),
            (true, Some(comparison)) => plan::plan_comparison(&arguments, path, &comparison),
            (false, comparison) => {
                training::train(&arguments, path, recipe, comparison.as_ref(), start)
            }
        }
    })
}
