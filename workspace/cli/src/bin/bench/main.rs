//! `moh-bench`: measures the speed of training on this machine, and of each operator relative to the limits.

mod attention;
mod device;
mod generation;
mod heads;
mod kernels;
mod limits;
mod machine;
mod operators;
mod step;
mod step_job;
mod timing;

use std::io::{Write as _, stdout};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use moh_program::exit;
use serde_json::Value;

/// Measure training steps and operators on this machine.
///
/// Every command times the code of training on synthetic data, and measures the machine's own
/// limits for comparison. RAYON_NUM_THREADS sets the number of CPU threads.
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
    /// The model has random weights and random tokens; the step is the trainer's own.
    #[command(after_help = "Examples, from the repository's root:\n  \
        moh-bench step --recipe recipes/quickstart.toml --stage moh\n  \
        moh-bench step --config recipes/quickstart --batch 8 --length 256 --active 0.75")]
    Step(step_job::StepArguments),
    /// Generation of several sequences at once: prompts, then a token of each in every pass
    ///
    /// The model has random weights and the prompts random tokens; logits are computed, and no token is sampled.
    #[command(after_help = "Examples, from the repository's root:\n  \
        moh-bench generation --config recipes/quickstart --batch 1,8,32 --context 64\n  \
        moh-bench generation --config recipes/quickstart --active 0.5 --router group --dtype bf16")]
    Generation(generation::GenerationArguments),
    /// Mixture-of-Head attention against dense attention, forward and backward
    #[command(after_help = "Examples:\n  \
        moh-bench attention --length 8192 --dtype bf16\n  \
        moh-bench attention --active 0.75,0.5 --shared-heads 16,8")]
    Attention(attention::AttentionArguments),
    /// Every operator, forward and backward, against the machine's limits
    ///
    /// The limits are a matmul of the same type, 1024 x 1024 x 1024, and a copy of 256 MiB; on a
    /// GPU 8192 x 8192 x 8192 and 4 GiB. An operator whose data fits the caches can exceed the
    /// copy. The shapes are a small Llama's on the CPU, and LLaMA-3-8B's on a GPU.
    #[command(after_help = "Examples:\n  \
        moh-bench operators\n  \
        moh-bench operators linear --dtype bf16")]
    Operators(operators::OperatorsArguments),
    /// The processor and the machine's limits, in a line that names the machine beside a figure
    #[command(after_help = "Examples:\n  \
        moh-bench machine\n  \
        RAYON_NUM_THREADS=8 moh-bench machine --json")]
    Machine(machine::MachineArguments),
}

fn main() -> ExitCode {
    exit::run(|| match moh_program::arguments::parse::<Arguments>().command {
        Command::Step(arguments) => step::run(&arguments),
        Command::Generation(arguments) => generation::run(&arguments),
        Command::Attention(arguments) => attention::run(&arguments),
        Command::Operators(arguments) => operators::run(&arguments),
        Command::Machine(arguments) => machine::run(&arguments),
    })
}

/// Prints a measurement: `json` if `as_json`, else `text`.
fn print(as_json: bool, json: &Value, text: &str) -> anyhow::Result<()> {
    match as_json {
        true => writeln!(stdout(), "{json:#}")?,
        false => writeln!(stdout(), "{}", text.trim_end())?,
    }
    Ok(())
}
