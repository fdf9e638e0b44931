//! Parses the fields of a `config.json`.

use moh_model::flops::LimitExceeded;
use moh_model::{
    Architecture, Llama3Scaling, ModelConfig, MohConfig, RopeConfig, RouterKind, SharedHeadSets,
};
use serde_json::Value;

use super::MOH_KEYS;
use super::architecture::Kind;
use super::fields::{Fields, kind};
use crate::Error;

/// Maximum width, head count or vocabulary size.
const MAX_DIMENSION: usize = 1 << 24;
const MAX_LAYERS: usize = 10_000;
/// Maximum context length, in tokens.
const MAX_POSITIONS: usize = 1 << 40;

/// The configuration that the fields describe.
pub(super) fn read_config(fields: &Fields<'_>) -> Result<ModelConfig, Error> {
    let Kind { architecture, is_moh } = Kind::read(fields)?;
    let activation = fields.text("hidden_act")?.unwrap_or("silu");
    if activation != "silu" && activation != "swish" {
        return fields.error("hidden_act", format!(" = \"{activation}\": must be \"silu\""));
    }
    refuse_unsupported(architecture, fields)?;
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
    let key_value_heads = fields.size("num_key_value_heads", MAX_DIMENSION)?;
    let key_value_heads = match architecture {
        Architecture::Llama => key_value_heads.unwrap_or(heads),
        // Hugging Face's default, a constant, matches no published model.
        Architecture::Qwen3 => fields.required("num_key_value_heads", key_value_heads)?,
    };
    if heads % key_value_heads != 0 {
        let reason =
            format!(" = {heads}: must be a multiple of num_key_value_heads = {key_value_heads}");
        return fields.error("num_attention_heads", reason);
    }
    let head_dim = read_head_dim(architecture, fields, hidden_size, heads)?;
    let positions = fields.size("max_position_embeddings", MAX_POSITIONS)?;

    let moh = if is_moh {
        Some(read_moh(fields, [heads, key_value_heads], num_hidden_layers)?)
    } else {
        None
    };
    let config = ModelConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads: heads,
        num_key_value_heads: key_value_heads,
        head_dim,
        max_position_embeddings: positions.unwrap_or(default_positions(architecture)),
        rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
        rope: read_rope(fields)?,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?,
        initializer_range: fields.positive("initializer_range")?.unwrap_or(0.02),
        bos_token_id: match fields.get("bos_token_id") {
            None => None,
            Some(value) => Some(fields.token("bos_token_id", value)?),
        },
        eos_token_ids: fields.tokens("eos_token_id")?.unwrap_or_default(),
        moh,
    };
    match config.check_limits() {
        Ok(()) => Ok(config),
        Err(LimitExceeded { what, limit }) => Err(Error::file(
            fields.path,
            format!("the sizes make {what}, more than the {limit} that are supported"),
        )),
    }
}

/// Rejects settings that change a model's outputs and are not implemented.
fn refuse_unsupported(architecture: Architecture, fields: &Fields<'_>) -> Result<(), Error> {
    let biases: &[&str] = match architecture {
        Architecture::Llama => &["attention_bias", "mlp_bias"],
        Architecture::Qwen3 => &["attention_bias"],
    };
    for key in biases {
        if fields.flag(key)? {
            return fields.error(key, " = true: layers with biases are not supported".to_string());
        }
    }
    if architecture == Architecture::Qwen3 {
        refuse_sliding_windows(fields)?;
    }
    Ok(())
}

fn refuse_sliding_windows(fields: &Fields<'_>) -> Result<(), Error> {
    const REASON: &str = "sliding windows are not supported, every layer has full attention";
    if fields.flag("use_sliding_window")? {
        return fields.error("use_sliding_window", format!(" = true: {REASON}"));
    }
    match fields.get("layer_types") {
        None => Ok(()),
        Some(Value::Array(layers)) => {
            match layers.iter().find(|&layer| layer != "full_attention") {
                None => Ok(()),
                Some(other) => {
                    fields.error("layer_types", format!(" has {}: {REASON}", kind(other)))
                }
            }
        }
        Some(value) => fields.wrong_type("layer_types", value, "a list"),
    }
}

fn read_head_dim(
    architecture: Architecture,
    fields: &Fields<'_>,
    hidden_size: usize,
    heads: usize,
) -> Result<usize, Error> {
    let head_dim = match (fields.size("head_dim", MAX_DIMENSION)?, architecture) {
        (Some(head_dim), _) => head_dim,
        (None, Architecture::Qwen3) => 128,
        (None, Architecture::Llama) if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        (None, Architecture::Llama) => {
            let reason = format!(
                " is missing, and hidden_size = {hidden_size} is not a multiple of \
                 num_attention_heads = {heads}"
            );
            return fields.error("head_dim", reason);
        }
    };
    if head_dim % 2 != 0 {
        let reason = format!(" = {head_dim}: must be even, RoPE rotates pairs of elements");
        return fields.error("head_dim", reason);
    }
    Ok(head_dim)
}

/// Hugging Face's default context length.
fn default_positions(architecture: Architecture) -> usize {
    match architecture {
        Architecture::Llama => 2048,
        Architecture::Qwen3 => 32_768,
    }
}

fn read_moh(
    fields: &Fields<'_>,
    [heads, kv_heads]: [usize; 2],
    layers: usize,
) -> Result<MohConfig, Error> {
    let [router_key, shared_key, ids_key, top_k_key] = MOH_KEYS;
    let name = fields.required(router_key, fields.text(router_key)?)?;
    let Some(router) = RouterKind::from_name(name) else {
        let known = RouterKind::NAMES.map(|name| format!("\"{name}\"")).join(" or ");
        let reason = format!(" = \"{}\": unknown router, expected {known}", name.escape_debug());
        return fields.error(router_key, reason);
    };
    // The messages start with the field's name; the file's keys have a prefix.
    fn named<T>(fields: &Fields<'_>, error: &moh_model::Error) -> Result<T, Error> {
        fields.error("moh_", error.to_string())
    }
    let shared_heads = match (fields.head_counts(shared_key)?, fields.head_ids(ids_key)?) {
        (Some(_), Some(_)) => {
            let reason = format!(" is there beside {shared_key}: leave one of them out");
            return fields.error(ids_key, reason);
        }
        (None, Some(ids)) => {
            SharedHeadSets::from_ids(&ids).or_else(|error| named(fields, &error))?
        }
        (counts, None) => fields.required(shared_key, counts)?.into(),
    };
    let moh = MohConfig {
        router,
        shared_heads,
        routed_top_k: fields.required(top_k_key, fields.head_counts(top_k_key)?)?,
    };
    moh.validate(heads, kv_heads, layers).or_else(|error| named(fields, &error))?;
    Ok(moh)
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
            let reason = format!(" = {factor}: must be 1, RoPE rotates every element of a head");
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
