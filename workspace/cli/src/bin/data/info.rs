//! `moh-data info`.

use std::io::{Write, stdout};
use std::path::PathBuf;

use moh_data::{DocumentEnd, TokenFile};
use moh_program::counted;
use serde_json::json;

use super::special_tokens;

#[derive(clap::Args)]
pub struct Arguments {
    /// Path of the token file, without .bin and .idx
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let file = TokenFile::open(&arguments.prefix)?;
    let longest = file.longest_document();
    let mut out = stdout().lock();
    if arguments.json {
        let report = json!({
            "prefix": arguments.prefix, "documents": file.num_documents(), "tokens": file.num_tokens(),
            "dtype": file.token_type(), "longest": longest, "recorded": file.info(),
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(out, "documents  {}", file.num_documents())?;
    writeln!(out, "tokens     {}", file.num_tokens())?;
    writeln!(out, "longest    {}", counted(longest, "token"))?;
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
    if let Some(mask) = &info.mask {
        let share = 100.0 * mask.trained_tokens as f64 / info.tokens.max(1) as f64;
        writeln!(out, "trained    {}, {share:.1}%", counted(mask.trained_tokens, "token"))?;
    }
    if info.split_special_tokens {
        writeln!(out, "in texts   special tokens are text")?;
    }
    match info.text_bytes {
        0 => writeln!(out, "text       not recorded")?,
        bytes => writeln!(out, "text       {}", counted(bytes, "byte"))?,
    }
    for source in &info.sources {
        writeln!(out, "source     {source}")?;
    }
    Ok(())
}
