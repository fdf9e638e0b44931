//! Models and tokenizers by name, for programs: located, on the hub too, and loaded.

use std::path::{Path, PathBuf};

use crate::exit;
use crate::progress::Bar;
use anyhow::{Context as _, bail};
use moh_checkpoint::run_directory::{CheckpointName, export_command, not_a_model};
use moh_hf::hub::{DownloadProgress, Hub};
use moh_hf::{ConfigFile, StoredModel};
use moh_kernels::{Backend, Element};
use moh_model::Model;
use moh_text::TextTokenizer;

/// The directory of a model: itself, or a repository of the hub, downloaded if necessary.
pub fn locate(model: &str, revision: Option<&str>) -> anyhow::Result<PathBuf> {
    if let Some(CheckpointName { step: Some(_), .. }) = CheckpointName::parse(model) {
        bail!("{model}: is a checkpoint of a run, {}", export_command(model));
    }
    let mut show = ShowDownload::default();
    let directory =
        Hub::from_environment().resolve(model, revision, &mut |download| show.update(download))?;
    match not_a_model(&directory) {
        None => Ok(directory),
        Some(kind) => bail!("{}: {kind}", directory.display()),
    }
}

/// Loads a tokenizer: a `tokenizer.json`, a directory with one, or that of a repository of the hub,
/// downloaded if necessary.
pub fn named_tokenizer(name: &str, revision: Option<&str>) -> anyhow::Result<TextTokenizer> {
    Ok(TextTokenizer::load(&tokenizer_file(name, revision)?)?)
}

/// The `tokenizer.json` of [`named_tokenizer`].
pub fn tokenizer_file(name: &str, revision: Option<&str>) -> anyhow::Result<PathBuf> {
    let path = Path::new(name);
    if path.is_file() {
        return Ok(path.to_path_buf());
    }
    let mut show = ShowDownload::default();
    let directory = Hub::from_environment()
        .resolve_tokenizer(name, revision, &mut |download| show.update(download))?;
    Ok(directory.join("tokenizer.json"))
}

/// The bar of a download; there is none before its first progress.
#[derive(Default)]
struct ShowDownload(Option<Bar>);

impl ShowDownload {
    fn update(&mut self, download: &DownloadProgress<'_>) {
        let total = download.total;
        let bar = self.0.get_or_insert_with(|| Bar::bytes("downloading", total));
        bar.update(download.bytes, total);
    }
}

/// Loads the model in `directory` to a device, for sequences of up to `positions` tokens.
pub fn load<B: Backend, T: Element>(
    backend: B,
    directory: &Path,
    positions: usize,
) -> anyhow::Result<Model<B, T>> {
    Ok(stored(directory)?.load(backend, positions)?)
}

/// Opens the files of the model in `directory`, and prints what is to be known of them.
pub fn stored(directory: &Path) -> anyhow::Result<StoredModel> {
    let stored = StoredModel::open(directory)?;
    if let Some(warning) = &stored.warning {
        exit::stderr_line(format_args!("warning: {warning}"));
    }
    Ok(stored)
}

/// The context length of the model in `directory`, in tokens.
pub fn context_length(directory: &Path) -> anyhow::Result<usize> {
    Ok(ConfigFile::read(directory)?.config.max_position_embeddings)
}

/// The tokenizer in a model's directory, if it exists.
pub fn tokenizer(directory: &Path) -> anyhow::Result<Option<TextTokenizer>> {
    if !directory.join("tokenizer.json").is_file() {
        return Ok(None);
    }
    Ok(Some(TextTokenizer::load(directory)?))
}

/// The tokenizer in a model's directory; an error if it does not exist.
pub fn required_tokenizer(directory: &Path) -> anyhow::Result<TextTokenizer> {
    let found = tokenizer(directory)?;
    found.with_context(|| {
        format!("{}: contains no tokenizer.json, which text requires", directory.display())
    })
}
