//! `moh-data tokenizer`.

use std::io::{Write, stdout};
use std::path::PathBuf;

use moh_prepare::TrainTokenizer;
use moh_program::arguments::at_least;
use moh_program::exit;
use moh_program::progress::Bar;

use super::inputs::{self, InputArguments};

#[derive(clap::Args)]
pub struct Arguments {
    /// Requested number of ids, including special tokens and bytes
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    vocab_size: usize,
    /// Directory for the tokenizer's files
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Split of --dataset, as in train
    #[arg(long, value_name = "NAME", requires = "dataset")]
    split: Option<String>,
    #[command(flatten)]
    inputs: InputArguments,
    /// Replace an existing tokenizer
    #[arg(long)]
    force: bool,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let split = arguments.split.as_deref();
    let named = arguments.inputs.named(split.as_slice())?;
    exit::remove_temporary_files_on_signals()?;
    let mut bar = Bar::bytes("reading", 0);
    let options = TrainTokenizer {
        inputs: named.inputs(),
        format: arguments.inputs.format(),
        field: arguments.inputs.field("text"),
        vocab_size: arguments.vocab_size,
        dir: &arguments.out,
        overwrite: arguments.force,
    };
    let mut show = |reading| inputs::show(&mut bar, reading, |_| None);
    let tokenizer = moh_prepare::train_tokenizer(options, &mut show)?;
    drop(bar);
    let path = tokenizer.path().display();
    let found = tokenizer.vocab_size();
    if found < arguments.vocab_size {
        let wanted = arguments.vocab_size;
        writeln!(stdout(), "{path}: {found} ids; the text is too small for {wanted}")?;
    } else {
        writeln!(stdout(), "{path}: {found} ids")?;
    }
    Ok(())
}
