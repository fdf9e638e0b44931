//! The model that a run starts from: its configuration and the source of its weights.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use moh_checkpoint::run_directory::{CheckpointName, TOKENIZER};
use moh_checkpoint::{RunDirectory, RunState, StoredCheckpoint, TensorRequest};
use moh_data::TokenizerFile;
use moh_hf::config_file::OUTPUT_REFITTED;
use moh_hf::model_directory::companion_files;
use moh_hf::{ConfigFile, ModelCard, StoredModel, WeightFiles};
use moh_kernels::DType;
use moh_model::tensors::{has_vocabulary_rows, tensors};
use moh_model::{ModelConfig, Segment, initial};
use moh_recipe::{ModelOptions, Recipe, read_shape, shell};
use moh_step::TensorKind;
use serde_json::{Map, Value};

use crate::{Error, Result, model_card};

/// The initial model of a run.
pub struct ModelSource {
    /// The fields of `config.json`, before the vocabulary is padded.
    config_file: ConfigFile,
    /// The configuration with which training starts.
    pub(crate) config: ModelConfig,
    /// The number of first rows of the vocabulary that are the stored model's tokens; all rows of a new model.
    pub(crate) kept_rows: usize,
    weights: Weights,
    tensors: HashSet<String>,
    pub(crate) tokenizer_directory: Option<PathBuf>,
    /// The directory of the tokenizer among the model's files, if there is one.
    pub(crate) first_tokenizer: Option<PathBuf>,
    /// The model's directory, from which an export copies files.
    pub(crate) directory: Option<PathBuf>,
    /// The card of a model that is made from this model.
    pub(crate) card: ModelCard,
    warning: Option<String>,
}

/// Weights on a disk.
pub(crate) enum StoredWeights {
    Files(WeightFiles),
    /// Weights of a run, with its moments.
    Checkpoint(Box<StoredCheckpoint>),
    /// Weights of a run's export, which has this type. There are no moments.
    Exported(Box<StoredCheckpoint>, DType),
}

impl StoredWeights {
    /// Returns the identity of the weights.
    pub(crate) fn identity(&self) -> String {
        match self {
            StoredWeights::Files(files) => files.sample().to_hex().to_string(),
            StoredWeights::Checkpoint(stored) | StoredWeights::Exported(stored, _) => {
                parts_identity(stored)
            }
        }
    }

    pub(crate) fn read(&self, kind: TensorKind, name: &str, out: &mut [f32]) -> Result<()> {
        match self {
            StoredWeights::Files(files) => Ok(files.read_f32(name, out)?),
            StoredWeights::Checkpoint(stored) => Ok(stored.read_f32(kind, name, out)?),
            StoredWeights::Exported(stored, dtype) => Ok(stored.read_exported(*dtype, name, out)?),
        }
    }
}

enum Weights {
    Fresh {
        seed: u64,
    },
    /// Stored weights, with another run's moments on request.
    Stored {
        weights: StoredWeights,
        moments: bool,
    },
    /// A run that resumes reads its weights from its checkpoint.
    NotKept {
        recipe: PathBuf,
    },
}

/// The source of the model's weights, unless they are new.
enum WeightsFrom {
    Files,
    Checkpoint(CheckpointName),
    /// The checkpoint of the run itself.
    Kept,
}

impl ModelSource {
    /// Opens the model of `recipe`. If `model.from` is a run, it must have a step. Otherwise `directory` is its
    /// directory on this machine.
    ///
    /// # Errors
    /// Fails if files are missing or invalid, or differ from the recipe's description of the model.
    pub fn open(recipe: &Recipe, path: &Path, directory: Option<&Path>) -> Result<Self> {
        let model = &recipe.model;
        let tokenizer = model.tokenizer.as_deref();
        let name = model.from.as_deref().and_then(CheckpointName::parse);
        check_run_keys(recipe, path, name.is_some())?;
        refuse_growth(model, path)?;
        let Some(name) = name else {
            return Self::from_parts(recipe, path, directory, tokenizer, WeightsFrom::Files);
        };
        let kept = name.run.model();
        Self::from_parts(recipe, path, Some(&kept), tokenizer, WeightsFrom::Checkpoint(name))
    }

    /// Opens the model of `recipe` from the files that a run keeps in the directory `kept`, without weights.
    pub(crate) fn open_kept(recipe: &Recipe, path: &Path, kept: &Path) -> Result<Self> {
        let directory = recipe.model.from.is_some().then_some(kept);
        let tokenizer = recipe.model.tokenizer.as_ref().map(|_| kept.join(TOKENIZER));
        Self::from_parts(recipe, path, directory, tokenizer.as_deref(), WeightsFrom::Kept)
    }

    /// Opens the model in `directory` and the recipe's `tokenizer`.
    fn from_parts(
        recipe: &Recipe,
        path: &Path,
        directory: Option<&Path>,
        tokenizer: Option<&Path>,
        weights_from: WeightsFrom,
    ) -> Result<Self> {
        let mut warning = None;
        let mut first_tokenizer = directory.and_then(with_tokenizer);
        let card = match (&weights_from, directory) {
            (_, None) => ModelCard::default(),
            (WeightsFrom::Files, Some(directory)) => ModelCard::of_source(directory, directory)?,
            (_, Some(kept)) => model_card::of_kept(recipe, kept)?,
        };
        let (config_file, weights) = match (&recipe.model.new, weights_from, directory) {
            (Some(new), ..) => {
                let mut config = new.config(path)?;
                if let Some(tokenizer) = tokenizer {
                    adopt_special_tokens(&mut config, tokenizer)?;
                }
                (ConfigFile::new(&config), Weights::Fresh { seed: recipe.run.seed })
            }
            (None, WeightsFrom::Checkpoint(name), _) => {
                first_tokenizer = name.run.tokenizer();
                open_checkpoint(&name, recipe, path)?
            }
            (None, WeightsFrom::Kept, Some(directory)) => {
                (ConfigFile::read(directory)?, Weights::NotKept { recipe: path.to_owned() })
            }
            (None, WeightsFrom::Files, Some(directory)) => {
                let model = StoredModel::open(directory)?;
                warning = model.warning;
                let weights = StoredWeights::Files(model.weights);
                (model.file, Weights::Stored { weights, moments: false })
            }
            (None, _, None) => {
                let reason = "model.from: no such directory, and the model is not downloaded: correct the path or id";
                return Err(moh_files::unusable(path, reason).into());
            }
        };
        let mut config = config_file.config.clone();
        let tokenizer = tokenizer.map(Path::to_owned).or_else(|| first_tokenizer.clone());
        let (rows, mut kept_rows) = (config.vocab_size, config.vocab_size);
        config.vocab_size = recipe.model.padded_vocabulary(rows);
        match (&weights, &first_tokenizer, &tokenizer) {
            (Weights::Fresh { .. }, ..) => kept_rows = config.vocab_size,
            // A run of an earlier version, which could adopt a larger vocabulary.
            (Weights::NotKept { .. }, Some(old), Some(new)) if old != new => {
                let (old, new) = (TokenizerFile::load(old)?, TokenizerFile::load(new)?);
                kept_rows = new.kept_rows(&old, rows);
                config.vocab_size = recipe.model.padded_vocabulary(rows.max(new.vocab_size()));
            }
            _ => {}
        }
        let source = ModelSource {
            config,
            kept_rows,
            tensors: tensors(&config_file.config).into_iter().map(|tensor| tensor.name).collect(),
            config_file,
            weights,
            tokenizer_directory: tokenizer,
            first_tokenizer,
            directory: directory.map(Path::to_owned),
            card,
            warning,
        };
        source.check(recipe, path)?;
        Ok(source)
    }

    /// Compares the model with the recipe's description.
    fn check(&self, recipe: &Recipe, path: &Path) -> Result<()> {
        if let Some(expected) = recipe.model.vocab_size
            && expected != self.config.vocab_size
        {
            let found = self.config.vocab_size;
            let reason = format!("{expected}, but the model has {found}");
            return Err(differs(path, "model.vocab_size", reason));
        }
        let is_stored = matches!(self.weights, Weights::Stored { .. });
        if let Some(shape) = recipe.model.config.as_ref().filter(|_| is_stored) {
            let described = read_shape(path, shape)?;
            let ours = &self.config_file.config;
            let shape_of = |c: &ModelConfig| {
                let heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
                // If the recipe sets a size, the described model's size may differ.
                let rows = recipe.model.vocab_size.is_none().then_some(c.vocab_size);
                let widths = (c.hidden_size, c.intermediate_size, rows);
                (heads, widths, c.num_hidden_layers, c.tie_word_embeddings)
            };
            if shape_of(&described) != shape_of(ours) {
                let reason = format!("{} has a different shape from the model", shape.display());
                return Err(differs(path, "model.config", reason));
            }
        }
        Ok(())
    }

    /// Returns the configuration before the vocabulary is padded. The recipe is checked against it.
    pub(crate) fn original_config(&self) -> &ModelConfig {
        &self.config_file.config
    }

    /// Returns a warning about the model's files, in one sentence.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Returns the fields of `config.json`.
    pub fn config_file(&self) -> &ConfigFile {
        &self.config_file
    }

    /// Returns the fields of `config.json` for the model of a run of `recipe` in this state.
    pub(crate) fn fields(
        &self,
        recipe: &Recipe,
        state: &RunState,
        config: &ModelConfig,
        dtype: Option<DType>,
    ) -> Map<String, Value> {
        let mut fields = self.config_file.to_json(config, dtype);
        let begun = state.stage + usize::from(state.stage_step > 0);
        if config.moh.is_some() && recipe.has_refitted(begun) {
            fields.insert(OUTPUT_REFITTED.to_owned(), true.into());
        }
        fields
    }

    /// Reads the tokenizer's file, if the model has one.
    pub(crate) fn tokenizer(&self) -> Result<Option<TokenizerFile>> {
        Ok(self.tokenizer_directory.as_deref().map(TokenizerFile::load).transpose()?)
    }

    /// Returns the tokenizer and generation files that an export copies.
    pub(crate) fn companions(&self) -> Result<Vec<PathBuf>> {
        let tokenizer = self.tokenizer_directory.as_deref();
        // A run without a tokenizer keeps no files.
        let directory = self.directory.as_deref().filter(|directory| directory.is_dir());
        Ok(match (directory.or(tokenizer), tokenizer) {
            (Some(directory), tokenizer) => {
                companion_files(directory, tokenizer.unwrap_or(directory))?
            }
            (None, _) => Vec::new(),
        })
    }

    /// Returns the identity of the weights; `None` if they are new or not read.
    pub(crate) fn identity(&self) -> Option<String> {
        match &self.weights {
            Weights::Stored { weights, .. } => Some(weights.identity()),
            Weights::Fresh { .. } | Weights::NotKept { .. } => None,
        }
    }

    /// Returns whether the weights are another run's, which are f32 for any `run.dtype`.
    pub(crate) fn is_checkpoint(&self) -> bool {
        matches!(self.weights, Weights::Stored { weights: StoredWeights::Checkpoint(_), .. })
    }

    /// Returns the optimiser steps that the moments contain; 0 if the moments start at zero.
    pub(crate) fn moment_steps(&self) -> u64 {
        match &self.weights {
            Weights::Stored { weights: StoredWeights::Checkpoint(stored), moments: true } => {
                stored.manifest().state.moment_steps
            }
            _ => 0,
        }
    }

    /// Returns whether the source has this tensor, or its moments.
    fn has(&self, kind: TensorKind, tensor: &str) -> bool {
        let has_moments = matches!(self.weights, Weights::Stored { moments: true, .. });
        (kind == TensorKind::Weight || has_moments) && self.tensors.contains(tensor)
    }

    /// Fills one tensor with its initial elements.
    pub fn fill(&self, segment: &Segment, values: &mut [f32]) -> Result<()> {
        self.fill_state(TensorKind::Weight, segment, values)
    }

    /// Fills one tensor, or its moments, with the initial elements. Rows that pad a stored model's vocabulary are the
    /// mean of the other rows, with zero moments. A tensor that the model lacks, because a later stage adds it, is
    /// filled with zeros.
    pub(crate) fn fill_state(
        &self,
        kind: TensorKind,
        segment: &Segment,
        values: &mut [f32],
    ) -> Result<()> {
        if !self.has(kind, &segment.name) {
            values.fill(0.0);
            return Ok(());
        }
        let stored = match self.is_padded(&segment.name) {
            true => self.config_file.config.vocab_size * self.config.hidden_size,
            false => values.len(),
        };
        let (stored, padding) = values.split_at_mut(stored);
        self.read(kind, segment, stored)?;
        match kind {
            TensorKind::Weight => pad_with_mean(stored, padding, self.config.hidden_size),
            _ => padding.fill(0.0),
        }
        Ok(())
    }

    /// Returns whether a tensor has more rows than in the stored model.
    fn is_padded(&self, tensor: &str) -> bool {
        let is_stored = !matches!(self.weights, Weights::Fresh { .. });
        is_stored
            && has_vocabulary_rows(tensor)
            && self.config.vocab_size > self.config_file.config.vocab_size
    }

    /// Fills a range of this rank's slice of a tensor, or of its moments.
    pub(crate) fn fill_part(
        &self,
        kind: TensorKind,
        segment: &Segment,
        range: Range<usize>,
        values: &mut [f32],
    ) -> Result<()> {
        match &self.weights {
            Weights::Stored { weights: StoredWeights::Checkpoint(stored), .. }
                if !self.is_padded(&segment.name) =>
            {
                if !self.has(kind, &segment.name) {
                    values.fill(0.0);
                    return Ok(());
                }
                let wanted = TensorRequest { name: &segment.name, slice: &segment.slice, range };
                Ok(stored.read_part(kind, &wanted, values)?)
            }
            _ => {
                let mut whole = vec![0.0; segment.shape().iter().product()];
                self.fill_state(kind, segment, &mut whole)?;
                let start = range.start;
                for run in segment.slice.runs(range) {
                    let from = &whole[run.whole..][..run.len];
                    values[run.local - start..][..run.len].copy_from_slice(from);
                }
                Ok(())
            }
        }
    }

    /// Reads a tensor as it is stored, before the vocabulary is padded.
    fn read(&self, kind: TensorKind, segment: &Segment, out: &mut [f32]) -> Result<()> {
        match &self.weights {
            Weights::Stored { weights, .. } => weights.read(kind, &segment.name, out),
            Weights::Fresh { seed } => {
                let deviation = self.config.initializer_range;
                initial::initialize(*seed, deviation, &segment.name, segment.shape(), out);
                Ok(())
            }
            Weights::NotKept { recipe } => {
                let reason = "the run begins with its initial model, and a run that resumes does not read its \
                              weights: give the same command again, which reads them";
                Err(moh_files::unusable(recipe, reason).into())
            }
        }
    }
}

/// Opens the checkpoint of a run that a new run starts from.
fn open_checkpoint(
    name: &CheckpointName,
    recipe: &Recipe,
    path: &Path,
) -> Result<(ConfigFile, Weights)> {
    let refuse = |reason: &str| Err(differs(path, "model.from", format!("{name}: {reason}")));
    if is_own_run(&name.run, recipe) {
        return refuse("is the run directory of this recipe: choose another run.dir");
    }
    let Some(step) = name.step else { return refuse("names no step") };
    let (stored, file) = name.run.stored_model(step)?;
    let weights = StoredWeights::Checkpoint(Box::new(stored));
    Ok((file, Weights::Stored { weights, moments: recipe.model.moments }))
}

pub(crate) fn is_own_run(run: &RunDirectory, recipe: &Recipe) -> bool {
    let same = |path: &Path| path.canonicalize().ok();
    same(run.root()).is_some_and(|from| Some(from) == same(&recipe.run.dir))
}

/// Returns the identity of a checkpoint's tensors.
pub fn parts_identity(stored: &StoredCheckpoint) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in &stored.manifest().parts {
        // A part's hash covers the hashes of its shards.
        hasher.update(part.blake3.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Rejects `model.moments` without a run, and `model.revision` with a run.
fn check_run_keys(recipe: &Recipe, path: &Path, is_run: bool) -> Result<()> {
    let model = &recipe.model;
    if model.moments && !is_run {
        let reason = "only a run has moments: set model.from to RUN or RUN@STEP";
        return Err(differs(path, "model.moments", reason.to_owned()));
    }
    if model.revision.is_some() && is_run {
        let reason = "only hub ids have revisions, and model.from is a run";
        return Err(differs(path, "model.revision", reason.to_owned()));
    }
    Ok(())
}

/// Rejects `model.tokenizer` with `model.from`: only `moh-convert` adopts another vocabulary, because the library of
/// tokenizers spells its new rows.
fn refuse_growth(model: &ModelOptions, path: &Path) -> Result<()> {
    let (Some(from), Some(tokenizer)) = (&model.from, &model.tokenizer) else { return Ok(()) };
    let word = |text: &str| shell::shell_word(text);
    let mut command = format!("moh-convert --from {}", word(from));
    if let Some(revision) = &model.revision {
        command += &format!(" --revision {}", word(revision));
    }
    command += &format!(" --attention dense --tokenizer {}", word(&tokenizer.to_string_lossy()));
    if let Some(multiple) = model.pad_vocab_to {
        command += &format!(" --pad-vocab-to {multiple}");
    }
    let reason = format!(
        "is for a new model: for a model with the vocabulary of another tokenizer run {command} --out DIR, then set \
         model.from = \"DIR\" and leave model.tokenizer out"
    );
    Err(differs(path, "model.tokenizer", reason))
}

/// Fills the rows of `padding` with the mean of the rows of `stored`, of `width` elements. The mean is accumulated in
/// f64 in row order, so that it is the same on every machine.
fn pad_with_mean(stored: &[f32], padding: &mut [f32], width: usize) {
    if padding.is_empty() {
        return;
    }
    let mut sum = vec![0.0f64; width];
    for row in stored.chunks_exact(width) {
        sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
    }
    let count = (stored.len() / width) as f64;
    let mean: Vec<f32> = sum.into_iter().map(|sum| (sum / count) as f32).collect();
    padding.chunks_exact_mut(width).for_each(|row| row.copy_from_slice(&mean));
}

/// Returns the directory, if it has a tokenizer.
pub(crate) fn with_tokenizer(directory: &Path) -> Option<PathBuf> {
    directory.join("tokenizer.json").is_file().then(|| directory.to_owned())
}

pub(crate) fn differs(path: &Path, key: &str, reason: String) -> Error {
    moh_recipe::Error::at_key(path, key, reason).into()
}

/// Sets a new model's special tokens from its tokenizer where the recipe omits them, so that generation from an export
/// ends with the tokenizer's end token.
fn adopt_special_tokens(config: &mut ModelConfig, tokenizer: &Path) -> Result<()> {
    let tokenizer = TokenizerFile::load(tokenizer)?;
    let rows = config.vocab_size;
    let special = |name| tokenizer.special(name).filter(|&id| (id as usize) < rows);
    if config.eos_token_ids.is_empty() {
        config.eos_token_ids = special("eos_token").into_iter().collect();
    }
    config.bos_token_id = config.bos_token_id.or(special("bos_token"));
    Ok(())
}
