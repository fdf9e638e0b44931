//! Parses the fields of a `config.json`.

use moh_model::flops::LimitExceeded;
use moh_model::{Architecture, ModelConfig, MohConfig, RouterKind, SharedHeadSets};

use super::architecture::Kind;
use super::fields::Fields;
use super::{MOH_KEYS, keys, rope};
use crate::Error;

/// Maximum width, head count or vocabulary size.
const MAX_DIMENSION: usize = 1 << 24;
const MAX_LAYERS: usize = 10_000;
/// Maximum context length, in tokens.
pub(super) const MAX_POSITIONS: usize = 1 << 40;

pub(super) fn read_config(fields: &Fields<'_>) -> Result<ModelConfig, Error> {
    let Kind { architecture, is_moh } = Kind::read(fields)?;
    keys::check(fields, architecture == Architecture::Llama)?;

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
        // Hugging Face's default is a constant, which fits no published model.
        Architecture::Qwen3 => fields.required("num_key_value_heads", key_value_heads)?,
    };
    if heads % key_value_heads != 0 {
        let reason =
            format!(" = {heads}: must be a multiple of num_key_value_heads = {key_value_heads}");
        return fields.error("num_attention_heads", reason);
    }
    let head_dim = read_head_dim(architecture, fields, hidden_size, heads)?;
    let positions = fields.size("max_position_embeddings", MAX_POSITIONS)?;
    let positions = positions.unwrap_or(default_positions(architecture));

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
        max_position_embeddings: positions,
        rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
        rope: rope::read(fields, positions)?,
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

/// Returns Hugging Face's default context length.
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
    // The messages start with the field's name. The file's keys have a prefix.
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
