//! `moh-train replay`: one step of a run again, with all that is in it.

use std::io::{Write as _, stdout};
use std::path::PathBuf;

use moh_checkpoint::run_directory::{CheckpointName, RunDirectory};
use moh_program::arguments::at_least;
use moh_program::exit::stderr_line;
use moh_train::open_device;

use crate::model_location;
use crate::replay_table::tables;

/// Repeat one step of a run, and print where its numbers come from.
///
/// Starts from the newest checkpoint before the step, takes the steps up to it, and computes the step
/// without its update. Prints its loss and gradient norm; by block the residual stream, the gradient, the
/// entropy of the gates and the loads of the heads; the gradient of each tensor; and the samples, with the
/// tokens and documents of their files. Reads the run directory and writes nothing. One process computes
/// the whole model, which must fit its device.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  moh-train replay runs/quickstart --step 202")]
pub(crate) struct Arguments {
    /// Run directory
    run: PathBuf,
    /// The step, counted over all stages
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(0))]
    step: u64,
    /// Recipe instead of the run's own
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Override a key of the recipe, such as run.device=cpu
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// Replays the step and prints its tables.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let run = RunDirectory::new(&arguments.run);
    let path = arguments.recipe.clone().unwrap_or_else(|| run.recipe());
    let recipe = RunDirectory::load_recipe(&path, &arguments.overrides)?;
    let device = open_device(&recipe, &path, 0)?;
    let step = arguments.step;
    let mut needs_model = true;
    if (1..=recipe.num_steps()).contains(&step) {
        let from = moh_train::replay_from(&run, step)?;
        stderr_line(format_args!("repeating the steps {} to {step}", from + 1));
        needs_model = from == 0 || !run.keeps_model(&recipe)?;
    }
    let model = &recipe.model;
    let from = model.from.as_deref().filter(|from| CheckpointName::parse(from).is_none());
    let directory = match from.filter(|_| needs_model) {
        Some(from) => Some(model_location::find(from, model.revision.as_deref())?),
        None => None,
    };
    let found = moh_train::replay(&run, recipe, &path, directory.as_deref(), device, step)?;
    write!(stdout(), "{}", tables(&found)?)?;
    Ok(())
}
