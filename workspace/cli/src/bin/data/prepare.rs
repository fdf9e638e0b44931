//! `moh-data prepare`.

use std::io::{Write, stdout};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use moh_data::DocumentEnd;
use moh_program::arguments::{at_least, only};
use moh_program::progress::{Bar, of_bytes};
use moh_program::{counted, exit};
use moh_text::prepare::{
    AppendEos, BadRecords, Chat, ChatNotes, Counts, Format, Inputs, LoadAhead, Observer, Prepare,
    Prepared, PreparedFile, Progress, Sample, Selection, Split,
};
use moh_text::{ChatTemplate, RenderThreads, TrainedTurns};

use super::special_tokens;

/// The most time for rendering a conversation, far more than it needs on an idle processor.
const RENDERING_TIME: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub struct Arguments {
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
    /// Leave out documents with fewer tokens, counted with BOS and EOS
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(1))]
    min_tokens: Option<u64>,
    /// Leave out documents with more tokens, counted with BOS and EOS
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(1))]
    max_tokens: Option<u64>,
    /// Take this share of the documents, chosen by a hash of their text
    #[arg(long, value_name = "SHARE", value_parser = share)]
    sample: Option<f64>,
    /// Seed of --sample
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = at_least::<u64>(0), requires = "sample")]
    seed: u64,
    /// Leave out documents whose text an earlier one has; keeps 16 bytes for each document in memory
    #[arg(long)]
    exact_dedup: bool,
    /// Skip lines and rows that are no documents, and list them in PREFIX.bad.jsonl
    #[arg(long)]
    skip_bad_lines: bool,
    /// The largest share of bad lines and rows that is skipped
    #[arg(long, value_name = "PERCENT", default_value = "0.1%", value_parser = percent, requires = "skip_bad_lines")]
    max_bad: f64,
    /// Memory for texts and ids, as in 500MB or 2GB
    #[arg(long, value_name = "BYTES", default_value = "2GB", value_parser = memory)]
    memory: u64,
    /// Seconds after which what is complete is synced, so that an interrupted command continues after it
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    sync_every: Duration,
    /// Render conversations, the lists of messages in the field messages or --field, by the tokenizer's chat
    /// template, and write PREFIX.mask, which says what is the assistant's
    #[arg(long, conflicts_with_all = ["eos_token", "no_append_eos", "split_special_tokens"])]
    chat: bool,
    /// The assistant's turns that are trained on
    #[arg(long, value_enum, default_value = "all", requires = "chat")]
    chat_train: Turns,
    /// Field of the text: a name, a path such as a.b, or a template such as "{title}: {text}" [default: text]
    #[arg(long)]
    field: Option<String>,
    /// Format of all inputs [default: by their content and names]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Remove files of the hub when they were used, unless its cache has had them
    #[arg(long)]
    no_keep: bool,
    /// Files, globs and directories, those of datasets on the hub as hf://datasets/OWNER/NAME[@REVISION]/GLOB; - is
    /// standard input, which needs --format
    #[arg(required = true, value_name = "INPUT")]
    names: Vec<PathBuf>,
    /// Replace an existing token file
    #[arg(long)]
    force: bool,
    /// Throw away what an interrupted command has done
    #[arg(long)]
    begin_anew: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Turns {
    /// All of them
    All,
    /// The last message alone, for templates that leave out what the assistant thought before
    Last,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let inputs = Inputs { names: &arguments.names, keep: !arguments.no_keep };
    let stop = Arc::new(AtomicBool::new(false));
    // Inputs that can be read only once cannot be continued: nothing is saved.
    match moh_text::prepare::can_continue(inputs.names) {
        true => exit::stop_on_signals(&stop)?,
        false => exit::remove_temporary_files_on_signals()?,
    }
    let file =
        moh_program::models::tokenizer_file(&arguments.tokenizer, arguments.revision.as_deref())?;
    let ahead = (!arguments.chat).then(|| LoadAhead::start(&file));
    let tokenizer = moh_program::models::load_tokenizer(&file)?
        .split_special_tokens(arguments.split_special_tokens);
    let template = match arguments.chat {
        true => {
            let template = ChatTemplate::load(&tokenizer)?;
            Some(RenderThreads::new(template, RENDERING_TIME)?)
        }
        false => None,
    };
    let turns = match arguments.chat_train {
        Turns::All => TrainedTurns::All,
        Turns::Last => TrainedTurns::Last,
    };
    let options = Prepare {
        ahead: ahead.as_ref(),
        format: arguments.format,
        field: match &arguments.field {
            Some(field) => field,
            None if arguments.chat => "messages",
            None => "text",
        },
        chat: template.as_ref().map(|template| Chat { template, turns }),
        append_eos: match &arguments.eos_token {
            Some(token) => AppendEos::Token(token),
            None if arguments.no_append_eos => AppendEos::Never,
            None => AppendEos::Default,
        },
        selection: Selection {
            min_tokens: arguments.min_tokens,
            max_tokens: arguments.max_tokens,
            sample: arguments.sample.map(|share| Sample { share, seed: arguments.seed }),
            exact_dedup: arguments.exact_dedup,
        },
        bad_records: match arguments.skip_bad_lines {
            true => BadRecords::Skip { max_share: arguments.max_bad },
            false => BadRecords::Refuse,
        },
        inputs,
        split: arguments.split,
        overwrite: arguments.force,
        begin_anew: arguments.begin_anew,
        memory: arguments.memory,
        sync_every: arguments.sync_every,
        ..Prepare::new(&tokenizer, &[], &arguments.out)
    };
    let mut show = Show { bar: Bar::bytes("preparing", 0), first_tokens: None };
    let prepared = moh_text::prepare::prepare(options, &stop, &mut show)?;
    drop(show);
    match prepared {
        Some(prepared) => report(&prepared),
        None => Err(exit::StoppedEarly("stopped: the same command continues".to_owned()).into()),
    }
}

/// Shows the progress of a preparation.
struct Show {
    bar: Bar,
    /// Tokens at the start: the tokens of an interrupted command.
    first_tokens: Option<u64>,
}

impl Observer for Show {
    fn note(&mut self, sentence: &str) {
        exit::stderr_line(format_args!("{sentence}"));
    }

    fn progress(&mut self, progress: Progress) {
        let Progress { bytes, total_bytes, downloaded_bytes, download_bytes, .. } = progress;
        let Progress { documents, tokens, .. } = progress;
        let first = *self.first_tokens.get_or_insert(tokens);
        self.bar.describe(|elapsed| {
            let rate = (tokens - first) as f64 / elapsed.as_secs_f64().max(1e-3);
            let documents = counted(documents, "document");
            let mut text = format!("{documents}, {} tokens/s", rate as u64);
            // While remote inputs are missing.
            if downloaded_bytes < download_bytes {
                text += &format!(", downloaded {}", of_bytes(downloaded_bytes, download_bytes));
            }
            text
        });
        self.bar.update(bytes, total_bytes);
    }
}

fn report(prepared: &Prepared) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    for PreparedFile { prefix, info } in &prepared.files {
        let end = match &info.eos_token {
            DocumentEnd::Token(token) => format!("each document ends with {token}"),
            DocumentEnd::Unknown => "documents end as the chat template says".to_owned(),
            DocumentEnd::Nothing => "documents end without an end-of-text token".to_owned(),
        };
        writeln!(
            out,
            "{}: {}, {}, {} of text; {end}",
            prefix.display(),
            counted(info.documents, "document"),
            counted(info.tokens, "token"),
            counted(info.text_bytes, "byte"),
        )?;
        if let Some(mask) = &info.mask {
            let share = 100.0 * mask.trained_tokens as f64 / info.tokens.max(1) as f64;
            let trained = counted(mask.trained_tokens, "token");
            writeln!(out, "{}: {trained} trained on, {share:.1}%", prefix.display())?;
        }
        if let Some(special) = special_tokens(info.special_tokens_in_text.as_ref()) {
            let remedy = match info.mask {
                None => "--split-special-tokens encodes them as text",
                Some(_) => "change them in the messages if a user must not write them",
            };
            exit::stderr_line(format_args!(
                "warning: {}: special tokens in the text became those tokens ({special}): {remedy}",
                prefix.display()
            ));
        }
    }
    let left_out = left_out(&prepared.counts);
    if !left_out.is_empty() {
        writeln!(out, "left out: {}", left_out.join(", "))?;
    }
    for note in chat_notes(&prepared.notes) {
        exit::stderr_line(format_args!("warning: {note}"));
    }
    if let Some(list) = &prepared.bad_list {
        let bad = prepared.counts.bad;
        exit::stderr_line(format_args!(
            "warning: {} skipped, listed in {}",
            counted(bad, "bad record"),
            list.display()
        ));
    }
    Ok(())
}

/// Returns the numbers of omitted documents, with the reasons.
fn left_out(counts: &Counts) -> Vec<String> {
    let reasons = [
        (counts.empty, "without a token"),
        (counts.short, "with too few tokens"),
        (counts.long, "with too many tokens"),
        (counts.not_sampled, "outside the sample"),
        (counts.duplicates, "with the text of an earlier one"),
    ];
    let some = reasons.into_iter().filter(|&(count, _)| count > 0);
    some.map(|(count, reason)| format!("{} {reason}", counted(count, "document"))).collect()
}

/// Returns remarks on message keys and contents that the chat template ignores, and on conversations without training.
fn chat_notes(notes: &ChatNotes) -> Vec<String> {
    let keys = notes.unnamed.iter();
    let keys: Vec<_> =
        keys.map(|(key, &count)| format!("{key:?} in {}", counted(count, "message"))).collect();
    let unread = (!keys.is_empty()).then(|| {
        format!("the chat template names none of these keys of messages: {}", keys.join(", "))
    });
    let misread = (notes.misread > 0).then(|| {
        format!(
            "{} with a list of parts as content, where the chat template writes a text, or with a text where it reads \
             parts: the text that is trained on is not what they say",
            counted(notes.misread, "message")
        )
    });
    let untrained = (notes.untrained > 0).then(|| {
        format!(
            "{} without an answer to train on, which take time and teach nothing: leave them out",
            counted(notes.untrained, "conversation")
        )
    });
    unread.into_iter().chain(misread).chain(untrained).collect()
}

const EXPECTED_SHARE: &str = "expected a share of the documents above 0 and at most 1, as in 0.1";

/// Parses a share: above 0, at most 1.
fn share(text: &str) -> Result<f64, String> {
    only(|share: &f64| *share > 0.0 && *share <= 1.0, EXPECTED_SHARE)(text)
}

/// Parses a share in percent, from 0% to 100%.
fn percent(text: &str) -> Result<f64, String> {
    let percent: Option<f64> = text.strip_suffix('%').and_then(|number| number.trim().parse().ok());
    let percent = percent.filter(|percent| (0.0..=100.0).contains(percent));
    percent
        .map(|percent| percent / 100.0)
        .ok_or_else(|| "expected a percentage from 0% to 100%, as in 0.1%".to_owned())
}

/// Parses bytes, as in `500MB` or `2GB`: at least 64 MB.
fn memory(text: &str) -> Result<u64, String> {
    const LEAST: u64 = 64_000_000;
    let units = [
        ("kB", 1_000),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
    ];
    let unit = units.into_iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, bytes)));
    let (number, unit) = unit.unwrap_or((text, 1));
    let bytes: Option<f64> = number.trim().parse().ok();
    // The cast saturates, at more than any memory.
    let bytes = bytes.map(|bytes| (bytes * unit as f64) as u64).filter(|&bytes| bytes >= LEAST);
    bytes.ok_or_else(|| "expected at least 64 MB, as in 500MB or 2GB".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok();
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| "expected a number of seconds of at least 0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_units() {
        assert_eq!(memory("2GB"), Ok(2_000_000_000));
        assert_eq!(memory("0.5 GiB"), Ok(1 << 29));
        assert_eq!(memory("64000000"), Ok(64_000_000));
        assert!(memory("1MB").is_err() && memory("-2GB").is_err() && memory("lots").is_err());
        assert_eq!((percent("0.1%"), percent("100%")), (Ok(0.001), Ok(1.0)));
        assert!(percent("0.1").is_err() && percent("101%").is_err() && percent("NaN%").is_err());
        assert_eq!((share("0.1"), share("1")), (Ok(0.1), Ok(1.0)));
        assert!(share("0").is_err() && share("1.1").is_err() && share("NaN").is_err());
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        assert!(seconds("-1").is_err());
    }
}
