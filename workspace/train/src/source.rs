//! The model that a run starts from: its configuration and the source of its weights.

use std::path::{Path, PathBuf};

use moh_data::TextTokenizer;
use moh_hf::{ConfigFile, Expansion, SpecialTokens, StoredModel, WeightFiles};
use moh_model::layout::Segment;
use moh_model::tensors::has_vocabulary_rows;
use moh_model::{ModelConfig, initial};

use crate::run_inputs::model_files::TOKENIZER;
use crate::{Error, Recipe};

/// The initial model of a run.
pub struct ModelSource {
    /// The fields of `config.json`, before the vocabulary grows.
    config_file: ConfigFile,
    /// The configuration after the vocabulary has grown.
    config: ModelConfig,
    weights: Weights,
    expansion: Option<Expansion>,
    tokenizer: Option<PathBuf>,
    directory: Option<PathBuf>,
    warning: Option<String>,
}

enum Weights {
    Files(WeightFiles),
    Fresh {
        seed: u64,
    },
    /// Those of a run that resumes, which come from its checkpoint.
    NotKept {
        recipe: PathBuf,
    },
}

impl ModelSource {
    /// Opens the model of `recipe`; `directory` is its `from` on this machine.
    ///
    /// # Errors
    /// Fails if files are missing or invalid, or differ from the recipe's description of the model.
    pub fn open(recipe: &Recipe, path: &Path, directory: Option<&Path>) -> Result<Self, Error> {
        Self::of((recipe, path), (directory, recipe.model.tokenizer.as_deref()), true)
    }

    /// Opens what a run keeps of the model of `recipe` in the directory `kept`, without its weights.
    ///
    /// # Errors
    /// As [`ModelSource::open`].
    pub(crate) fn kept(recipe: &Recipe, path: &Path, kept: &Path) -> Result<Self, Error> {
        let directory = recipe.model.from.is_some().then_some(kept);
        let tokenizer = recipe.model.tokenizer.as_ref().map(|_| kept.join(TOKENIZER));
        Self::of((recipe, path), (directory, tokenizer.as_deref()), false)
    }

    /// Opens the model in `directory`, which `has_weights` or has been kept by a run, and the recipe's
    /// `tokenizer`.
    fn of(
        (recipe, path): (&Recipe, &Path),
        (directory, tokenizer): (Option<&Path>, Option<&Path>),
        has_weights: bool,
    ) -> Result<Self, Error> {
        let fresh = recipe.model.new.as_ref();
        let mut warning = None;
        let (config_file, weights) = match (fresh, directory) {
            (Some(new), _) => {
                let mut config = new.config(path)?;
                if let Some(tokenizer) = tokenizer {
                    adopt_special_tokens(&mut config, tokenizer)?;
                }
                (ConfigFile::new(&config), Weights::Fresh { seed: recipe.run.seed })
            }
            (None, Some(directory)) if !has_weights => {
                (ConfigFile::read(directory)?, Weights::NotKept { recipe: path.to_owned() })
            }
            (None, Some(directory)) => {
                let model = StoredModel::open(directory)?;
                warning = model.warning;
                (model.file, Weights::Files(model.weights))
            }
            (None, None) => return Err(Error::NoModel { path: path.to_owned() }),
        };
        let mut source = ModelSource {
            config: config_file.config.clone(),
            config_file,
            weights,
            expansion: None,
            tokenizer: None,
            directory: directory.map(Path::to_owned),
            warning,
        };
        source.tokenizer = tokenizer.map(Path::to_owned).or_else(|| {
            directory.filter(|dir| dir.join("tokenizer.json").is_file()).map(Path::to_owned)
        });
        source.grow_vocabulary(recipe, tokenizer)?;
        source.check(recipe, path)?;
        Ok(source)
    }

    fn grow_vocabulary(&mut self, recipe: &Recipe, tokenizer: Option<&Path>) -> Result<(), Error> {
        let rows = self.config.vocab_size;
        if matches!(self.weights, Weights::Fresh { .. }) {
            self.config.vocab_size = recipe.model.padded_vocabulary(rows);
            return Ok(());
        }
        let expansion = match (tokenizer, &self.directory, recipe.model.pad_vocab_to) {
            (Some(new), Some(old), pad) => Expansion::plan(old, new, rows, pad)?,
            (None, _, Some(multiple)) => Expansion::padding(rows, multiple)?,
            _ => return Ok(()),
        };
        self.config.vocab_size = expansion.num_rows();
        self.expansion = (!expansion.is_identity()).then_some(expansion);
        Ok(())
    }

    /// Compares the model with the recipe's description.
    fn check(&self, recipe: &Recipe, path: &Path) -> Result<(), Error> {
        let differs = |key: &str, reason: String| {
            Err(Error::ModelDiffers { path: path.to_owned(), key: key.to_owned(), reason })
        };
        if let Some(expected) = recipe.model.vocab_size
            && expected != self.config.vocab_size
        {
            let found = self.config.vocab_size;
            return differs("model.vocab_size", format!("{expected}, but the model has {found}"));
        }
        if let (Some(shape), Weights::Files(_)) = (&recipe.model.config, &self.weights) {
            let described = ConfigFile::read(shape)?.config;
            let ours = &self.config_file.config;
            let shape_of = |c: &ModelConfig| {
                let heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
                let widths = (c.hidden_size, c.intermediate_size, c.vocab_size);
                (heads, widths, c.num_hidden_layers, c.tie_word_embeddings)
            };
            if shape_of(&described) != shape_of(ours) {
                let reason = format!("{} has a different shape from the model", shape.display());
                return differs("model.config", reason);
            }
        }
        Ok(())
    }

    /// The configuration with which training starts.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The configuration before the vocabulary grows, which the recipe is checked against.
    pub fn original_config(&self) -> &ModelConfig {
        &self.config_file.config
    }

    /// What a user should know about the model's files, in a sentence.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// The fields of `config.json`.
    pub fn config_file(&self) -> &ConfigFile {
        &self.config_file
    }

    /// The model's directory, from which an export copies files.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// The directory of the tokenizer, if the model has one.
    pub fn tokenizer_directory(&self) -> Option<&Path> {
        self.tokenizer.as_deref()
    }

    /// Loads the tokenizer, if the model has one.
    ///
    /// # Errors
    /// Fails if the file is not a tokenizer.
    pub fn tokenizer(&self) -> Result<Option<TextTokenizer>, Error> {
        Ok(self.tokenizer.as_deref().map(TextTokenizer::load).transpose()?)
    }

    /// Fills one tensor with its initial elements.
    ///
    /// # Errors
    /// Fails if the tensor cannot be read or is not finite.
    pub fn fill(&self, segment: &Segment, values: &mut [f32]) -> Result<(), Error> {
        let files = match &self.weights {
            Weights::Fresh { seed } => {
                let deviation = self.config.initializer_range;
                initial::initialize(*seed, deviation, &segment.name, segment.shape(), values);
                return Ok(());
            }
            Weights::Files(files) => files,
            Weights::NotKept { recipe } => return Err(Error::NoModel { path: recipe.clone() }),
        };
        match &self.expansion {
            Some(expansion) if has_vocabulary_rows(&segment.name) => {
                let width = self.config.hidden_size;
                let mut old = vec![0f32; expansion.old_rows() * width];
                files.read_f32(&segment.name, &mut old)?;
                let row = |id: u32, out: &mut [f32]| {
                    out.copy_from_slice(&old[id as usize * width..][..width]);
                };
                let rows = expansion.rows(width, &row);
                let (kept, grown) = values.split_at_mut(expansion.num_kept() * width);
                kept.copy_from_slice(&old[..kept.len()]);
                for (row, out) in (expansion.num_kept()..).zip(grown.chunks_exact_mut(width)) {
                    rows.read(row, out);
                }
                Ok(())
            }
            _ => Ok(files.read_f32(&segment.name, values)?),
        }
    }
}

/// Gives a new model the special tokens of its tokenizer that its recipe leaves out, so that generation
/// from an export ends where the tokenizer says.
fn adopt_special_tokens(config: &mut ModelConfig, tokenizer: &Path) -> Result<(), Error> {
    let tokens = SpecialTokens::read(tokenizer)?;
    let has_row = |id: &u32| (*id as usize) < config.vocab_size;
    if config.eos_token_ids.is_empty() {
        config.eos_token_ids = tokens.eos.filter(has_row).into_iter().collect();
    }
    config.bos_token_id = config.bos_token_id.or(tokens.bos.filter(has_row));
    Ok(())
}
