//! The inputs of a command.

use std::path::PathBuf;

use clap::ValueEnum;
use moh_prepare::Format;

#[derive(clap::Args)]
pub struct InputArguments {
    /// Field of the text: a name, a path such as a.b, or a template such as "{title}: {text}" [default: text]
    #[arg(long)]
    field: Option<String>,
    /// Format of all inputs [default: by their content and names]
    #[arg(long, value_enum)]
    format: Option<FormatName>,
    /// Files, globs and directories; - is standard input, which needs --format
    #[arg(required = true, value_name = "INPUT")]
    pub inputs: Vec<PathBuf>,
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
