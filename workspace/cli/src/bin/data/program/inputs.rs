//! The inputs of `moh-data prepare`.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use moh_program::progress::{Bar, of_bytes};
use moh_text::prepare::{Format, Inputs, Reading};

#[derive(clap::Args)]
pub struct InputArguments {
    /// Field of the text: a name, a path such as a.b, or a template such as "{title}: {text}" [default: text]
    #[arg(long)]
    field: Option<String>,
    /// Format of all inputs [default: by their content and names]
    #[arg(long, value_enum)]
    format: Option<FormatName>,
    /// Remove files of the hub when they were used, unless its cache has had them
    #[arg(long)]
    no_keep: bool,
    /// Files, globs and directories, those of datasets on the hub as hf://datasets/OWNER/NAME[@REVISION]/GLOB; - is
    /// standard input, which needs --format
    #[arg(required = true, value_name = "INPUT")]
    names: Vec<PathBuf>,
}

/// Shows how far the inputs are read with what `detail` says, and how much of remote ones is there while some is
/// missing.
pub fn show(bar: &mut Bar, reading: Reading, detail: impl FnOnce(Duration) -> String) {
    let Reading { bytes, total_bytes, downloaded_bytes, download_bytes } = reading;
    bar.describe(|elapsed| {
        let mut text = detail(elapsed);
        if downloaded_bytes < download_bytes {
            text += &format!(", downloaded {}", of_bytes(downloaded_bytes, download_bytes));
        }
        text
    });
    bar.update(bytes, total_bytes);
}

#[derive(Clone, Copy, ValueEnum)]
enum FormatName {
    /// One JSON object per line
    Jsonl,
    /// One array of JSON objects
    Json,
    /// Plain text, one document
    Text,
    /// Plain text, a document for each paragraph; blank lines separate them
    Paragraphs,
    /// Tables of Parquet
    Parquet,
    /// Tables of Arrow
    Arrow,
}

impl InputArguments {
    /// The field that is named, or else `default`.
    pub fn field<'a>(&'a self, default: &'a str) -> &'a str {
        self.field.as_deref().unwrap_or(default)
    }

    /// What is read.
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs { names: &self.names, keep: !self.no_keep }
    }

    pub fn format(&self) -> Option<Format> {
        self.format.map(|name| match name {
            FormatName::Jsonl => Format::JsonLines,
            FormatName::Json => Format::JsonArray,
            FormatName::Text => Format::Text,
            FormatName::Paragraphs => Format::Paragraphs,
            FormatName::Parquet => Format::Parquet,
            FormatName::Arrow => Format::Arrow,
        })
    }
}
