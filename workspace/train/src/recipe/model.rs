//! `[model]`: the weights a run starts from, or the shape of a fresh model.

use std::path::{Path, PathBuf};

use moh_hf::ConfigFile;
use moh_model::ModelConfig;
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::{DEFAULT_VOCABULARY_MULTIPLE, Recipe, file_fault};
use crate::Error;

/// `[model]`: either `from` or `new`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// A model directory or a repository of the hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Revision of the hub's repository; its main branch when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// A `config.json` that gives the shape where the weights are not at hand; training checks it
    /// against theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<PathBuf>,
    /// Directory of a tokenizer whose larger vocabulary the model takes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// The vocabulary is rounded up to a multiple of it. When left out: 128 with `tokenizer`, and
    /// no rounding without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_vocab_to: Option<usize>,
    /// The vocabulary that expansion and padding must give: a plan uses it where the tokenizer is
    /// not at hand, and training checks it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// The shape of a fresh model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new: Option<NewModel>,
}

/// `[model.new]`: the shape of a fresh model, by Hugging Face's names of `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewModel {
    /// `"llama"` or `"qwen3"`; a Llama when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_type: Option<String>,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; as many as query heads when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Width of one head; when left out `hidden_size / num_attention_heads`, and 128 in a Qwen3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Longest sequence; the recipe's `sequence_length` when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_position_embeddings: Option<usize>,
    /// Added to the mean square in RMSNorm; 1e-5 when left out.
    #[serde(default = "default_norm_eps")]
    pub rms_norm_eps: f64,
    /// Base of RoPE's wavelengths; 10000 when left out.
    #[serde(default = "default_theta")]
    pub rope_theta: f64,
    /// Llama 3's scaling of RoPE; none when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the output head is the embedding; not so when left out.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Standard deviation of fresh matrices; 0.02 when left out.
    #[serde(default = "default_initializer_range")]
    pub initializer_range: f64,
    /// First token of a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u32>,
    /// Token or tokens that end a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token_id: Option<TokenIds>,
}

/// `rope_scaling` of `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// `"llama3"`.
    pub rope_type: String,
    /// Division of the low frequencies.
    pub factor: f64,
    /// Wavelengths above the original length over this are divided by `factor`.
    pub low_freq_factor: f64,
    /// Wavelengths below the original length over this stay as they are.
    pub high_freq_factor: f64,
    /// Context length before scaling, in tokens.
    pub original_max_position_embeddings: usize,
}

/// One token or several, as `eos_token_id` may be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum TokenIds {
    /// One.
    One(u32),
    /// Several.
    Many(Vec<u32>),
}

impl<'de> Deserialize<'de> for TokenIds {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Ids;

        impl<'de> Visitor<'de> for Ids {
            type Value = TokenIds;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a token or a list of tokens")
            }

            fn visit_i64<E: de::Error>(self, id: i64) -> Result<TokenIds, E> {
                u32::try_from(id)
                    .map(TokenIds::One)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(id), &self))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<TokenIds, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = list.next_element()? {
                    ids.push(id);
                }
                Ok(TokenIds::Many(ids))
            }
        }

        from.deserialize_any(Ids)
    }
}

fn default_norm_eps() -> f64 {
    1e-5
}

fn default_theta() -> f64 {
    10_000.0
}

fn default_initializer_range() -> f64 {
    0.02
}

impl Model {
    /// Fills in the defaults that depend on other keys.
    pub(super) fn fill_in(&mut self, sequence_length: usize) {
        if self.tokenizer.is_some() {
            self.pad_vocab_to.get_or_insert(DEFAULT_VOCABULARY_MULTIPLE);
        }
        if let Some(new) = &mut self.new {
            new.num_key_value_heads.get_or_insert(new.num_attention_heads);
            new.max_position_embeddings.get_or_insert(sequence_length);
            let is_llama = new.model_type.as_deref().is_none_or(|name| name == "llama");
            let width = new.hidden_size.checked_div(new.num_attention_heads);
            new.head_dim = new.head_dim.or(width.filter(|_| is_llama));
        }
    }

    /// `vocabulary` rounded up as the recipe asks.
    pub fn padded_vocabulary(&self, vocabulary: usize) -> usize {
        let multiple = self.pad_vocab_to.unwrap_or(1).max(1);
        vocabulary.checked_next_multiple_of(multiple).unwrap_or(vocabulary)
    }
}

impl NewModel {
    /// The configuration of the fresh model, as its `config.json` would give it; `path` is what
    /// messages call it.
    ///
    /// # Errors
    /// When the numbers do not make a model.
    pub fn config(&self, path: &Path) -> Result<ModelConfig, Error> {
        let mut value = serde_json::to_value(self)
            .map_err(|error| file_fault(path, format!("model.new: {error}")))?;
        if let Some(fields) = value.as_object_mut() {
            fields.entry("model_type").or_insert_with(|| "llama".into());
        }
        Ok(ConfigFile::from_value(value, path)?.config)
    }
}

impl Recipe {
    /// The shape of the model that the recipe starts from, before its vocabulary grows, where it
    /// is on this machine: from `[model.new]`, from `config`, or from the directory `from`.
    /// `None` for a repository of the hub. `path` is what messages call the recipe.
    ///
    /// # Errors
    /// When the configuration cannot be read or is not a model's.
    pub fn local_model_config(&self, path: &Path) -> Result<Option<ModelConfig>, Error> {
        let Model { new, config, from, .. } = &self.model;
        if let Some(new) = new {
            return new.config(path).map(Some);
        }
        let directory = from.as_deref().map(Path::new).filter(|from| from.is_dir());
        match config.as_deref().or(directory) {
            Some(file) => Ok(Some(ConfigFile::read(file)?.config)),
            None => Ok(None),
        }
    }
}
