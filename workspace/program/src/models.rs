//! Locating models and tokenizers, and loading them.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use moh_data::TextTokenizer;
use moh_device::{DeviceName, OpenDevice, available_memory};
use moh_hf::config_file::CONFIG_FILE;
use moh_hf::{ConfigFile, StoredModel};
use moh_hub::{DownloadProgress, resolve, resolve_tokenizer};
use moh_kernels::{Backend, Element, ElementType};
use moh_model::{BatchGenerator, BatchOptions, Model, RouterKind};
use moh_recipe::shell::shell_word;
use moh_run_directory::CheckpointName;

use crate::progress::Bar;

/// The element types of a model's computation, as values of an option.
pub fn element_types() -> impl TypedValueParser<Value = ElementType> {
    let value = |dtype: ElementType| {
        PossibleValue::new(dtype.name()).alias(dtype.dtype().torch_name()).help(match dtype {
            ElementType::F32 => "32-bit float, for any stored type",
            ElementType::BF16 => "bfloat16 weights and activations",
        })
    };
    PossibleValuesParser::new(ElementType::ALL.map(value))
        .try_map(|name| ElementType::from_name(&name).ok_or("not an element type"))
}

/// The routers, by their names in `config.json`, as values of an option.
pub fn routers() -> impl TypedValueParser<Value = RouterKind> {
    PossibleValuesParser::new(RouterKind::NAMES)
        .try_map(|name| RouterKind::from_name(&name).ok_or("not a router"))
}

/// Sizes of a generator of up to `tokens` tokens. The weights get packed copies unless these would take more than half of
/// the machine's available memory.
pub fn batch_options<B: Backend, T: Element>(model: &Model<B, T>, tokens: usize) -> BatchOptions {
    let packed = BatchGenerator::packed_bytes(model);
    let pack_weights = available_memory().is_none_or(|available| packed <= available / 2);
    BatchOptions { pack_weights, ..BatchOptions::for_tokens(tokens) }
}

/// The directory of a model: itself, or a repository of the hub, downloaded if necessary.
pub fn locate(model: &str, revision: Option<&str>) -> anyhow::Result<PathBuf> {
    if let Some(CheckpointName { step: Some(_), .. }) = CheckpointName::parse(model) {
        bail!("{model}: is a checkpoint of a run, {}", export_command(model));
    }
    let mut show = ShowDownload::default();
    let directory = resolve(model, revision, &mut |download| show.update(download))?;
    match other_directory(&directory) {
        None => Ok(directory),
        Some(kind) => bail!("{}: {kind}", directory.display()),
    }
}

/// Describes a run or a checkpoint, which is not a model; `None` for any other directory.
fn other_directory(directory: &Path) -> Option<String> {
    let has = |name: &str| directory.join(name).exists();
    let export = directory.join("export");
    if has(CONFIG_FILE) {
        None
    } else if export.join(CONFIG_FILE).is_file() {
        Some(format!("is a run, name its model: {}", export.display()))
    } else if has("checkpoints") && has("recipe.toml") {
        let command = export_command(&directory.to_string_lossy());
        Some(format!("is a run that has not finished, {command}"))
    } else if has("manifest.json") && has("manifest.json.b3") {
        Some(
            "is a checkpoint, not a model: name the export/ of its run, or export it: moh-convert \
             --from RUN@STEP --out DIR"
                .to_owned(),
        )
    } else {
        None
    }
}

/// How a checkpoint of a run becomes a model.
fn export_command(run: &str) -> String {
    format!("export its model: moh-convert --from {} --out DIR", shell_word(run))
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
    let directory = resolve_tokenizer(name, revision, &mut |download| show.update(download))?;
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

/// Opens the device of the option `--device`.
pub fn open(device: DeviceName) -> anyhow::Result<OpenDevice> {
    OpenDevice::open(device, false).with_context(|| format!("--device {device}"))
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
        crate::exit::stderr_line(format_args!("warning: {warning}"));
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
