//! `moh-data`: prepares token files, tokenizers and stories.

use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use moh_cli::exit;
use moh_cli::progress::Bar;
use moh_data::{Prepare, TextTokenizer, TokenFile, TrainTokenizer};
use moh_stories::{Setting, story};

/// Convert text to token files, train tokenizers, and write stories to try them on.
#[derive(Parser)]
#[command(
    name = "moh-data",
    version,
    arg_required_else_help = true,
    after_help = "Example, from nothing to a token file:\n  \
        moh-data stories --seed 1 --count 2000 --out stories.jsonl\n  \
        moh-data tokenizer --vocab-size 1024 --out tokenizer stories.jsonl\n  \
        moh-data prepare --tokenizer tokenizer --out stories stories.jsonl\n  \
        moh-data info stories"
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
    /// text and one document. The tokenizer determines whether documents start with BOS and end
    /// with EOS.
    #[command(after_help = "Example (writes text.bin, text.idx and text.json):\n  \
        moh-data stories --seed 1 --count 2000 --out example.jsonl\n  \
        moh-data tokenizer --vocab-size 1024 --out example-tokenizer example.jsonl\n  \
        moh-data prepare --tokenizer example-tokenizer --out text example.jsonl")]
    Prepare(PrepareArguments),
    /// Write short English stories to train a small model on
    #[command(after_help = "Example:\n  \
        moh-data stories --seed 1 --count 10000 --setting village --out village.jsonl")]
    Stories(StoriesArguments),
    /// Train a byte-level BPE tokenizer
    ///
    /// Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json. Documents are
    /// framed by <|begin_of_text|> and <|end_of_text|>.
    #[command(after_help = "Example:\n  \
        moh-data stories --seed 1 --count 5000 --out words.jsonl\n  \
        moh-data tokenizer --vocab-size 2048 --out words-tokenizer words.jsonl")]
    Tokenizer(TokenizerArguments),
    /// Show the contents of a token file
    #[command(after_help = "Example:\n  \
        moh-data stories --seed 1 --count 500 --out few.jsonl\n  \
        moh-data tokenizer --vocab-size 512 --out few-tokenizer few.jsonl\n  \
        moh-data prepare --tokenizer few-tokenizer --out few few.jsonl\n  \
        moh-data info few")]
    Info(InfoArguments),
}

#[derive(clap::Args)]
struct PrepareArguments {
    /// Directory of tokenizer.json
    #[arg(long, value_name = "DIR")]
    tokenizer: PathBuf,
    /// Path of the token file, without .bin and .idx
    #[arg(long, value_name = "PREFIX")]
    out: PathBuf,
    /// Field of a JSON line with the text
    #[arg(long, default_value = "text")]
    field: String,
    /// Replace an existing token file
    #[arg(long)]
    force: bool,
    /// Text files
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
}

#[derive(clap::Args)]
struct StoriesArguments {
    /// Seed; the same seed gives the same stories
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of stories
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Setting of the stories
    #[arg(long, value_enum, default_value_t = SettingName::Village)]
    setting: SettingName,
    /// JSON lines file to write
    #[arg(long, value_name = "FILE.jsonl")]
    out: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum SettingName {
    /// Children in a village
    Village,
    /// Children on a ship and among islands: new text for a model trained on the village
    Voyage,
}

#[derive(clap::Args)]
struct TokenizerArguments {
    /// Requested number of ids, including special tokens and bytes
    #[arg(long, value_name = "N")]
    vocab_size: usize,
    /// Directory for the tokenizer's files
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Field of a JSON line with the text
    #[arg(long, default_value = "text")]
    field: String,
    /// Replace an existing tokenizer
    #[arg(long)]
    force: bool,
    /// Text files
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
}

#[derive(clap::Args)]
struct InfoArguments {
    /// Path of the token file, without .bin and .idx
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    exit::run(|| match arguments.command {
        Command::Prepare(arguments) => prepare(&arguments),
        Command::Stories(arguments) => write_stories(&arguments),
        Command::Tokenizer(arguments) => train_tokenizer(&arguments),
        Command::Info(arguments) => info(&arguments),
    })
}

fn prepare(arguments: &PrepareArguments) -> anyhow::Result<()> {
    let tokenizer = TextTokenizer::load(&arguments.tokenizer)?;
    let mut bar = Bar::bytes("preparing", 0);
    let options = Prepare {
        tokenizer: &tokenizer,
        inputs: &arguments.inputs,
        field: &arguments.field,
        prefix: &arguments.out,
        overwrite: arguments.force,
    };
    let info = moh_data::prepare(options, &mut |done, total| bar.update(done, total))?;
    drop(bar);
    writeln!(
        stdout(),
        "{}: {} documents, {} tokens, {} bytes of text",
        arguments.out.display(),
        info.documents,
        info.tokens,
        info.text_bytes
    )?;
    Ok(())
}

fn write_stories(arguments: &StoriesArguments) -> anyhow::Result<()> {
    let setting = match arguments.setting {
        SettingName::Village => Setting::Village,
        SettingName::Voyage => Setting::Voyage,
    };
    let (seed, count) = (arguments.seed, arguments.count);
    let mut bar = Bar::count("stories", count);
    moh_data::write_documents(
        &arguments.out,
        count,
        |number| story(setting, seed, number),
        arguments.force,
        &mut |done, total| bar.update(done, total),
    )?;
    drop(bar);
    writeln!(stdout(), "{}: {count} stories", arguments.out.display())?;
    Ok(())
}

fn train_tokenizer(arguments: &TokenizerArguments) -> anyhow::Result<()> {
    let mut bar = Bar::bytes("reading", 0);
    let options = TrainTokenizer {
        inputs: &arguments.inputs,
        field: &arguments.field,
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
    writeln!(out, "longest    {} tokens", file.longest_document())?;
    writeln!(out, "dtype      {}", file.token_type().name())?;
    let Some(info) = file.info() else {
        writeln!(out, "tokenizer  not recorded")?;
        return Ok(());
    };
    let hash = info.tokenizer_hash.as_deref().unwrap_or("not recorded");
    writeln!(out, "tokenizer  {hash}")?;
    writeln!(out, "vocabulary {}", info.vocabulary_size)?;
    writeln!(out, "text       {} bytes", info.text_bytes)?;
    for source in &info.sources {
        writeln!(out, "source     {source}")?;
    }
    Ok(())
}
