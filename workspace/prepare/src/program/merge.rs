//! `moh-data merge`.

use std::io::{Write, stdout};
use std::path::PathBuf;

use moh_program::exit;
use moh_program::progress::Bar;

use super::written;

#[derive(clap::Args)]
pub struct Arguments {
    /// Paths of token files, without .bin and .idx
    #[arg(required = true, value_name = "PREFIX")]
    inputs: Vec<PathBuf>,
    /// Path of the merged token file, without .bin and .idx
    #[arg(long, value_name = "PREFIX")]
    out: PathBuf,
    /// Replace an existing token file
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { inputs, out, force, json } = arguments;
    exit::remove_temporary_files_on_signals()?;
    let mut bar = Bar::bytes("merging", 0);
    let info = moh_data::merge(inputs, out, *force, &mut |done, total| bar.update(done, total))?;
    drop(bar);
    match json {
        true => writeln!(stdout(), "{}", written::to_json(out, &info))?,
        false => writeln!(stdout(), "{}", written::line(out, &info))?,
    }
    Ok(())
}
