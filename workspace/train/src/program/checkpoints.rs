//! `moh-train checkpoints`: lists, verifies and removes the checkpoints of a run.

use std::io::{Write as _, stdout};
use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, Subcommand};
use indicatif::{HumanBytes, HumanCount};
use moh_checkpoint::{Condition, ListedCheckpoint, RunDirectory, RunState};
use moh_program::arguments::at_least;
use moh_program::table::aligned;
use moh_program::{counted, utc};
use moh_recipe::{CheckpointOptions, Recipe};

/// List, verify or remove the checkpoints of a run
///
/// Without a subcommand, lists all checkpoints of the run directory: complete ones, those that were moved
/// aside because they are damaged or because the run resumed before them, and unfinished ones.
#[derive(Args)]
#[command(after_help = "Example:\n  moh-train checkpoints runs/quickstart")]
pub(crate) struct Arguments {
    /// Run directory: run.dir of its recipe
    #[arg(value_name = "RUN")]
    run: PathBuf,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Read and hash every byte, and report each checkpoint; changes nothing
    ///
    /// Exits with 1 if a checkpoint is damaged or cannot be read.
    #[command(after_help = "Example:\n  moh-train checkpoints runs/quickstart verify")]
    Verify {
        /// Steps of the checkpoints [default: all complete ones]
        #[arg(value_name = "STEP", value_parser = at_least::<u64>(1))]
        steps: Vec<u64>,
    },
    /// Remove older checkpoints, as a run does by its checkpoint.keep and checkpoint.keep_every
    ///
    /// The newest checkpoint whose bytes are good is never removed. Checkpoints that were moved aside stay.
    #[command(
        after_help = "Example:\n  moh-train checkpoints runs/quickstart prune --keep 1 --dry-run"
    )]
    Prune {
        /// Number of newest checkpoints to keep
        #[arg(long, value_name = "N", value_parser = at_least::<u64>(1))]
        keep: u64,
        /// Keep also the checkpoints whose step is a multiple of M
        #[arg(long, value_name = "M", value_parser = at_least::<u64>(1))]
        keep_every: Option<u64>,
        /// Print what would be removed, and remove nothing
        #[arg(long)]
        dry_run: bool,
    },
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let run = RunDirectory::new(&arguments.run);
    if !run.recipe().is_file() && !run.checkpoints().is_dir() {
        bail!(
            "{}: is not a run directory, which has a recipe.toml and checkpoints/: name the run.dir of \
             a recipe",
            run.root().display()
        );
    }
    match &arguments.command {
        None => list(&run),
        Some(Command::Verify { steps }) => verify(&run, steps),
        Some(Command::Prune { keep, keep_every, dry_run }) => {
            let keep_every = keep_every.unwrap_or(0);
            prune(
                &run,
                &CheckpointOptions { keep: *keep, keep_every, ..CheckpointOptions::default() },
                *dry_run,
            )
        }
    }
}

fn list(run: &RunDirectory) -> anyhow::Result<()> {
    let found = moh_checkpoint::list(run)?;
    let mut out = stdout();
    if found.is_empty() {
        writeln!(out, "{}: no checkpoints", run.root().display())?;
        return Ok(());
    }
    // Without a readable recipe, only the names of the stages are missing.
    let recipe = run.stored_recipe().ok();
    let header = ["step", "stage", "tokens", "written", "size", "state"];
    let rows = found.iter().map(|listed| row(run, recipe.as_ref(), listed));
    Ok(write!(out, "{}", aligned(header, rows, &[1, 3, 5]))?)
}

fn row(run: &RunDirectory, recipe: Option<&Recipe>, listed: &ListedCheckpoint) -> [String; 6] {
    let path = listed.path.strip_prefix(run.root()).unwrap_or(&listed.path).display();
    let (stage, tokens) = match &listed.state {
        Ok(state) => (stage(recipe, state), HumanCount(state.tokens).to_string()),
        Err(_) => ("-".to_owned(), "-".to_owned()),
    };
    let state = match (listed.condition, &listed.state) {
        (Condition::Complete, Ok(_)) => "complete".to_owned(),
        (Condition::Complete, Err(error)) => format!("not usable: {error}"),
        (Condition::Damaged, _) => format!("damaged (set aside): {path}"),
        (Condition::MovedAside, _) => format!("moved aside: {path}"),
        (Condition::Unfinished, _) => format!("unfinished: {path}"),
    };
    [
        listed.step.to_string(),
        stage,
        tokens,
        listed.written.map_or_else(|| "-".to_owned(), utc),
        HumanBytes(listed.bytes).to_string(),
        state,
    ]
}

/// Returns the stage of a checkpoint, and its step in it.
fn stage(recipe: Option<&Recipe>, state: &RunState) -> String {
    let name = |index: usize| {
        let stage = recipe.and_then(|recipe| recipe.stages.get(index));
        stage.map_or_else(|| format!("stage {}", index + 1), |stage| stage.name.clone())
    };
    match state.stage.checked_sub(1) {
        Some(before) if state.stage_step == 0 => format!("{}, end", name(before)),
        _ => format!("{}, step {}", name(state.stage), state.stage_step),
    }
}

/// Reads whole checkpoints, and prints a line for each.
fn verify(run: &RunDirectory, steps: &[u64]) -> anyhow::Result<()> {
    let steps = match steps.is_empty() {
        true => run.checkpoint_steps()?,
        false => steps.to_vec(),
    };
    let mut faults = 0;
    let mut out = stdout();
    for &step in &steps {
        let (is_good, verdict) = match moh_checkpoint::verify(run, step) {
            Ok(Ok(_)) => (true, "complete, all hashes match".to_owned()),
            Ok(Err(error)) => (false, format!("damaged: {error}")),
            Err(error @ moh_checkpoint::Error::NoCheckpoint(_)) => return Err(error.into()),
            Err(error) => (false, format!("cannot be read: {error}")),
        };
        faults += u64::from(!is_good);
        writeln!(out, "step {step}: {verdict}")?;
    }
    match faults {
        0 => Ok(()),
        _ => bail!(
            "{}: {faults} of {} cannot be used",
            run.checkpoints().display(),
            counted(steps.len() as u64, "checkpoint")
        ),
    }
}

/// Removes the checkpoints that `retention` does not keep.
fn prune(run: &RunDirectory, retention: &CheckpointOptions, dry_run: bool) -> anyhow::Result<()> {
    let _lock = run.lock()?;
    let steps = moh_checkpoint::superseded_by_good(run, retention)?;
    if !dry_run {
        moh_checkpoint::remove(run, &steps)?;
    }
    let what = if dry_run { "would remove" } else { "removed" };
    let mut out = stdout();
    for step in &steps {
        writeln!(out, "{what} {}", run.checkpoint(*step).display())?;
    }
    if steps.is_empty() {
        writeln!(out, "nothing to remove")?;
    }
    Ok(())
}
