//! `moh-data`: prepares token files and tokenizers.

use std::collections::BTreeMap;
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use moh_data::{
    AppendEos, DocumentEnd, Format, Prepare, PreparedFile, Split, TokenFile, TrainTokenizer,
};
use moh_program::arguments::at_least;
use moh_program::progress::Bar;
use moh_program::{counted, exit, models};

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
    /// Inputs ending in .jsonl or .json contain one JSON object per line; any other input is plain
    /// text and one document, or with --format paragraphs one for each paragraph. The tokenizer determines whether documents start with BOS. Each ends
    /// with EOS: the token that the tokenizer adds or, if it adds none, the eos_token of its
    /// tokenizer_config.json or special_tokens_map.json.
    #[command(after_help = "Example (writes tokens.bin, tokens.idx and tokens.json):\n  \
        moh-data tokenizer --vocab-size 1024 --out tokenizer text.jsonl\n  \
        moh-data prepare --tokenizer tokenizer --out tokens text.jsonl")]
    Prepare(PrepareArguments),
    /// Train a byte-level BPE tokenizer
    ///
    /// Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json. Every encoding
    /// starts with <|begin_of_text|>; moh-data prepare appends <|end_of_text|> to each document.
    #[command(after_help = "Example:\n  \
        moh-data tokenizer --vocab-size 2048 --out tokenizer text.jsonl")]
    Tokenizer(TokenizerArguments),
    /// Show the contents of a token file
    #[command(after_help = "Example:\n  \
        moh-data tokenizer --vocab-size 512 --out tokenizer text.jsonl\n  \
        moh-data prepare --tokenizer tokenizer --out tokens text.jsonl\n  \
        moh-data info tokens")]
    Info(InfoArguments),
}

#[derive(clap::Args)]
struct PrepareArguments {
    /// Tokenizer: a directory with tokenizer.json, the file itself, or a hub id
    #[arg(long, value_name = "DIR|FILE|ID")]
    tokenizer: String,
    /// Branch, tag or commit on the hub [default: main]
    #[arg(long)]
    revision: Option<String>,
    /// Path of the token file, without .bin and .idx
    #[arg(long, value_name = "PREFIX")]
    out: PathBuf,
    /// Token after each document [default: the tokenizer's eos_token]
    #[arg(long, value_name = "TOKEN", conflicts_with = "no_append_eos")]
    eos_token: Option<String>,
    /// Append no token to documents
    #[arg(long)]
    no_append_eos: bool,
    /// Encode special tokens that occur in a text, such as </s>, as any other text, instead of as those tokens
    #[arg(long)]
    split_special_tokens: bool,
    /// Write PREFIX-train and PREFIX-validation with these shares of the documents, as in 0.99,0.01
    #[arg(long, value_name = "SHARE,SHARE", allow_hyphen_values = true)]
    split: Option<Split>,
    #[command(flatten)]
    inputs: InputArguments,
    /// Replace an existing token file
    #[arg(long)]
    force: bool,
}

#[derive(clap::Args)]
struct InputArguments {
    /// Field of a JSON line with the text
    #[arg(long, default_value = "text")]
    field: String,
    /// Format of all inputs [default: by their names]
    #[arg(long, value_enum)]
    format: Option<FormatName>,
    /// Text files; - is standard input, which needs --format
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormatName {
    /// One JSON object per line
    Jsonl,
    /// Plain text, one document
    Text,
    /// Plain text, a document for each paragraph; blank lines separate them
    Paragraphs,
}

impl InputArguments {
    fn format(&self) -> Option<Format> {
        self.format.map(|name| match name {
            FormatName::Jsonl => Format::JsonLines,
            FormatName::Text => Format::Text,
            FormatName::Paragraphs => Format::Paragraphs,
        })
    }
}

#[derive(clap::Args)]
struct TokenizerArguments {
    /// Requested number of ids, including special tokens and bytes
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    vocab_size: usize,
    /// Directory for the tokenizer's files
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    inputs: InputArguments,
    /// Replace an existing tokenizer
    #[arg(long)]
    force: bool,
}

#[derive(clap::Args)]
struct InfoArguments {
    /// Path of the token file, without .bin and .idx
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
}

fn main() -> ExitCode {
    let arguments = moh_program::arguments::parse::<Arguments>();
    exit::run(|| {
        exit::remove_temporary_files_on_signals()?;
        match arguments.command {
            Command::Prepare(arguments) => prepare(&arguments),
            Command::Tokenizer(arguments) => train_tokenizer(&arguments),
            Command::Info(arguments) => info(&arguments),
        }
    })
}

fn prepare(arguments: &PrepareArguments) -> anyhow::Result<()> {
    let tokenizer = models::named_tokenizer(&arguments.tokenizer, arguments.revision.as_deref())?
        .split_special_tokens(arguments.split_special_tokens);
    let mut bar = Bar::bytes("preparing", 0);
    let options = Prepare {
        format: arguments.inputs.format(),
        field: &arguments.inputs.field,
        append_eos: match &arguments.eos_token {
            Some(token) => AppendEos::Token(token),
            None if arguments.no_append_eos => AppendEos::Never,
            None => AppendEos::Default,
        },
        split: arguments.split,
        overwrite: arguments.force,
        ..Prepare::new(&tokenizer, &arguments.inputs.inputs, &arguments.out)
    };
    let prepared = moh_data::prepare(options, &mut |done, total| bar.update(done, total))?;
    drop(bar);
    let mut out = stdout().lock();
    for PreparedFile { prefix, info } in prepared {
        let end = match info.eos_token {
            DocumentEnd::Token(token) => format!("each document ends with {token}"),
            _ => "documents end without an end-of-text token".to_owned(),
        };
        writeln!(
            out,
            "{}: {}, {}, {} of text; {end}",
            prefix.display(),
            counted(info.documents, "document"),
            counted(info.tokens, "token"),
            counted(info.text_bytes, "byte"),
        )?;
        if let Some(special) = special_tokens(info.special_tokens_in_text.as_ref()) {
            exit::stderr_line(format_args!(
                "warning: {}: special tokens in the text became those tokens ({special}): \
                 --split-special-tokens encodes them as text",
                prefix.display()
            ));
        }
    }
    Ok(())
}

/// The special tokens of texts with their number; `None` if there are none.
fn special_tokens(found: Option<&BTreeMap<String, u64>>) -> Option<String> {
    let shown = |(token, count): (&String, &u64)| format!("{token} {count}");
    let found = found.filter(|found| !found.is_empty())?;
    Some(found.iter().map(shown).collect::<Vec<_>>().join(", "))
}

fn train_tokenizer(arguments: &TokenizerArguments) -> anyhow::Result<()> {
    let mut bar = Bar::bytes("reading", 0);
    let options = TrainTokenizer {
        inputs: &arguments.inputs.inputs,
        format: arguments.inputs.format(),
        field: &arguments.inputs.field,
        vocab_size: arguments.vocab_size,
        dir: &arguments.out,
        overwrite: arguments.force,
    };
    let tokenizer = moh_data::train_tokenizer(options, &mut |done, total| bar.update(done, total))?;
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

fn info(arguments: &InfoArguments) -> anyhow::Result<()> {
    let file = TokenFile::open(&arguments.prefix)?;
    let mut out = stdout().lock();
    writeln!(out, "documents  {}", file.num_documents())?;
    writeln!(out, "tokens     {}", file.num_tokens())?;
    writeln!(out, "longest    {}", counted(file.longest_document(), "token"))?;
    writeln!(out, "dtype      {}", file.token_type().name())?;
    let Some(info) = file.info() else {
        writeln!(out, "tokenizer  not recorded")?;
        return Ok(());
    };
    let hash = info.tokenizer_hash.as_deref().unwrap_or("not recorded");
    writeln!(out, "tokenizer  {hash}")?;
    writeln!(out, "vocabulary {}", info.vocabulary_size)?;
    let eos = match &info.eos_token {
        DocumentEnd::Token(token) => token,
        DocumentEnd::Nothing => "none",
        DocumentEnd::Unknown => "not recorded",
    };
    writeln!(out, "eos token  {eos}")?;
    if let Some(special) = special_tokens(info.special_tokens_in_text.as_ref()) {
        writeln!(out, "in texts   {special}")?;
    }
    if info.split_special_tokens {
        writeln!(out, "in texts   special tokens are text")?;
    }
    writeln!(out, "text       {}", counted(info.text_bytes, "byte"))?;
    for source in &info.sources {
        writeln!(out, "source     {source}")?;
    }
    Ok(())
}
