//! `config.json`, read and written.
//!
//! Every field is kept in its order, so that a converted model differs from its source only in what
//! conversion changes. Both styles are read: `rope_theta` + `rope_scaling` (transformers 4) and
//! `rope_parameters` (transformers 5); what Hugging Face's `LlamaConfig` would do differently from
//! this program (biases, other activations, other RoPE types, quantised weights) is refused.

use std::path::Path;

use moh_kernels::DType;
use moh_model::flops::LimitExceeded;
use moh_model::{Llama3Scaling, ModelConfig, MohConfig, RopeConfig, RouterKind};
use serde_json::{Map, Value, json};

use crate::Error;

/// Name of the file in a model directory.
pub const CONFIG_FILE: &str = "config.json";

/// `model_type` of a Mixture-of-Head Llama.
pub const MOH_MODEL_TYPE: &str = "moh_llama";
/// `architectures` of a Mixture-of-Head Llama.
pub const MOH_ARCHITECTURE: &str = "MohLlamaForCausalLM";
const LLAMA_MODEL_TYPE: &str = "llama";
const LLAMA_ARCHITECTURE: &str = "LlamaForCausalLM";
const MOH_KEYS: [&str; 3] = ["moh_router", "moh_shared_heads", "moh_routed_top_k"];

/// A larger `config.json` is not a configuration.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// The largest width, head count or vocabulary that is believed.
const MAX_DIMENSION: usize = 1 << 24;
/// The largest number of blocks that is believed.
const MAX_LAYERS: usize = 10_000;
/// The longest context that is believed, in tokens.
const MAX_POSITIONS: usize = 1 << 40;

/// A `config.json`: the typed configuration and all fields as they were read.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigFile {
    /// What this program uses of it.
    pub config: ModelConfig,
    /// Every field, in the order of the file.
    pub fields: Map<String, Value>,
}

impl ConfigFile {
    /// Reads `config.json`; `path` is the file or the model directory that holds it.
    ///
    /// # Errors
    /// When the file cannot be read, is not a JSON object, or describes a model that this program
    /// does not compute; the message names the file and the key.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let path = &if path.is_dir() { path.join(CONFIG_FILE) } else { path.to_path_buf() };
        let io = |source| Error::Io { path: path.clone(), source };
        let length = std::fs::metadata(path).map_err(io)?.len();
        if length > MAX_FILE_BYTES {
            return Err(Error::File {
                path: path.clone(),
                reason: format!("{length} bytes: a configuration has at most {MAX_FILE_BYTES}"),
            });
        }
        let bytes = std::fs::read(path).map_err(io)?;
        let value = serde_json::from_slice(&bytes).map_err(|error| Error::File {
            path: path.clone(),
            reason: format!("not valid JSON: {error}"),
        })?;
        Self::from_value(value, path)
    }

    /// The configuration in a JSON object; `path` is what messages call it.
    ///
    /// # Errors
    /// As [`ConfigFile::read`].
    pub fn from_value(value: Value, path: &Path) -> Result<Self, Error> {
        let Value::Object(fields) = value else {
            return Err(Error::File {
                path: path.to_path_buf(),
                reason: format!("expected a JSON object, found {}", kind(&value)),
            });
        };
        let config = read_config(&Fields { map: &fields, path, prefix: "" })?;
        Ok(ConfigFile { config, fields })
    }

    /// The file of a model that has none yet: the fields that transformers writes for a Llama.
    pub fn new(config: &ModelConfig) -> Self {
        let mut fields = Map::new();
        let mut put = |key: &str, value: Value| fields.insert(key.to_string(), value);
        put("architectures", json!([LLAMA_ARCHITECTURE]));
        put("model_type", json!(LLAMA_MODEL_TYPE));
        put("attention_bias", json!(false));
        put("attention_dropout", json!(0.0));
        put("bos_token_id", json!(config.bos_token_id));
        put(
            "eos_token_id",
            match config.eos_token_ids.as_slice() {
                [] => Value::Null,
                [one] => json!(one),
                many => json!(many),
            },
        );
        put("head_dim", json!(config.head_dim));
        put("hidden_act", json!("silu"));
        put("hidden_size", json!(config.hidden_size));
        put("initializer_range", json!(config.initializer_range));
        put("intermediate_size", json!(config.intermediate_size));
        put("max_position_embeddings", json!(config.max_position_embeddings));
        put("mlp_bias", json!(false));
        put("num_attention_heads", json!(config.num_attention_heads));
        put("num_hidden_layers", json!(config.num_hidden_layers));
        put("num_key_value_heads", json!(config.num_key_value_heads));
        put("pretraining_tp", json!(1));
        put("rms_norm_eps", json!(config.rms_norm_eps));
        put("rope_scaling", config.rope.scaling.map_or(Value::Null, scaling_json));
        put("rope_theta", json!(config.rope.theta));
        put("tie_word_embeddings", json!(config.tie_word_embeddings));
        put("use_cache", json!(true));
        put("vocab_size", json!(config.vocab_size));
        let mut file = ConfigFile { config: config.clone(), fields };
        file.fields = file.to_json(config, None);
        file
    }

    /// The fields with those of `config` that conversion and training change: the vocabulary, the
    /// architecture and the MoH fields; with `dtype` also the element type of the weights.
    ///
    /// A dense `config` becomes a plain Llama again. `config` must otherwise be the model that the
    /// fields describe.
    pub fn to_json(&self, config: &ModelConfig, dtype: Option<DType>) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        let mut put = |key: &str, value: Value| fields.insert(key.to_string(), value);
        put("vocab_size", json!(config.vocab_size));
        match &config.moh {
            Some(moh) => {
                put("architectures", json!([MOH_ARCHITECTURE]));
                put("model_type", json!(MOH_MODEL_TYPE));
                put("moh_router", json!(moh.router.name()));
                put("moh_shared_heads", json!(moh.shared_heads));
                put("moh_routed_top_k", json!(moh.routed_top_k));
            }
            None => {
                put("architectures", json!([LLAMA_ARCHITECTURE]));
                put("model_type", json!(LLAMA_MODEL_TYPE));
                for key in MOH_KEYS {
                    fields.shift_remove(key);
                }
            }
        }
        // Remote code that was written for the other architecture would load the wrong model.
        if config.moh.is_some() != self.config.moh.is_some() {
            fields.shift_remove("auto_map");
        }
        if let Some(dtype) = dtype {
            let known = ["dtype", "torch_dtype"].map(|key| (key, fields.contains_key(key)));
            let default =
                if fields.contains_key("rope_parameters") { "dtype" } else { "torch_dtype" };
            for (key, present) in known {
                if present || (key == default && !known.iter().any(|(_, present)| *present)) {
                    fields.insert(key.to_string(), json!(dtype_name(dtype)));
                }
            }
        }
        fields
    }
}

/// The name of an element type in `config.json`: torch's.
pub fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        DType::F64 => "float64",
        DType::U32 => "uint32",
        DType::I16 => "int16",
        DType::U8 => "uint8",
    }
}

fn scaling_json(scaling: Llama3Scaling) -> Value {
    json!({
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    })
}

/// A JSON object with what messages call it.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: &'a Path,
    prefix: &'a str,
}

impl<'a> Fields<'a> {
    /// The value of `key`; a null counts as absent, as in `LlamaConfig`.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn error<T>(&self, key: &str, reason: String) -> Result<T, Error> {
        let prefix = self.prefix;
        Err(Error::File { path: self.path.to_path_buf(), reason: format!("{prefix}{key}{reason}") })
    }

    fn wrong_type<T>(&self, key: &str, value: &Value, expected: &str) -> Result<T, Error> {
        self.error(key, format!(": expected {expected}, found {}", kind(value)))
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, Error> {
        match value {
            Some(value) => Ok(value),
            None => self.error(key, " is missing".to_string()),
        }
    }

    fn count(&self, key: &str) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => self.wrong_type(key, value, "a whole number"),
        }
    }

    /// A count from 1 to `limit`.
    fn size(&self, key: &str, limit: usize) -> Result<Option<usize>, Error> {
        match self.count(key)? {
            Some(number) if number == 0 || number > limit => {
                self.error(key, format!(" = {number}: must be from 1 to {limit}"))
            }
            number => Ok(number),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) => Ok(Some(number)),
            None => self.wrong_type(key, value, "a number"),
        }
    }

    /// A number above zero.
    fn positive(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.number(key)? {
            Some(number) if !(number > 0.0 && number.is_finite()) => {
                self.error(key, format!(" = {number}: must be above 0"))
            }
            number => Ok(number),
        }
    }

    fn flag(&self, key: &str) -> Result<bool, Error> {
        let Some(value) = self.get(key) else {
            return Ok(false);
        };
        match value.as_bool() {
            Some(flag) => Ok(flag),
            None => self.wrong_type(key, value, "true or false"),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_str() {
            Some(text) => Ok(Some(text)),
            None => self.wrong_type(key, value, "a string"),
        }
    }

    fn object(&self, key: &str, prefix: &'a str) -> Result<Option<Fields<'a>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { map, path: self.path, prefix })),
            Some(value) => self.wrong_type(key, value, "an object"),
        }
    }

    fn token(&self, key: &str, value: &Value) -> Result<u32, Error> {
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => Ok(id),
            None => self.error(key, format!(": expected a token id, found {value}")),
        }
    }
}

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_string(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("\"{}\"", text.escape_debug()),
        Value::Array(_) => "a list".to_string(),
        Value::Object(_) => "an object".to_string(),
    }
}

fn read_config(fields: &Fields<'_>) -> Result<ModelConfig, Error> {
    let is_moh = read_architecture(fields)?;
    let activation = fields.text("hidden_act")?.unwrap_or("silu");
    if activation != "silu" && activation != "swish" {
        return fields.error("hidden_act", format!(" = \"{activation}\": must be \"silu\""));
    }
    for key in ["attention_bias", "mlp_bias"] {
        if fields.flag(key)? {
            return fields.error(key, " = true: layers with biases are not supported".to_string());
        }
    }
    if fields.get("quantization_config").is_some() {
        let reason = ": quantised weights are not supported, start from the unquantised model";
        return fields.error("quantization_config", reason.to_string());
    }

    let dimension = |key| fields.required(key, fields.size(key, MAX_DIMENSION)?);
    let vocab_size = dimension("vocab_size")?;
    let hidden_size = dimension("hidden_size")?;
    let intermediate_size = dimension("intermediate_size")?;
    let layers = fields.size("num_hidden_layers", MAX_LAYERS)?;
    let num_hidden_layers = fields.required("num_hidden_layers", layers)?;
    let heads = dimension("num_attention_heads")?;
    let key_value_heads = fields.size("num_key_value_heads", MAX_DIMENSION)?.unwrap_or(heads);
    if heads % key_value_heads != 0 {
        let reason =
            format!(" = {heads}: must be a multiple of num_key_value_heads = {key_value_heads}");
        return fields.error("num_attention_heads", reason);
    }
    let head_dim = match fields.size("head_dim", MAX_DIMENSION)? {
        Some(head_dim) => head_dim,
        None if hidden_size % heads == 0 => hidden_size / heads,
        None => {
            let reason = format!(
                " is missing, and hidden_size = {hidden_size} is not a multiple of \
                 num_attention_heads = {heads}"
            );
            return fields.error("head_dim", reason);
        }
    };
    if head_dim % 2 != 0 {
        let reason = format!(" = {head_dim}: must be even, RoPE turns pairs of elements");
        return fields.error("head_dim", reason);
    }
    let positions = fields.size("max_position_embeddings", MAX_POSITIONS)?;

    let moh = if is_moh { Some(read_moh(fields, heads)?) } else { None };
    let config = ModelConfig {
        vocab_size,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads: heads,
        num_key_value_heads: key_value_heads,
        head_dim,
        max_position_embeddings: positions.unwrap_or(2048),
        rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
        rope: read_rope(fields)?,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?,
        initializer_range: fields.positive("initializer_range")?.unwrap_or(0.02),
        bos_token_id: match fields.get("bos_token_id") {
            None => None,
            Some(value) => Some(fields.token("bos_token_id", value)?),
        },
        eos_token_ids: match fields.get("eos_token_id") {
            None => Vec::new(),
            Some(Value::Array(list)) => list
                .iter()
                .map(|value| fields.token("eos_token_id", value))
                .collect::<Result<_, _>>()?,
            Some(value) => vec![fields.token("eos_token_id", value)?],
        },
        moh,
    };
    match config.check_limits() {
        Ok(()) => Ok(config),
        Err(LimitExceeded { what, limit }) => Err(Error::File {
            path: fields.path.to_path_buf(),
            reason: format!("the sizes make {what}, more than the {limit} that are supported"),
        }),
    }
}

/// Whether the file describes a Mixture-of-Head Llama (or a plain one).
fn read_architecture(fields: &Fields<'_>) -> Result<bool, Error> {
    const EXPECTED: &str = "only Llama models (\"llama\", \"moh_llama\") are supported";
    let model_type = match fields.text("model_type")? {
        None => None,
        Some(LLAMA_MODEL_TYPE) => Some(false),
        Some(MOH_MODEL_TYPE) => Some(true),
        Some(other) => {
            let reason = format!(" = \"{}\": {EXPECTED}", other.escape_debug());
            return fields.error("model_type", reason);
        }
    };
    let architecture = match fields.get("architectures") {
        None => None,
        Some(Value::Array(list)) => match list.first() {
            None => None,
            Some(Value::String(name)) if name == LLAMA_ARCHITECTURE => Some(false),
            Some(Value::String(name)) if name == MOH_ARCHITECTURE => Some(true),
            Some(other) => {
                let reason = format!(
                    " = [{}]: expected \"{LLAMA_ARCHITECTURE}\" or \"{MOH_ARCHITECTURE}\"",
                    kind(other)
                );
                return fields.error("architectures", reason);
            }
        },
        Some(value) => return fields.wrong_type("architectures", value, "a list"),
    };
    let is_moh = match (model_type, architecture) {
        (None, None) => return fields.error("model_type", format!(" is missing: {EXPECTED}")),
        (Some(a), Some(b)) if a != b => {
            return fields.error("architectures", " contradicts model_type".to_string());
        }
        (Some(is_moh), _) | (None, Some(is_moh)) => is_moh,
    };
    if !is_moh && let Some(key) = MOH_KEYS.into_iter().find(|key| fields.get(key).is_some()) {
        let reason =
            format!(": a model with Mixture-of-Head fields has model_type \"{MOH_MODEL_TYPE}\"");
        return fields.error(key, reason);
    }
    Ok(is_moh)
}

fn read_moh(fields: &Fields<'_>, heads: usize) -> Result<MohConfig, Error> {
    let [router_key, shared_key, top_k_key] = MOH_KEYS;
    let name = fields.required(router_key, fields.text(router_key)?)?;
    let Some(router) = RouterKind::from_name(name) else {
        let reason =
            format!(" = \"{}\": unknown router, expected \"query-norm\"", name.escape_debug());
        return fields.error(router_key, reason);
    };
    let moh = MohConfig {
        router,
        shared_heads: fields.required(shared_key, fields.count(shared_key)?)?,
        routed_top_k: fields.required(top_k_key, fields.count(top_k_key)?)?,
    };
    match moh.validate(heads) {
        Ok(()) => Ok(moh),
        // The messages start with the field's name; the file's keys have a prefix.
        Err(error) => fields.error("moh_", error.to_string()),
    }
}

fn read_rope(fields: &Fields<'_>) -> Result<RopeConfig, Error> {
    let top_theta = fields.positive("rope_theta")?;
    let (rope, theta) = match fields.object("rope_parameters", "rope_parameters.")? {
        Some(rope) => {
            let theta = rope.positive("rope_theta")?.or(top_theta);
            (Some(rope), theta)
        }
        None => (fields.object("rope_scaling", "rope_scaling.")?, top_theta),
    };
    for fields in std::iter::once(fields).chain(&rope) {
        if let Some(factor) = fields.number("partial_rotary_factor")?
            && factor != 1.0
        {
            let reason = format!(" = {factor}: must be 1, every element of a head is turned");
            return fields.error("partial_rotary_factor", reason);
        }
    }
    let scaling = match rope {
        None => None,
        Some(rope) => read_scaling(&rope)?,
    };
    Ok(RopeConfig { theta: theta.unwrap_or(10_000.0), scaling })
}

fn read_scaling(rope: &Fields<'_>) -> Result<Option<Llama3Scaling>, Error> {
    let (key, name) = match rope.text("rope_type")? {
        Some(name) => ("rope_type", name),
        None => ("type", rope.text("type")?.unwrap_or("default")),
    };
    match name {
        "default" => return Ok(None),
        "llama3" => {}
        other => {
            let reason =
                format!(" = \"{}\": must be \"default\" or \"llama3\"", other.escape_debug());
            return rope.error(key, reason);
        }
    }
    let required = |key| rope.required(key, rope.positive(key)?);
    let original = "original_max_position_embeddings";
    let scaling = Llama3Scaling {
        factor: required("factor")?,
        low_freq_factor: required("low_freq_factor")?,
        high_freq_factor: required("high_freq_factor")?,
        original_max_position_embeddings: rope
            .required(original, rope.size(original, MAX_POSITIONS)?)?,
    };
    if scaling.high_freq_factor <= scaling.low_freq_factor {
        let reason = format!(
            " = {}: must be above low_freq_factor = {}",
            scaling.high_freq_factor, scaling.low_freq_factor
        );
        return rope.error("high_freq_factor", reason);
    }
    Ok(Some(scaling))
}

#[cfg(test)]
mod tests;
