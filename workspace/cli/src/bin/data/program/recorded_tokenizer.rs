//! The tokenizer of a token file, as an option of the commands that show or verify text.

use moh_data::TokenFile;
use moh_program::exit;
use moh_text::TextTokenizer;

#[derive(clap::Args)]
pub struct TokenizerArguments {
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
    /// Whether a tokenizer is named.
    pub fn is_named(&self) -> bool {
        self.tokenizer.is_some()
    }

    /// The tokenizer, if one is named, which is the one that the file records.
    pub fn load(&self, file: &TokenFile) -> anyhow::Result<Option<TextTokenizer>> {
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
