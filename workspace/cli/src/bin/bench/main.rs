//! `moh-bench`: how fast this machine trains, and how close each operator comes to its limits.

mod attention;
mod device;
mod machine;
mod operators;
mod report;
mod step;
mod step_job;
mod timing;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use moh_cli::exit;

/// Measure training steps and operators on this machine.
///
/// Every command times the code that training runs, on numbers made up for it, and measures the
/// machine's own limits beside it. RAYON_NUM_THREADS sets the number of the CPU's threads.
#[derive(Parser)]
#[command(
    name = "moh-bench",
    version,
    arg_required_else_help = true,
    after_help = "Example, from the repository's root:\n  \
        moh-bench step --recipe recipes/quickstart.toml"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Whole training steps: forward, backward, clipping and AdamW
    ///
    /// The model has random weights and reads random tokens; the step is the trainer's own.
    #[command(after_help = "Examples, from the repository's root:\n  \
        moh-bench step --recipe recipes/quickstart.toml --stage moh\n  \
        moh-bench step --config recipes/quickstart --batch 8 --length 256 --active 0.75")]
    Step(step_job::StepArguments),
    /// Attention of the selected heads against dense attention, forward and backward
    #[command(after_help = "Examples:\n  \
        moh-bench attention --length 8192 --dtype bf16\n  \
        moh-bench attention --active 0.75,0.5 --shared-heads 16,8")]
    Attention(attention::AttentionArguments),
    /// Every operator, forward and backward, against the machine's limits
    ///
    /// The limits are a matrix product of the same type, 1024 x 1024 x 1024, and a copy of 256 MiB;
    /// on a GPU 8192 x 8192 x 8192 and 4 GiB. What moves numbers that fit into caches can be faster
    /// than that copy. The shapes are those of a small Llama, on a GPU of LLaMA-3-8B.
    #[command(after_help = "Examples:\n  \
        moh-bench operators\n  \
        moh-bench operators linear --dtype bf16")]
    Operators(operators::OperatorsArguments),
}

fn main() -> ExitCode {
    exit::run(|| match Arguments::parse().command {
        Command::Step(arguments) => step::run(&arguments),
        Command::Attention(arguments) => attention::run(&arguments),
        Command::Operators(arguments) => operators::run(&arguments),
    })
}
