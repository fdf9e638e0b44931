//! `moh-data verify`.

use std::io::{Write, stdout};
use std::path::PathBuf;

use anyhow::bail;
use moh_data::{DocumentEnd, Problem, TokenFile, Verification, Verify};
use moh_program::arguments::at_least;
use moh_program::counted;
use moh_program::progress::Bar;
use serde_json::{Value, json};

use super::TokenizerArguments;

#[derive(clap::Args)]
pub struct Arguments {
    /// Path of the token file, without .bin and .idx
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
    /// Ids are below this [default: the recorded size of the vocabulary]
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(1))]
    vocab_size: Option<u64>,
    #[command(flatten)]
    tokenizer: TokenizerArguments,
    /// Warnings are faults too
    #[arg(long)]
    strict: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let verify = Verify {
        prefix: &arguments.prefix,
        vocabulary: arguments.vocab_size,
        end_of_text: end_of_text(arguments)?,
    };
    let mut bar = Bar::bytes("verifying", 0);
    let found = verify.run(&mut |done, total| bar.update(done, total))?;
    drop(bar);
    let is_fault = |problem: &&Problem| arguments.strict || problem.kind.is_fault();
    let faults = found.problems.iter().filter(is_fault).count();
    let mut out = stdout().lock();
    if arguments.json {
        writeln!(out, "{}", to_json(arguments, &found, faults == 0))?;
    } else {
        for problem in &found.problems {
            let kind = if is_fault(&problem) { "fault" } else { "warning" };
            writeln!(out, "{kind}: {}", problem.message)?;
        }
        if faults == 0 {
            let Verification { documents, tokens, vocabulary, .. } = found;
            let ids = match vocabulary {
                Some(size) => format!("all ids are below {size}"),
                None => {
                    "no vocabulary is recorded, so --vocab-size is needed to verify ids".to_owned()
                }
            };
            let (documents, tokens) = (counted(documents, "document"), counted(tokens, "token"));
            let prefix = arguments.prefix.display();
            writeln!(out, "{prefix}: no fault in {documents} and {tokens}; {ids}")?;
        }
    }
    if faults > 0 {
        // There are at most as many faults as kinds.
        let kinds = counted(faults as u64, "kind");
        bail!("{}: {kinds} of fault, listed above", arguments.prefix.display());
    }
    Ok(())
}

/// Returns the id of the recorded end of text, if a tokenizer is named.
fn end_of_text(arguments: &Arguments) -> anyhow::Result<Option<u32>> {
    if arguments.tokenizer.tokenizer.is_none() {
        return Ok(None);
    }
    let file = TokenFile::open(&arguments.prefix)?;
    let tokenizer = arguments.tokenizer.load(&file)?;
    Ok(match file.info().map(|info| &info.eos_token) {
        Some(DocumentEnd::Token(end)) => tokenizer.and_then(|tokenizer| tokenizer.id(end)),
        _ => None,
    })
}

fn to_json(arguments: &Arguments, found: &Verification, is_sound: bool) -> Value {
    let problems = found.problems.iter().map(|problem| {
        json!({
            "kind": problem.kind, "is_fault": arguments.strict || problem.kind.is_fault(),
            "count": problem.count, "document": problem.document, "message": problem.message,
        })
    });
    let problems: Vec<Value> = problems.collect();
    json!({
        "prefix": arguments.prefix, "is_sound": is_sound, "documents": found.documents,
        "tokens": found.tokens, "vocabulary_size": found.vocabulary, "problems": problems,
    })
}
