//! Measures the faster library alone: encodes documents of JSON lines in memory on all threads of the pool.
//! `tools/data/compare.py` compares `moh-data prepare` with it.
//!
//!     cargo run --release --example encode_alone -- tokenizer.json text.jsonl
//!
//! Without arguments it encodes a sentence many times with the quickstart's tokenizer.

use std::time::Instant;

use anyhow::{Context, anyhow, bail};
use rayon::prelude::*;
use tokenizers_1::pipeline::EncodeOptions;

/// The tokenizer without arguments.
const TOKENIZER: &str = include_str!("../../../recipes/quickstart/tokenizer.json");
/// A line of the text without arguments.
const LINE: &str = "{\"text\": \"The ship left the village, and the village left the ship.\"}\n";

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (tokenizer, lines) = match &arguments[..] {
        [] => (TOKENIZER.to_owned(), LINE.repeat(10_000)),
        [tokenizer, text] => (std::fs::read_to_string(tokenizer)?, std::fs::read_to_string(text)?),
        _ => bail!("usage: encode_alone [TOKENIZER.json TEXT.jsonl]"),
    };
    let error = |error: &dyn std::fmt::Display| anyhow!("{error}");
    let tokenizer = tokenizers_1::canonicalize_str(&tokenizer).map_err(|found| error(&found))?;
    let tokenizer = tokenizers_1::from_json(&tokenizer).map_err(|found| error(&found))?;
    let texts: Vec<String> = lines
        .par_lines()
        .map(|line| {
            let fields: serde_json::Value = serde_json::from_str(line)?;
            Ok(fields["text"].as_str().context("a line without a text")?.to_owned())
        })
        .collect::<anyhow::Result<_>>()?;
    let bytes: usize = texts.iter().map(String::len).sum();
    let options = EncodeOptions::no_specials();
    let started = Instant::now();
    let tokens = texts
        .par_iter()
        .map(|text| {
            let mut ids = Vec::with_capacity(text.len() / 4);
            tokenizer.encode_into(text, &options, &mut ids).map_err(|found| error(&found))?;
            Ok(ids.len())
        })
        .sum::<anyhow::Result<usize>>()?;
    let seconds = started.elapsed().as_secs_f64();
    println!("{{\"bytes\": {bytes}, \"tokens\": {tokens}, \"seconds\": {seconds}}}");
    Ok(())
}
