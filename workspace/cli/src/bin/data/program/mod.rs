//! The commands of `moh-data`.

pub mod accept;
pub mod info;
pub mod prepare;
pub mod show;
pub mod verify;

use std::collections::BTreeMap;

use moh_data::TokenFile;
use moh_program::exit;
use moh_text::TextTokenizer;

/// Special tokens that texts name with their number; `None` if there are none.
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
    /// The tokenizer, if one is named, which is the one that the file records.
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
