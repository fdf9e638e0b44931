//! Reads and writes `config.json`.
//!
//! Every field is kept in its order, so that a converted model differs from its source only in the fields
//! that conversion changes. Fields with which transformers would compute other outputs than this program (biases,
//! sliding windows, other activations, quantised weights) are rejected, by one list of keys.

pub(crate) mod architecture;
pub(crate) mod fields;
mod keys;
mod parse;
mod rope;

use std::path::Path;

use moh_kernels::DType;
use moh_model::ModelConfig;
use serde_json::{Map, Value, json};

use crate::{Error, other_formats};
use architecture::{Kind, own_fields};
use fields::{Fields, kind};

/// Name of the file in a model directory.
pub const CONFIG_FILE: &str = "config.json";

const MOH_KEYS: [&str; 4] =
    ["moh_router", "moh_shared_heads", "moh_shared_head_ids", "moh_routed_top_k"];

/// The key that says whether the output projections were refitted to the heads that tokens compute.
pub const OUTPUT_REFITTED: &str = "moh_output_refitted";

/// A larger `config.json` is not a configuration.
pub(crate) const MAX_FILE_BYTES: u64 = 16 << 20;

/// A `config.json`: the typed configuration and all fields as they were read.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigFile {
    /// The fields that this program uses.
    pub config: ModelConfig,
    /// Every field, in the order of the file.
    pub fields: Map<String, Value>,
}

impl ConfigFile {
    /// Reads `config.json`. `path` is the file or the model directory that contains it.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let file = path.join(CONFIG_FILE);
        if path.is_dir() && !file.exists() && !file.is_symlink() {
            let other = other_formats::of_directory(path);
            let reason = other.unwrap_or(format!("has no {CONFIG_FILE}, so it is not a model"));
            return Err(Error::file(path, reason));
        }
        let path = if path.is_dir() { &file } else { path };
        Self::from_value(Value::Object(read_object(path)?), path)
    }

    /// Returns the configuration in a JSON object. Messages name it `path`.
    pub fn from_value(value: Value, path: &Path) -> Result<Self, Error> {
        let fields = object(value, path)?;
        let config = parse::read_config(&Fields { map: &fields, path, prefix: "" })?;
        Ok(ConfigFile { config, fields })
    }

    /// Creates the file of a new model, with the fields that transformers writes for its
    /// architecture.
    pub fn new(config: &ModelConfig) -> Self {
        let kind = Kind { is_moh: false, ..Kind::new(config) };
        let names = [
            ("architectures".to_string(), json!([kind.class()])),
            ("model_type".to_string(), json!(kind.model_type())),
        ];
        let mut others = new_fields(config);
        others.sort_unstable_by_key(|(key, _)| *key);
        let others = others.into_iter().map(|(key, value)| (key.to_string(), value));
        let fields = names.into_iter().chain(others).collect();
        let mut file = ConfigFile { config: config.clone(), fields };
        file.fields = file.to_json(config, None);
        file
    }

    /// Returns the fields, updated from `config` where conversion and training change them: the vocabulary, the
    /// architecture and the MoH fields, and with `dtype` also the element type of the weights.
    ///
    /// A dense `config` becomes a plain model of its architecture again. Otherwise `config` must be
    /// the model that the fields describe.
    pub fn to_json(&self, config: &ModelConfig, dtype: Option<DType>) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        let mut put = |key: &str, value: Value| fields.insert(key.to_string(), value);
        put("vocab_size", json!(config.vocab_size));
        let kind = Kind::new(config);
        put("architectures", json!([kind.class()]));
        put("model_type", json!(kind.model_type()));
        match &config.moh {
            Some(moh) => {
                put("moh_router", json!(moh.router.name()));
                let ids = moh.shared_heads.ids();
                let (key, other, shared) = match &ids {
                    None => (MOH_KEYS[1], MOH_KEYS[2], json!(moh.shared_heads.counts())),
                    Some(ids) => (MOH_KEYS[2], MOH_KEYS[1], json!(ids)),
                };
                put(key, shared);
                put("moh_routed_top_k", json!(moh.routed_top_k));
                fields.shift_remove(other);
            }
            None => {
                for key in MOH_KEYS.into_iter().chain([OUTPUT_REFITTED]) {
                    fields.shift_remove(key);
                }
            }
        }
        match kind.auto_map() {
            Some(auto_map) => {
                fields.insert("auto_map".to_string(), auto_map);
            }
            // Its code would not be copied, or would load another model.
            None => {
                fields.shift_remove("auto_map");
            }
        }
        rope::write(&mut fields, &config.rope);
        if let Some(dtype) = dtype {
            let known = ["dtype", "torch_dtype"].map(|key| (key, fields.contains_key(key)));
            let default =
                if fields.contains_key("rope_parameters") { "dtype" } else { "torch_dtype" };
            for (key, present) in known {
                if present || (key == default && !known.iter().any(|(_, present)| *present)) {
                    fields.insert(key.to_string(), json!(dtype.torch_name()));
                }
            }
        }
        fields
    }
}

pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>, Error> {
    let bytes = moh_files::read_bounded(path, MAX_FILE_BYTES, "a configuration")?;
    let value = serde_json::from_slice(&bytes)
        .map_err(|error| Error::file(path, moh_files::json_fault(&error, &bytes)))?;
    object(value, path)
}

fn object(value: Value, path: &Path) -> Result<Map<String, Value>, Error> {
    match value {
        Value::Object(fields) => Ok(fields),
        other => Err(Error::file(path, format!("expected a JSON object, found {}", kind(&other)))),
    }
}

/// Returns the fields that transformers writes for a dense model, except the fields that name its kind.
fn new_fields(config: &ModelConfig) -> Vec<(&'static str, Value)> {
    let eos_token_id = match config.eos_token_ids.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        many => json!(many),
    };
    let mut fields = own_fields(config);
    fields.extend([
        ("attention_bias", json!(false)),
        ("attention_dropout", json!(0.0)),
        ("bos_token_id", json!(config.bos_token_id)),
        ("eos_token_id", eos_token_id),
        ("head_dim", json!(config.head_dim)),
        ("hidden_act", json!("silu")),
        ("hidden_size", json!(config.hidden_size)),
        ("initializer_range", json!(config.initializer_range)),
        ("intermediate_size", json!(config.intermediate_size)),
        ("max_position_embeddings", json!(config.max_position_embeddings)),
        ("num_attention_heads", json!(config.num_attention_heads)),
        ("num_hidden_layers", json!(config.num_hidden_layers)),
        ("num_key_value_heads", json!(config.num_key_value_heads)),
        ("rms_norm_eps", json!(config.rms_norm_eps)),
        ("rope_scaling", config.rope.scaling.as_ref().map_or(Value::Null, rope::to_json)),
        ("rope_theta", json!(config.rope.theta)),
        ("tie_word_embeddings", json!(config.tie_word_embeddings)),
        ("use_cache", json!(true)),
        ("vocab_size", json!(config.vocab_size)),
    ]);
    fields
}

#[cfg(test)]
pub(crate) mod tests;
