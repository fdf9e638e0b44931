//! `[model]`: the initial weights, or the shape of a new model.

use std::path::{Path, PathBuf};

use moh_hf::ConfigFile;
use moh_model::{HeadCounts, ModelConfig, RouterKind};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::Recipe;
use crate::Error;
use crate::stage::{head_request, router_name};

/// Rows of a new model with a tokenizer are a multiple of this by default.
const DEFAULT_MULTIPLE: usize = 128;

/// `[model]`: either `from` or `new`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelOptions {
    /// A model directory, a repository of the hub, or a run: its directory, and `@STEP` for another
    /// checkpoint than the newest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Whether the optimiser's moments of the run in `from` are loaded too; default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moments: bool,
    /// Revision of the hub's repository; default: its main branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// A `config.json` with the shape, for plans without the weights. Training checks it against the shape of the
    /// weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<PathBuf>,
    /// Directory of a new model's tokenizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// The vocabulary is padded to a multiple of this; default: 128 with `tokenizer`, and no
    /// padding without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_vocab_to: Option<usize>,
    /// The size of the vocabulary after padding. `config` may have a smaller size. A plan uses this size, and training
    /// checks it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// The shape of a new model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new: Option<NewModel>,
}

/// `[model.new]`: the shape of a new model, with the names of Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewModel {
    /// `"llama"` or `"qwen3"`; default: a Llama.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_type: Option<String>,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; default: as many as query heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Width of one head; default: `hidden_size / num_attention_heads`, and 128 in a Qwen3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Maximum sequence length; default: the longest `sequence_length` of the recipe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_position_embeddings: Option<usize>,
    /// Added to the mean square in RMSNorm; default: 1e-5.
    #[serde(default = "default_norm_eps")]
    pub rms_norm_eps: f64,
    /// Base of RoPE's wavelengths; default: 10000.
    #[serde(default = "default_theta")]
    pub rope_theta: f64,
    /// Llama 3's scaling of RoPE; default: no scaling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the output head shares the embedding's weights; default: false.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Standard deviation of initial matrices; default: 0.02.
    #[serde(default = "default_initializer_range")]
    pub initializer_range: f64,
    /// The initial routing; by default the model is dense.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moh: Option<NewMohOptions>,
    /// The token that begins a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u32>,
    /// The token or tokens that end a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token_id: Option<TokenIds>,
}

/// `moh = { .. }` of `[model.new]`: a new Mixture-of-Head model, with a learned router's matrices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NewMohOptions {
    /// The router, by its name in `config.json`; default: `"query-norm"`.
    #[serde(with = "router_name", skip_serializing_if = "Option::is_none")]
    pub router: Option<RouterKind>,
    /// Shared heads: one count for all layers, or a list with one for each layer; default: half of the heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_heads: Option<HeadCounts>,
    /// The shared heads themselves, a list for each layer, in place of their number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_head_ids: Option<Vec<Vec<usize>>>,
    /// Active routed heads per token, as [`Self::shared_heads`]; default: as many as make 75% of a layer's heads
    /// active.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routed_top_k: Option<HeadCounts>,
}

/// `rope_scaling` of `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// `"llama3"`.
    pub rope_type: String,
    /// Divisor of the low frequencies.
    pub factor: f64,
    /// Wavelengths above the original length divided by this are divided by `factor`.
    pub low_freq_factor: f64,
    /// Wavelengths below the original length divided by this are unchanged.
    pub high_freq_factor: f64,
    /// Context length before scaling, in tokens.
    pub original_max_position_embeddings: usize,
}

/// One token or several, as in `eos_token_id`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum TokenIds {
    /// One token.
    One(u32),
    /// Several tokens.
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

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<TokenIds, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(TokenIds::Many)
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

impl ModelOptions {
    /// Fills in the defaults that depend on other keys.
    pub(super) fn fill_in(&mut self, sequence_length: usize) {
        if self.tokenizer.is_some() {
            self.pad_vocab_to.get_or_insert(DEFAULT_MULTIPLE);
        }
        if let Some(new) = &mut self.new {
            new.num_key_value_heads.get_or_insert(new.num_attention_heads);
            new.max_position_embeddings.get_or_insert(sequence_length);
            let is_llama = new.model_type.as_deref().is_none_or(|name| name == "llama");
            let width = new.hidden_size.checked_div(new.num_attention_heads);
            new.head_dim = new.head_dim.or(width.filter(|_| is_llama));
        }
    }

    /// Returns `vocabulary` padded as the recipe specifies.
    pub fn padded_vocabulary(&self, vocabulary: usize) -> usize {
        let multiple = self.pad_vocab_to.unwrap_or(1).max(1);
        vocabulary.checked_next_multiple_of(multiple).unwrap_or(vocabulary)
    }
}

impl NewModel {
    /// Returns the configuration of the new model, as its `config.json` would have it. Messages name it `path`.
    ///
    /// # Errors
    /// Fails if the sizes are not a valid model's.
    pub fn config(&self, path: &Path) -> Result<ModelConfig, Error> {
        let mut value = serde_json::to_value(self)
            .map_err(|error| Error::at_key(path, "", format!("model.new: {error}")))?;
        if let Some(fields) = value.as_object_mut() {
            fields.remove("moh");
            fields.entry("model_type").or_insert_with(|| "llama".into());
        }
        let mut config = ConfigFile::from_value(value, path)?.config;
        if let Some(moh) = self.moh.clone() {
            let NewMohOptions { router, shared_heads, shared_head_ids, routed_top_k } = moh;
            let resolved = head_request(router, shared_heads, shared_head_ids, routed_top_k)
                .and_then(|request| request.for_model(&config));
            config.moh =
                Some(resolved.map_err(|error| Error::at_key(path, "", format!("moh: {error}")))?);
        }
        Ok(config)
    }
}

impl Recipe {
    /// Returns the shape of the initial model, before its vocabulary is padded, from `[model.new]`, `config` or the
    /// model directory `from`; `None` for a repository of the hub. Messages name the recipe `path`. A run in `from` is
    /// not opened.
    pub fn model_config(&self, path: &Path) -> Result<Option<ModelConfig>, Error> {
        let ModelOptions { new, config, from, .. } = &self.model;
        if let Some(new) = new {
            return new.config(path).map(Some);
        }
        if let Some(file) = config {
            return read_shape(path, file).map(Some);
        }
        match from.as_deref().map(Path::new).filter(|from| from.is_dir()) {
            Some(directory) => Ok(Some(ConfigFile::read(directory)?.config)),
            None => Ok(None),
        }
    }
}

/// Reads the file of `model.config`. Messages name the recipe `path` and the key.
pub fn read_shape(path: &Path, file: &Path) -> Result<ModelConfig, Error> {
    let fault = |error: moh_hf::Error| {
        let here = std::env::current_dir().ok().filter(|_| file.is_relative() && !file.exists());
        let from = here.map_or(String::new(), |here| {
            format!(": a relative path is one from the current directory, {}", here.display())
        });
        Error::at_key(path, "model.config", format!("{error}{from}"))
    };
    Ok(ConfigFile::read(file).map_err(fault)?.config)
}
