//! The keys of a configuration that change a model's outputs, listed in `keys.json`. A key is read, or rejected if its
//! value is not in a list. Keys without an effect are also listed, so that a test can find unreviewed keys in new
//! releases of transformers.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

use super::fields::{Fields, kind};
use crate::Error;

/// The values that a key may have, and the reason why other values are rejected.
type OneOf = BTreeMap<String, (Vec<Value>, String)>;

#[derive(Deserialize)]
struct Keys {
    /// Keys that are read and cannot be null.
    not_null: Vec<String>,
    one_of: OneOf,
    one_of_in_llama: OneOf,
    /// Keys with lists.
    each_one_of: OneOf,
    rope: RopeKeys,
}

/// The keys of a table of RoPE.
#[derive(Deserialize)]
struct RopeKeys {
    one_of: OneOf,
}

static KEYS: LazyLock<Keys> = LazyLock::new(|| {
    serde_json::from_str(include_str!("keys.json")).expect("a file of this crate, which tests read")
});

/// Rejects values of a configuration that change a model's outputs and are not implemented.
pub(super) fn check(fields: &Fields<'_>, is_llama: bool) -> Result<(), Error> {
    let keys = &*KEYS;
    if let Some(key) = keys.not_null.iter().find(|key| fields.map.get(*key) == Some(&Value::Null)) {
        return fields.error(key, " is null: leave it out for its default".to_owned());
    }
    check_values(fields, &keys.one_of)?;
    if is_llama {
        check_values(fields, &keys.one_of_in_llama)?;
    }
    for (key, (allowed, reason)) in &keys.each_one_of {
        match fields.get(key) {
            None => {}
            Some(Value::Array(list)) => {
                if let Some(other) = list.iter().find(|value| !allowed.contains(value)) {
                    return fields.error(key, format!(" has {}: {reason}", kind(other)));
                }
            }
            Some(value) => return fields.wrong_type(key, value, "a list"),
        }
    }
    Ok(())
}

/// Rejects such values of a table of RoPE, as [`check`] does for a configuration.
pub(super) fn check_rope(table: &Fields<'_>) -> Result<(), Error> {
    check_values(table, &KEYS.rope.one_of)?;
    match table.map.iter().find(|(_, value)| value.is_object()) {
        None => Ok(()),
        Some((key, _)) => {
            table.error(key, " is a table: RoPE that differs by layer is not supported".to_owned())
        }
    }
}

fn check_values(fields: &Fields<'_>, keys: &OneOf) -> Result<(), Error> {
    for (key, (allowed, reason)) in keys {
        if let Some(value) = fields.map.get(key)
            && !allowed.contains(value)
        {
            return fields.error(key, format!(" = {}: {reason}", kind(value)));
        }
    }
    Ok(())
}
