//! Finds models and tokenizers by name, also on the hub, and loads them.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::exit;
use crate::progress::Bar;
use anyhow::{Context as _, bail};
use moh_checkpoint::run_directory::{RunCheckpoint, not_a_model};
use moh_hf::hub::{FileSet, Hub};
use moh_hf::{ConfigFile, StoredModel, WeightFiles};
use moh_kernels::{Backend, ElementType};
use moh_model::tensors::{EMBEDDING, OUTPUT_HEAD};
use moh_model::{Model, ModelConfig};
use moh_text::TextTokenizer;

/// The place of a model.
#[derive(Debug, Clone)]
pub enum Place {
    /// In a directory in Hugging Face layout.
    Directory(PathBuf),
    /// In a run: the model that an export of the checkpoint would have.
    Checkpoint(RunCheckpoint),
}

impl Place {
    /// Finds the model `name`: a run, a directory, or a repository of the hub, which is downloaded if necessary. `RUN`
    /// names a run's newest good checkpoint, `RUN@STEP` another.
    pub fn find(name: &str, revision: Option<&str>) -> anyhow::Result<Self> {
        match RunCheckpoint::from_name(name)? {
            Some(_) if revision.is_some() => {
                bail!("{name}: is a run: only hub ids have a --revision")
            }
            Some(checkpoint) => Ok(Place::Checkpoint(checkpoint)),
            None => Ok(Place::Directory(locate(name, revision)?)),
        }
    }
}

/// A model by name. Its weights are not read yet.
#[derive(Debug)]
pub struct NamedModel {
    /// The user's name for the model.
    pub name: String,
    /// Its configuration.
    pub config: ModelConfig,
    place: Place,
    /// Read at the first use.
    tokenizer: OnceLock<Option<TextTokenizer>>,
}

/// Writes a tensor by its name, in f32.
pub type Tensors = Box<dyn FnMut(&str, &mut [f32]) -> anyhow::Result<()> + Send>;

impl NamedModel {
    /// Finds the model `name`, as [`Place::find`] does, and reads its configuration.
    pub fn open(name: &str, revision: Option<&str>) -> anyhow::Result<Self> {
        Self::at(name, Place::find(name, revision)?)
    }

    /// Opens the model at a place; `name` is the user's name for it.
    pub fn at(name: &str, place: Place) -> anyhow::Result<Self> {
        let config = match &place {
            Place::Directory(directory) => ConfigFile::read(directory)?.config,
            Place::Checkpoint(checkpoint) => checkpoint.config_file()?.config,
        };
        Ok(NamedModel { name: name.to_owned(), config, place, tokenizer: OnceLock::new() })
    }

    /// Returns the checkpoint, if the model is a run's.
    pub fn checkpoint(&self) -> Option<&RunCheckpoint> {
        match &self.place {
            Place::Checkpoint(checkpoint) => Some(checkpoint),
            Place::Directory(_) => None,
        }
    }

    /// Returns the directory with the other files of the model.
    pub fn files(&self) -> PathBuf {
        match &self.place {
            Place::Directory(directory) => directory.clone(),
            Place::Checkpoint(checkpoint) => checkpoint.run.model(),
        }
    }

    /// Returns the tokenizer; `None` if the model has no tokenizer.
    pub fn tokenizer(&self) -> anyhow::Result<Option<&TextTokenizer>> {
        if let Some(known) = self.tokenizer.get() {
            return Ok(known.as_ref());
        }
        let directory = match &self.place {
            Place::Directory(directory) => {
                Some(directory.clone()).filter(|it| it.join("tokenizer.json").is_file())
            }
            Place::Checkpoint(checkpoint) => checkpoint.run.tokenizer(),
        };
        let rows = self.config.vocab_size;
        let found = directory.map(|directory| model_tokenizer(&directory, rows)).transpose()?;
        Ok(self.tokenizer.get_or_init(|| found).as_ref())
    }

    /// Returns the tokenizer. Fails if the model has no tokenizer.
    pub fn required_tokenizer(&self) -> anyhow::Result<TextTokenizer> {
        let directory = match &self.place {
            // If the tokenizer is missing, the error names the files of tokenizers that exist.
            Place::Directory(directory) => directory.clone(),
            Place::Checkpoint(checkpoint) => checkpoint.run.tokenizer().with_context(|| {
                format!("{}: the run has no tokenizer, which text requires", self.name)
            })?,
        };
        model_tokenizer(&directory, self.config.vocab_size)
    }

    /// Returns the element type of the model's computation: `asked`, or else the embedding's type. If no computation
    /// has the embedding's type, returns f32.
    pub fn element_type(&self, asked: Option<ElementType>) -> anyhow::Result<ElementType> {
        let stored = match (asked, &self.place) {
            (Some(asked), _) => return Ok(asked),
            (None, Place::Checkpoint(checkpoint)) => checkpoint.export_type()?,
            (None, Place::Directory(directory)) => {
                let weights = WeightFiles::open(directory)?;
                // A tied model may store only the output head.
                weights
                    .get(EMBEDDING)
                    .or_else(|error| weights.get(OUTPUT_HEAD).map_err(|_| error))?
                    .dtype
            }
        };
        let of_stored = ElementType::ALL.into_iter().find(|known| known.dtype() == stored);
        Ok(of_stored.unwrap_or(ElementType::F32))
    }

    /// Loads the model to a device, with weights and activations of type `element`, for sequences of up to `positions`
    /// tokens.
    pub fn load<B: Backend>(
        &self,
        backend: B,
        element: ElementType,
        positions: usize,
    ) -> anyhow::Result<Model<B>> {
        match &self.place {
            Place::Directory(directory) => load(backend, element, directory, positions),
            Place::Checkpoint(_) => {
                let (mut read, config) = (self.tensors()?, self.config.clone());
                Model::new(backend, element, config, positions, |segment, values: &mut [f32]| {
                    read(&segment.name, values)
                })
            }
        }
    }

    /// Returns a function that reads a tensor by its name.
    pub fn tensors(&self) -> anyhow::Result<Tensors> {
        Ok(match &self.place {
            Place::Directory(directory) => {
                let stored = stored(directory)?;
                Box::new(move |name, values| Ok(stored.weights.read_f32(name, values)?))
            }
            Place::Checkpoint(checkpoint) => {
                let mut read = checkpoint.exported()?;
                Box::new(move |name, values| Ok(read(name, values)?))
            }
        })
    }
}

/// Returns the directory of a model. `model` is the directory, or a repository of the hub, downloaded if necessary.
pub fn locate(model: &str, revision: Option<&str>) -> anyhow::Result<PathBuf> {
    let hub = Hub::from_environment();
    let directory = hub.resolve(FileSet::Model, model, revision, &mut download_bar())?;
    match not_a_model(&directory) {
        None => Ok(directory),
        Some(kind) => bail!("{}: {kind}", directory.display()),
    }
}

/// Loads a tokenizer from a `tokenizer.json`, a directory with that file, or a repository of the hub, downloaded if
/// necessary.
pub fn named_tokenizer(name: &str, revision: Option<&str>) -> anyhow::Result<TextTokenizer> {
    load_tokenizer(&tokenizer_file(name, revision)?)
}

/// Loads the tokenizer in a directory, or a `tokenizer.json`, and prints warnings about its files.
pub fn load_tokenizer(path: &Path) -> anyhow::Result<TextTokenizer> {
    let tokenizer = TextTokenizer::load(path)?;
    for remark in tokenizer.remarks() {
        exit::stderr_line(format_args!("warning: {remark}"));
    }
    Ok(tokenizer)
}

/// Returns the `tokenizer.json` of [`named_tokenizer`].
pub fn tokenizer_file(name: &str, revision: Option<&str>) -> anyhow::Result<PathBuf> {
    let path = Path::new(name);
    if path.is_file() {
        return Ok(path.to_path_buf());
    }
    let hub = Hub::from_environment();
    let directory = hub.resolve(FileSet::Tokenizer, name, revision, &mut download_bar())?;
    Ok(directory.join("tokenizer.json"))
}

/// Returns a function that shows a download in a bar, from its first progress on.
fn download_bar() -> impl FnMut(u64, u64) {
    let mut bar = None;
    move |bytes, total| {
        bar.get_or_insert_with(|| Bar::bytes("downloading", total)).update(bytes, total);
    }
}

/// Loads the model in `directory` to a device, with weights and activations of type `element`, for sequences of up to
/// `positions` tokens.
pub fn load<B: Backend>(
    backend: B,
    element: ElementType,
    directory: &Path,
    positions: usize,
) -> anyhow::Result<Model<B>> {
    Ok(stored(directory)?.load(backend, element, positions)?)
}

/// Opens the files of the model in `directory`, and prints a warning about them.
pub fn stored(directory: &Path) -> anyhow::Result<StoredModel> {
    let stored = StoredModel::open(directory)?;
    if let Some(warning) = &stored.warning {
        exit::stderr_line(format_args!("warning: {warning}"));
    }
    Ok(stored)
}

/// Returns the tokenizer in a model's directory, if it has a `tokenizer.json`.
pub fn tokenizer(directory: &Path) -> anyhow::Result<Option<TextTokenizer>> {
    match moh_files::is_file(&directory.join("tokenizer.json"))? {
        true => load_tokenizer(directory).map(Some),
        false => Ok(None),
    }
}

/// Returns the tokenizer in the directory of a model with `rows` rows. Fails if it does not exist. Prints warnings
/// about its files, and about tokens for which the model has no rows.
fn model_tokenizer(directory: &Path, rows: usize) -> anyhow::Result<TextTokenizer> {
    let tokenizer = load_tokenizer(directory)?;
    let ids = rows as u64..tokenizer.vocab_size() as u64;
    let mut tokens = ids.filter_map(|id| Some((id, tokenizer.token(u32::try_from(id).ok()?)?)));
    if let Some((id, token)) = tokens.next() {
        exit::stderr_line(format_args!(
            "warning: {}: the token {token:?} has the id {id}{}, and the model has {rows} rows: a text with such a token \
             is refused: leave it out, or give the tokens rows with moh-convert --tokenizer {}",
            tokenizer.path().display(),
            match tokens.count() {
                0 => String::new(),
                more => format!(", {more} more have later ones"),
            },
            directory.display()
        ));
    }
    Ok(tokenizer)
}
