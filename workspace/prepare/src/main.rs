//! `moh-data`: prepares token files and tokenizers.

mod program;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use moh_program::exit;

use crate::program::{info, prepare, tokenizer};

/// Convert text to token files, and train tokenizers.
#[derive(Parser)]
#[command(
    name = "moh-data",
    version,
    arg_required_else_help = true,
    after_help = "Example, from a text to a token file:\n  \
        moh-data tokenizer --vocab-size 1024 --out tokenizer text.jsonl\n  \
        moh-data prepare --tokenizer tokenizer --out text text.jsonl\n  \
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
        moh-data tokenizer --vocab-size 1024 --out tokenizer text.jsonl\n  \
        moh-data prepare --tokenizer tokenizer --out tokens text.jsonl")]
    Prepare(Box<prepare::Arguments>),
    /// Train a byte-level BPE tokenizer
    ///
    /// Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json. Every encoding
    /// starts with <|begin_of_text|>; moh-data prepare appends <|end_of_text|> to each document.
    #[command(after_help = "Example:\n  \
        moh-data tokenizer --vocab-size 2048 --out tokenizer text.jsonl")]
    Tokenizer(tokenizer::Arguments),
    /// Show the contents of a token file
    #[command(after_help = "Example:\n  \
        moh-data tokenizer --vocab-size 512 --out tokenizer text.jsonl\n  \
        moh-data prepare --tokenizer tokenizer --out tokens text.jsonl\n  \
        moh-data info tokens")]
    Info(info::Arguments),
}

fn main() -> ExitCode {
    let arguments = moh_program::arguments::parse::<Arguments>();
    exit::run(|| match arguments.command {
        Command::Prepare(arguments) => prepare::run(&arguments),
        Command::Tokenizer(arguments) => tokenizer::run(&arguments),
        Command::Info(arguments) => info::run(&arguments),
    })
}
