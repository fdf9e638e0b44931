//! `--set key=value`: overrides of a recipe's values.

use std::collections::BTreeSet;
use std::path::Path;

use toml::{Table, Value};

use super::Fault;
use super::lines::Lines;
use super::nearest::nearest_name;
use super::reader::element_name;

/// The origin of an overridden key, in messages.
const ORIGIN: &str = "--set";

/// Where the values of a recipe come from.
#[derive(Debug)]
pub(super) struct Origins<'a> {
    path: &'a Path,
    lines: Lines,
    /// The overridden keys.
    overridden: BTreeSet<String>,
}

impl<'a> Origins<'a> {
    /// The origins of a recipe in the file `path`, whose keys are on these `lines`.
    pub(super) fn new(path: &'a Path, lines: Lines) -> Self {
        Origins { path, lines, overridden: BTreeSet::new() }
    }

    /// Applies `key=value` overrides to a recipe, in order, creating missing tables. Returns a fault
    /// for an override without `=`, for an unknown stage, and for a key below a value that is not a
    /// table; unknown keys are found when the recipe is read.
    pub(super) fn override_with(&mut self, recipe: &mut Value, overrides: &[String]) -> Vec<Fault> {
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
                    self.overridden.insert(parts.join("."));
                }
                Err(reason) => faults.push(Fault {
                    origin: ORIGIN.to_string(),
                    key: key.to_string(),
                    value: None,
                    reason,
                }),
            }
        }
        faults
    }

    /// Names the origin of each fault, and sorts them by line; those of overrides come last.
    pub(super) fn name(&self, mut faults: Vec<Fault>) -> Vec<Fault> {
        let line = |fault: &Fault| self.lines.line(&fault.key);
        let place = |fault: &Fault| match self.is_overridden(&fault.key) {
            true => (true, None),
            false => (false, line(fault)),
        };
        faults.sort_by_key(place);
        for fault in &mut faults {
            let path = self.path.display();
            fault.origin = match place(fault) {
                (true, _) => ORIGIN.to_string(),
                (false, Some(line)) => format!("{path}: line {line}"),
                (false, None) => path.to_string(),
            };
        }
        faults
    }

    fn is_overridden(&self, fault: &str) -> bool {
        self.overridden.iter().any(|key| is_below(fault, key))
    }
}

/// Whether `key` is `table` or below it.
pub(crate) fn is_below(key: &str, table: &str) -> bool {
    let rest = key.strip_prefix(table);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
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
                    Err(match nearest_name(first, names.clone()) {
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
