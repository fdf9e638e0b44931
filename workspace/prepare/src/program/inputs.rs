//! The inputs of a command.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use moh_prepare::{DatasetSplit, Format, Inputs, Reading, Split};
use moh_program::exit::Usage;
use moh_program::progress::{Bar, of_bytes};

#[derive(clap::Args)]
pub struct InputArguments {
    /// Field of the text: a name, a path such as a.b, or a template such as "{title}: {text}" [default: text]
    #[arg(long)]
    field: Option<String>,
    /// Format of all inputs [default: by their content and names]
    #[arg(long, value_enum)]
    format: Option<FormatName>,
    /// Dataset on the hub, a split of which is read before other inputs; files of it are an INPUT instead
    #[arg(long, value_name = "OWNER/NAME[@REVISION]")]
    dataset: Option<DatasetSplit>,
    /// Configuration of the dataset [default: the one that it declares]
    #[arg(long, value_name = "NAME", requires = "dataset")]
    config: Option<String>,
    /// Remove files of the hub when they were used, unless its cache has had them
    #[arg(long)]
    no_keep: bool,
    /// Files, globs and directories, those of datasets on the hub as hf://datasets/OWNER/NAME[@REVISION]/GLOB; - is
    /// standard input, which needs --format
    #[arg(required_unless_present = "dataset", value_name = "INPUT")]
    names: Vec<PathBuf>,
}

/// A value of `--split`: the split of the dataset that is read, or the shares of the parts that are written.
#[derive(Clone, Debug, PartialEq)]
pub enum SplitValue {
    Name(String),
    Shares(Split),
}

impl std::str::FromStr for SplitValue {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_name = |text: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "_.-".contains(c))
        };
        match text.parse::<f64>().is_err() && is_name(text) && !text.starts_with('-') {
            true => Ok(SplitValue::Name(text.to_owned())),
            false => text.parse().map(SplitValue::Shares),
        }
    }
}

/// What is read: [`InputArguments`] and the name of a split.
pub struct NamedInputs<'a> {
    dataset: Option<DatasetSplit>,
    names: &'a [PathBuf],
    keep: bool,
}

impl NamedInputs<'_> {
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs { dataset: self.dataset.as_ref(), names: self.names, keep: self.keep }
    }
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

    /// The names of files and the like, without the dataset.
    pub fn names(&self) -> &[PathBuf] {
        &self.names
    }

    /// What is read, with the name of the dataset's split.
    ///
    /// # Errors
    /// Fails if a split is named without a dataset, or two are.
    pub fn named(&self, splits: &[&str]) -> Result<NamedInputs<'_>, Usage> {
        let split = match splits {
            [] => None,
            [split] => Some((*split).to_owned()),
            _ => return Err(Usage("--split names two splits: name one of the dataset".to_owned())),
        };
        if let (None, Some(split)) = (&self.dataset, &split) {
            let reason = "is no pair of shares like 0.99,0.01, and a split by name needs --dataset";
            return Err(Usage(format!("--split {split} {reason}")));
        }
        let dataset = self.dataset.clone();
        let dataset =
            dataset.map(|dataset| DatasetSplit { config: self.config.clone(), split, ..dataset });
        Ok(NamedInputs { dataset, names: &self.names, keep: !self.no_keep })
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
