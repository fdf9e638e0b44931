//! `moh-data`: prepares and inspects token files.

mod accept;
mod info;
mod prepare;
mod show;
mod verify;

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use moh_data::TokenFile;
use moh_program::exit;
use moh_text::TextTokenizer;

/// Convert text to token files, and inspect them.
#[derive(Parser)]
#[command(
    name = "moh-data",
    version,
    arg_required_else_help = true,
    after_help = "Example, from a text to a token file, with the tokenizer in the directory model:\n  \
        moh-data prepare --tokenizer model --out text text.jsonl\n  \
        moh-data info text"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Convert text to a token file (Megatron's indexed dataset)
    ///
    /// Inputs are files of Parquet, Arrow, JSON lines, arrays of JSON objects and plain text, compressed
    /// with gzip, Zstandard, bzip2 or xz or not, in any mixture; their content decides what they are. A
    /// plain text is one document, or with --format paragraphs one for each paragraph. The tokenizer
    /// determines whether documents start with BOS. Each ends with EOS: the token that the tokenizer adds
    /// or, if it adds none, the eos_token of its tokenizer_config.json or special_tokens_map.json.
    ///
    /// A command that was interrupted continues where it was when it is given again, and ends with the
    /// same bytes.
    #[command(after_help = "Example (writes tokens.bin, tokens.idx and tokens.json):\n  \
        moh-data prepare --tokenizer model --out tokens text.jsonl")]
    Prepare(Box<prepare::Arguments>),
    /// Show what a token file contains: its numbers and its tokenizer
    #[command(after_help = "Example:\n  \
        moh-data prepare --tokenizer model --out tokens text.jsonl\n  \
        moh-data info tokens")]
    Info(info::Arguments),
    /// Show a document of a token file, or some of its tokens
    #[command(after_help = "Example:\n  \
        moh-data prepare --tokenizer model --out tokens text.jsonl\n  \
        moh-data show --tokenizer model --doc 3 tokens\n  \
        moh-data show --tokens 100..110 tokens")]
    Show(show::Arguments),
    /// Verify all of a token file
    ///
    /// Faults end the command with exit code 1: tables that contradict themselves or the files, ids outside
    /// the vocabulary, and a record of other files. Documents without the recorded end of text, empty
    /// documents and duplicates are warnings. Reads the whole file once; 16 bytes for each document stay in
    /// memory.
    #[command(after_help = "Example:\n  \
        moh-data prepare --tokenizer model --out tokens text.jsonl\n  \
        moh-data verify tokens")]
    Verify(verify::Arguments),
    /// Accept another tokenizer than the one that token files were prepared with
    ///
    /// The tokenizer must have the same content, or give the same ids on a sample of each file: evenly spaced pieces,
    /// decoded and encoded again. It is then recorded in PREFIX.json, and all programs accept it.
    #[command(after_help = "Example:\n  \
        moh-data prepare --tokenizer model --out tokens text.jsonl\n  \
        moh-data accept --tokenizer model tokens")]
    Accept(accept::Arguments),
}

fn main() -> ExitCode {
    let arguments = moh_program::arguments::parse::<Arguments>();
    exit::run(|| match arguments.command {
        Command::Prepare(arguments) => prepare::run(&arguments),
        Command::Info(arguments) => info::run(&arguments),
        Command::Show(arguments) => show::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Accept(arguments) => accept::run(&arguments),
    })
}

/// Returns the special tokens in texts with their counts; `None` without any.
fn special_tokens(found: Option<&BTreeMap<String, u64>>) -> Option<String> {
    let shown = |(token, count): (&String, &u64)| format!("{token} {count}");
    let found = found.filter(|found| !found.is_empty())?;
    Some(found.iter().map(shown).collect::<Vec<_>>().join(", "))
}

// No documentation comment: clap would make it the text of the commands' help.
#[derive(clap::Args)]
struct TokenizerArguments {
    /// Tokenizer of the file: a directory with tokenizer.json, the file itself, or a hub id
    #[arg(long, value_name = "DIR|FILE|ID")]
    tokenizer: Option<String>,
    /// Branch, tag or commit on the hub [default: main]
    #[arg(long, requires = "tokenizer")]
    revision: Option<String>,
    /// Accept another tokenizer that gives the same ids on a sample of the file
    #[arg(long, requires = "tokenizer")]
    allow_other_tokenizer: bool,
}

impl TokenizerArguments {
    /// Returns the named tokenizer, if any. Fails if it is not the tokenizer that the file records.
    fn load(&self, file: &TokenFile) -> anyhow::Result<Option<TextTokenizer>> {
        let Some(name) = &self.tokenizer else { return Ok(None) };
        let tokenizer = moh_program::models::named_tokenizer(name, self.revision.as_deref())?;
        let found = tokenizer.check_file(file, self.allow_other_tokenizer)?;
        if let Some(remark) = found.remark() {
            let (path, prefix) = (tokenizer.path().display(), file.prefix().display());
            exit::stderr_line(format_args!("note: {path}: {remark}: {prefix}"));
        }
        Ok(Some(tokenizer))
    }
}
