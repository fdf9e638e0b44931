//! Rotary position embedding in a `config.json`, read as transformers 5 reads it: from the table `rope_scaling`, or
//! else from `rope_parameters`, with the base inside the table or next to it. Both tables are written with equal
//! values.

use moh_model::{Llama3Scaling, RopeConfig, RopeScaling, YarnScaling};
use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::keys::check_rope;
use super::parse::MAX_POSITIONS;
use crate::Error;

/// The tables, in order of precedence.
const TABLES: [(&str, &str); 2] =
    [("rope_scaling", "rope_scaling."), ("rope_parameters", "rope_parameters.")];
const THETA: &str = "rope_theta";
const ORIGINAL: &str = "original_max_position_embeddings";

/// Reads the embedding of a model with a context of `positions` tokens.
pub(super) fn read(fields: &Fields<'_>, positions: usize) -> Result<RopeConfig, Error> {
    let Some(table) = table(fields)? else {
        return Ok(RopeConfig { theta: theta(fields, fields)?, scaling: None });
    };
    check_rope(&table)?;
    let theta = theta(&table, fields)?;
    let key = ["rope_type", "type"].into_iter().find(|key| table.map.contains_key(*key));
    let Some(key) = key else { return Ok(RopeConfig { theta, scaling: None }) };
    let name = table.required(key, table.text(key)?)?;
    // The value next to the table has precedence, as in Phi-3's files.
    let beside = fields.size(ORIGINAL, MAX_POSITIONS)?;
    let original = beside.or(table.size(ORIGINAL, MAX_POSITIONS)?).unwrap_or(positions);
    let scaling = match name {
        "default" => None,
        "linear" => Some(RopeScaling::Linear { factor: required(&table, "factor")? }),
        "llama3" => Some(RopeScaling::Llama3(llama3(&table, original)?)),
        "yarn" if theta <= 1.0 => {
            return table.error(THETA, format!(" = {theta}: must be above 1 with yarn"));
        }
        "yarn" => Some(RopeScaling::Yarn(yarn(&table, original, positions)?)),
        other => {
            let name = other.escape_debug();
            let reason =
                format!(" = \"{name}\": must be \"default\", \"linear\", \"llama3\" or \"yarn\"");
            return table.error(key, reason);
        }
    };
    Ok(RopeConfig { theta, scaling })
}

fn required(table: &Fields<'_>, key: &str) -> Result<f64, Error> {
    table.required(key, table.positive(key)?)
}

/// Returns the first table with an entry, or `None` if there is no such table.
fn table<'a>(fields: &Fields<'a>) -> Result<Option<Fields<'a>>, Error> {
    for (key, prefix) in TABLES {
        if let Some(table) = fields.object(key, prefix)?.filter(|table| !table.map.is_empty()) {
            return Ok(Some(table));
        }
    }
    Ok(None)
}

/// Returns the base from the table or, if the table has no base, from the fields next to it. A null base is an error.
fn theta(table: &Fields<'_>, fields: &Fields<'_>) -> Result<f64, Error> {
    for fields in [table, fields] {
        match fields.map.get(THETA) {
            None => {}
            Some(Value::Null) => {
                return fields.error(THETA, " is null: write the number".to_owned());
            }
            Some(_) => return fields.required(THETA, fields.positive(THETA)?),
        }
    }
    Ok(10_000.0)
}

fn llama3(table: &Fields<'_>, original: usize) -> Result<Llama3Scaling, Error> {
    let scaling = Llama3Scaling {
        factor: required(table, "factor")?,
        low_freq_factor: required(table, "low_freq_factor")?,
        high_freq_factor: required(table, "high_freq_factor")?,
        original_max_position_embeddings: original,
    };
    if scaling.high_freq_factor <= scaling.low_freq_factor {
        let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
        let reason = format!(" = {high}: must be above low_freq_factor = {low}");
        return table.error("high_freq_factor", reason);
    }
    Ok(scaling)
}

fn yarn(table: &Fields<'_>, original: usize, positions: usize) -> Result<YarnScaling, Error> {
    let factor = match table.map.get("factor") {
        Some(Value::Null) => positions as f64 / original as f64,
        _ => required(table, "factor")?,
    };
    // Section 3.4 of the paper, with two multipliers as in DeepSeek-V2's files.
    let attention = |multiplier: f64| match factor > 1.0 {
        true => 0.1 * multiplier * factor.ln() + 1.0,
        false => 1.0,
    };
    let multipliers = [table.number("mscale")?, table.number("mscale_all_dim")?];
    let attention_factor = match (table.positive("attention_factor")?, multipliers) {
        (Some(given), _) => given,
        (None, [Some(one), Some(all)]) if one != 0.0 && all != 0.0 => {
            attention(one) / attention(all)
        }
        _ => attention(1.0),
    };
    Ok(YarnScaling {
        factor,
        original_max_position_embeddings: original,
        beta_fast: table.positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: table.positive("beta_slow")?.unwrap_or(1.0),
        attention_factor,
        truncate: !table.map.contains_key("truncate") || table.flag("truncate")?,
    })
}

/// Writes the used values to each table, and the base also next to the tables, for readers that use only one place.
pub(super) fn write(fields: &mut Map<String, Value>, rope: &RopeConfig) {
    let used = |key: &str| fields.get(key)?.as_object().filter(|table| !table.is_empty()).cloned();
    let Some(mut table) = TABLES.iter().find_map(|(key, _)| used(key)) else { return };
    if fields.contains_key("rope_parameters") {
        table.insert(THETA.to_owned(), json!(rope.theta));
        fields.insert("rope_parameters".to_owned(), Value::Object(table.clone()));
    }
    if rope.scaling.is_some() {
        table.shift_remove(THETA);
        fields.insert("rope_scaling".to_owned(), Value::Object(table));
    }
    if fields.get(THETA).and_then(Value::as_f64) != Some(rope.theta) {
        fields.insert(THETA.to_owned(), json!(rope.theta));
    }
}

/// Returns a scaling as a table.
pub(super) fn to_json(scaling: &RopeScaling) -> Value {
    match scaling {
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Llama3(scaling) => json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            ORIGINAL: scaling.original_max_position_embeddings,
        }),
        RopeScaling::Yarn(yarn) => json!({
            "rope_type": "yarn",
            "factor": yarn.factor,
            ORIGINAL: yarn.original_max_position_embeddings,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "attention_factor": yarn.attention_factor,
            "truncate": yarn.truncate,
        }),
    }
}
