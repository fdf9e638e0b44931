//! `moh-data show`.

use std::io::{Write, stdout};
use std::ops::Range;
use std::path::PathBuf;

use moh_data::{DocumentEnd, TokenFile};
use moh_program::arguments::at_least;
use moh_program::counted;
use moh_text::TextTokenizer;
use serde_json::json;

use super::TokenizerArguments;

#[derive(clap::Args)]
pub struct Arguments {
    /// Path of the token file, without .bin and .idx
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
    /// Number of the document, counted from 0
    #[arg(long, value_name = "N", value_parser = at_least::<u64>(0), required_unless_present = "tokens", conflicts_with = "tokens")]
    doc: Option<u64>,
    /// Tokens of the file, counted from 0, as in 100..110: the last one is left out
    #[arg(long, value_name = "FROM..TO", value_parser = range)]
    tokens: Option<Range<u64>>,
    /// Show at most this many tokens
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least::<u64>(1))]
    max_tokens: u64,
    #[command(flatten)]
    tokenizer: TokenizerArguments,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let file = TokenFile::open(&arguments.prefix)?;
    let (document, range) = place(&file, arguments)?;
    let shown = range.start..range.end.min(range.start.saturating_add(arguments.max_tokens));
    let ids = file.ids(shown.clone())?;
    let mask = file.has_mask().then(|| read_mask(&file, shown.clone())).transpose()?;
    let tokenizer = arguments.tokenizer.load(&file)?;
    let text = tokenizer.as_ref().map(|tokenizer| tokenizer.decode(&ids, false)).transpose()?;
    let recorded_end = match file.info().map(|info| &info.eos_token) {
        Some(DocumentEnd::Token(token)) => Some(token),
        _ => None,
    };
    // Only a document has an end.
    let last = match arguments.doc {
        Some(_) => file.ids(range.end.saturating_sub(1).max(range.start)..range.end)?.pop(),
        None => None,
    };
    let end_id = tokenizer.as_ref().zip(recorded_end);
    let end_id = end_id.and_then(|(tokenizer, token)| tokenizer.id(token));
    let ends = end_id.filter(|_| arguments.doc.is_some()).map(|id| last == Some(id));
    let more = range.end - shown.end;
    let mut out = stdout().lock();
    if arguments.json {
        let report = json!({
            "prefix": arguments.prefix, "document": document, "start": range.start,
            "tokens": range.end - range.start, "ids": ids, "mask": mask, "text": text, "more_tokens": more,
            "eos_token": recorded_end, "ends_with_eos": ends,
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    let tokens = counted(range.end - range.start, "token");
    let end = match (ends, recorded_end, last) {
        _ if arguments.doc.is_none() => String::new(),
        (Some(true), Some(token), _) => format!("; ends with {token}"),
        (Some(false), Some(token), _) => format!("; does not end with {token}"),
        (_, _, Some(last)) => format!("; the last id is {last}"),
        (_, _, None) => String::new(),
    };
    writeln!(out, "document {document}: {tokens} from token {} on{end}", range.start)?;
    match (&tokenizer, text, mask) {
        (Some(tokenizer), Some(_), Some(mask)) => {
            writeln!(out, "[[ and ]] are around what is trained on")?;
            writeln!(out, "{}", marked(tokenizer, &ids, &mask)?)?;
        }
        (_, Some(text), _) => writeln!(out, "{text}")?,
        (_, None, mask) => {
            let mask = mask.unwrap_or_default();
            let mark = |at| if mask.get(at) == Some(&1) { "*" } else { "" };
            let ids = ids.iter().enumerate().map(|(at, id)| format!("{id}{}", mark(at)));
            let ids: Vec<String> = ids.collect();
            if !mask.is_empty() {
                writeln!(out, "ids with * are trained on")?;
            }
            writeln!(out, "{}", ids.join(" "))?;
        }
    }
    if more > 0 {
        writeln!(out, "and {}: --max-tokens shows more", counted(more, "more token"))?;
    }
    Ok(())
}

/// Returns the positions to show, and the document of the first position.
fn place(file: &TokenFile, arguments: &Arguments) -> anyhow::Result<(u64, Range<u64>)> {
    match (arguments.doc, &arguments.tokens) {
        (None, Some(range)) => Ok((file.documents_of(range.clone())?.start, range.clone())),
        // One of the two options is given.
        (doc, _) => {
            let doc = doc.unwrap_or(0);
            Ok((doc, file.document(doc)?))
        }
    }
}

fn read_mask(file: &TokenFile, range: Range<u64>) -> anyhow::Result<Vec<u8>> {
    // The range is in the mapped file, so its length fits usize.
    let mut mask = vec![0; (range.end - range.start) as usize];
    file.read_mask(range.start, &mut mask)?;
    Ok(mask)
}

/// Returns the text of ids, with marks around the trained parts.
fn marked(tokenizer: &TextTokenizer, ids: &[u32], mask: &[u8]) -> anyhow::Result<String> {
    let mut text = String::new();
    let mut rest = ids;
    for run in mask.chunk_by(|a, b| a == b) {
        let (part, later) = rest.split_at(run.len());
        let part = tokenizer.decode(part, false)?;
        text.push_str(&if run[0] == 1 { format!("[[{part}]]") } else { part });
        rest = later;
    }
    Ok(text)
}

/// Parses positions, as in `100..110`.
fn range(text: &str) -> Result<Range<u64>, String> {
    let ends = text.split_once("..");
    let ends = ends.and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    ends.filter(|range: &Range<u64>| range.start < range.end)
        .ok_or_else(|| "expected two positions, the second one larger, as in 100..110".to_owned())
}
