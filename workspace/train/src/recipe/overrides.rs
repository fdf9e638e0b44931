//! `--set key=value`: overrides of a recipe's values.

use std::collections::BTreeSet;
use std::path::Path;

use toml::{Table, Value};

use super::reader::{closest, element_name};
use super::{Fault, file_fault};
use crate::Error;

/// The origin of an overridden key, in messages.
const ORIGIN: &str = "--set";

/// The overridden keys, so that faults name their origin.
#[derive(Debug, Default)]
pub(super) struct Overrides {
    keys: BTreeSet<String>,
}

impl Overrides {
    /// Applies `key=value` overrides to a recipe, in order, creating missing tables.
    ///
    /// # Errors
    /// Fails for an override without `=`, for an unknown stage, and for a key below a value that is
    /// not a table. Unknown keys are reported when the recipe is read.
    pub(super) fn apply(recipe: &mut Value, overrides: &[String]) -> Result<Self, Error> {
        let mut keys = BTreeSet::new();
        let mut faults = Vec::new();
        for text in overrides {
            let (key, value) = match text.split_once('=') {
                Some((key, value)) => (key.trim(), parse_value(value.trim())),
                None => ("", Value::Boolean(false)),
            };
            let parts: Vec<&str> = key.split('.').map(str::trim).collect();
            let result = if parts.iter().any(|part| part.is_empty()) {
                Err(format!("{text:?}: expected key=value, such as stage.moh.tokens=1e9"))
            } else {
                set(recipe, &parts, value)
            };
            match result {
                Ok(()) => {
                    keys.insert(parts.join("."));
                }
                Err(reason) => faults.push(Fault {
                    origin: ORIGIN.to_string(),
                    key: key.to_string(),
                    value: None,
                    reason,
                }),
            }
        }
        match faults.is_empty() {
            true => Ok(Overrides { keys }),
            false => Err(Error::Recipe { faults }),
        }
    }

    /// The error for faults of the recipe at `path`: each names the override or the file.
    pub(super) fn blame(&self, mut faults: Vec<Fault>, path: &Path) -> Error {
        for fault in &mut faults {
            let overridden = self.keys.iter().any(|key| {
                let rest = fault.key.strip_prefix(key.as_str());
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            });
            fault.origin = match overridden {
                true => ORIGIN.to_string(),
                false => path.display().to_string(),
            };
        }
        match faults.is_empty() {
            // Unreachable: no caller passes an empty list. The error must still say something.
            true => file_fault(path, "is not a valid recipe".to_string()),
            false => Error::Recipe { faults },
        }
    }
}

/// The value as TOML, or as a string if it is not TOML (a path, a name).
fn parse_value(text: &str) -> Value {
    match text.parse() {
        // No key accepts a date, but a directory's name may be one.
        Ok(Value::Datetime(_)) | Err(_) => Value::String(text.to_string()),
        Ok(value) => value,
    }
}

/// Sets the value at the path `parts` below `node`.
fn set(node: &mut Value, parts: &[&str], value: Value) -> Result<(), String> {
    let Some((&first, rest)) = parts.split_first() else {
        *node = value;
        return Ok(());
    };
    match node {
        Value::Table(table) => {
            if rest.is_empty() {
                table.insert(first.to_string(), value);
                return Ok(());
            }
            let missing = || Value::Table(Table::new());
            let child = table.entry(first.to_string()).or_insert_with(missing);
            set(child, rest, value)
        }
        Value::Array(elements) => {
            let names: Vec<String> = elements
                .iter()
                .enumerate()
                .map(|(index, element)| element_name(element, index))
                .collect();
            match names.iter().position(|name| name == first) {
                Some(index) => match elements.get_mut(index) {
                    Some(element) => set(element, rest, value),
                    None => Err(format!("no {first} in the list")),
                },
                None => {
                    let names = names.iter().map(String::as_str);
                    Err(match closest(first, names.clone()) {
                        Some(meant) => format!("there is no {first:?}, did you mean {meant}"),
                        None => format!(
                            "there is no {first:?}, only {}",
                            names.collect::<Vec<_>>().join(", ")
                        ),
                    })
                }
            }
        }
        _ => Err(format!("{first:?} is below a value that is not a table")),
    }
}
