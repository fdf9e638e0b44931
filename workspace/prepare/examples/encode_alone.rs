//! The rate of the faster library by itself: documents of JSON lines that are in memory, encoded on all threads of
//! the pool, and nothing else. `tools/data/compare.py` compares `moh-data prepare` with it.
//!
//!     cargo run --release --example encode_alone -- tokenizer.json text.jsonl

use std::time::Instant;

use anyhow::{Context, anyhow};
use rayon::prelude::*;
use tokenizers_1::pipeline::EncodeOptions;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().context("usage: encode_alone TOKENIZER.json TEXT.jsonl");
    let tokenizer = std::fs::read_to_string(next()?)?;
    let lines = std::fs::read_to_string(next()?)?;
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
