//! `moh-data accept`.

use std::io::{Write, stdout};
use std::path::PathBuf;

use moh_data::{TokenFile, TokenizerMatch};

#[derive(clap::Args)]
pub struct Arguments {
    /// Paths of token files, without .bin and .idx
    #[arg(required = true, value_name = "PREFIX")]
    prefixes: Vec<PathBuf>,
    /// Tokenizer to accept: a directory with tokenizer.json, the file itself, or a hub id
    #[arg(long, value_name = "DIR|FILE|ID")]
    tokenizer: String,
    /// Branch, tag or commit on the hub [default: main]
    #[arg(long)]
    revision: Option<String>,
}

/// Runs the command. All files are compared before any is changed.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let tokenizer =
        moh_program::models::named_tokenizer(&arguments.tokenizer, arguments.revision.as_deref())?;
    let mut found = Vec::new();
    for prefix in &arguments.prefixes {
        let file = TokenFile::open(prefix)?;
        let fit = tokenizer.check_file(&file, true)?;
        found.push((file, fit));
    }
    let mut out = stdout();
    for (file, fit) in &found {
        let what = match fit {
            TokenizerMatch::Unrecorded => "records no tokenizer, so every tokenizer is accepted",
            TokenizerMatch::Same => "was prepared with this tokenizer",
            TokenizerMatch::Rewritten => {
                "was prepared with this tokenizer, whose file was rewritten"
            }
            TokenizerMatch::SameIds => "has the ids that this tokenizer gives, on a sample of it",
        };
        if matches!(fit, TokenizerMatch::Rewritten | TokenizerMatch::SameIds) {
            file.accept_tokenizer(tokenizer.hash())?;
        }
        writeln!(out, "{}: {what}", file.prefix().display())?;
    }
    Ok(())
}
