//! `moh-data split`.

use std::io::{Write, stdout};
use std::path::PathBuf;

use moh_prepare::{PreparedFile, Split};
use moh_program::exit;
use moh_program::progress::Bar;
use serde_json::{Value, json};

use super::written;

#[derive(clap::Args)]
pub struct Arguments {
    /// Path of the token file, without .bin and .idx
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
    /// Shares of the documents for training and validation, as in 0.99,0.01
    #[arg(long, value_name = "SHARE,SHARE", allow_hyphen_values = true)]
    shares: Split,
    /// Write PREFIX-train and PREFIX-validation
    #[arg(long, value_name = "PREFIX")]
    out: PathBuf,
    /// Replace existing token files
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { prefix, shares, out, force, json } = arguments;
    exit::remove_temporary_files_on_signals()?;
    let mut bar = Bar::bytes("splitting", 0);
    let mut progress = |done, total| bar.update(done, total);
    let files = moh_prepare::split_token_file(*shares, prefix, out, *force, &mut progress)?;
    drop(bar);
    let mut out = stdout().lock();
    if *json {
        let files =
            files.iter().map(|PreparedFile { prefix, info }| written::to_json(prefix, info));
        writeln!(out, "{}", json!({"files": files.collect::<Vec<Value>>()}))?;
        return Ok(());
    }
    for PreparedFile { prefix, info } in &files {
        writeln!(out, "{}", written::line(prefix, info))?;
    }
    Ok(())
}
