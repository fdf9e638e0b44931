//! Reads a value from a TOML table, with errors that name the key.
//!
//! serde's own errors name neither the location of a key nor the intended one, and stop at the
//! first. This reader collects all faults and suggests the nearest known key. The deserializer is in `node.rs`.

use std::collections::BTreeSet;

use serde::Deserialize;
use toml::Value;

use super::nearest::{ANY, nearest_path};
use super::node::{Context, Node, UnknownKey};
use super::problem::Problem;

/// Maximum number of faults of each kind that are reported.
const MAX_PROBLEMS: usize = 100;

/// Parses TOML; a syntax error has its line.
pub fn parse_table(text: &str) -> Result<toml::Table, String> {
    text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| {
            let before = text.get(..span.start).unwrap_or(text);
            before.matches('\n').count() + 1
        });
        format!("line {line}: {}", error.message().trim())
    })
}

/// A value that was read from a table, and the faults in it.
pub struct Reading<T> {
    /// The value. Stand-ins replace values that could not be read. `None` if there are too many faults.
    pub value: Option<T>,
    /// All faults: unknown keys, missing keys and wrong types.
    pub problems: Vec<Problem>,
    /// The keys without known values: keys of stand-ins, and keys that were misspelt.
    pub stand_ins: BTreeSet<String>,
}

/// Reads a `T` from a table.
///
/// serde stops at the first fault, so the value is read again, with a stand-in for each faulty value, until no more
/// faults are found.
pub fn read<'de, T: Deserialize<'de>>(table: &'de Value) -> Reading<T> {
    let mut problems: Vec<Problem> = Vec::new();
    let mut stand_ins = BTreeSet::new();
    loop {
        let context = Context::new(&stand_ins);
        let result = T::deserialize(Node::root(Some(table), &context));
        let unknown = context.into_found().unknown;
        let value = match result {
            Ok(value) => Some(value),
            Err(problem) => {
                // A fault that a stand-in does not remove would be found forever.
                let is_new = !problem.key.is_empty() && stand_ins.insert(problem.key.clone());
                problems.push(problem);
                if is_new && problems.len() < MAX_PROBLEMS {
                    continue;
                }
                None
            }
        };
        stand_ins.extend(add_unknown::<T>(&mut problems, unknown));
        return Reading { value, problems, stand_ins };
    }
}

/// Adds the unknown keys to the faults, each with the nearest known key. Returns the nearest keys.
fn add_unknown<'de, T: Deserialize<'de>>(
    problems: &mut Vec<Problem>,
    unknown: Vec<UnknownKey>,
) -> Vec<String> {
    if unknown.is_empty() {
        return Vec::new();
    }
    let known = known_keys::<T>().all;
    let mut meant_keys = Vec::new();
    for UnknownKey { key, siblings } in unknown.into_iter().take(MAX_PROBLEMS) {
        let reason = match nearest_path(&key, &known) {
            Some(meant) => {
                // A misspelt key is also missing: one message is enough.
                problems.retain(|problem| problem.key != meant || problem.missing.is_none());
                let reason = format!("unknown key, did you mean {meant}");
                meant_keys.push(meant);
                reason
            }
            None => format!("unknown key, expected one of {}", siblings.join(", ")),
        };
        problems.push(Problem::new(reason).at(&key));
    }
    meant_keys
}

/// The keys that a type can have; elements of lists are [`ANY`].
#[derive(Default)]
pub(super) struct KnownKeys {
    /// The paths of all keys.
    pub(super) all: Vec<String>,
    /// The paths of keys with texts as values.
    pub(super) texts: Vec<String>,
}

impl KnownKeys {
    pub(super) fn is_text(&self, key: &[&str]) -> bool {
        self.texts.iter().any(|known| {
            let known: Vec<&str> = known.split('.').collect();
            let mut pairs = known.iter().zip(key);
            known.len() == key.len() && pairs.all(|(&known, part)| known == *part || known == ANY)
        })
    }
}

/// Returns the keys that a `T` can have: the keys that it requests from a stand-in. So the structs are the only schema.
pub(super) fn known_keys<'de, T: Deserialize<'de>>() -> KnownKeys {
    let stand_ins = BTreeSet::new();
    let context = Context::new(&stand_ins);
    // Only the keys matter.
    let _ = T::deserialize(Node::root(None, &context));
    context.into_found().known
}

/// Returns the path component of a list's element: its name if it has one, or else its index from 0.
pub fn element_name(value: &Value, index: usize) -> String {
    match value.get("name").and_then(Value::as_str) {
        Some(name) if !name.is_empty() => name.to_string(),
        _ => index.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;

    #[test]
    fn the_keys_are_those_of_the_structs() {
        let known = known_keys::<Recipe>();
        let is_text = |key: &str| known.is_text(&key.split('.').collect::<Vec<_>>());
        for key in [
            "run.dir",
            "model.from",
            "data.sources.0.path",
            "data.validation.path",
            "stage.moh.name",
        ] {
            assert!(is_text(key), "{key}");
        }
        for key in ["run", "run.seed", "data.sources", "stage.moh.tokens", "stage.moh", "", "zzz"] {
            assert!(!is_text(key), "{key}");
        }
        let keys = known.all;
        for expected in [
            "run",
            "run.dir",
            "model.new.rope_scaling.factor",
            "model.new.eos_token_id",
            "data.sources.*.weight",
            "data.validation.batches",
            "data.validation.*.batches",
            "stage.*.moh.routed_top_k",
            "stage.*.parallel.virtual_stages",
            "log.tensorboard",
        ] {
            assert!(keys.iter().any(|key| key == expected), "{expected}: {keys:?}");
        }
        // The last field of the last table: nothing stopped before.
        assert_eq!(keys.last().map(String::as_str), Some("guard.patience"));
    }

    #[test]
    fn a_stand_in_is_a_valid_value() {
        let stand_ins = BTreeSet::new();
        assert!(Recipe::deserialize(Node::root(None, &Context::new(&stand_ins))).is_ok());
    }
}
