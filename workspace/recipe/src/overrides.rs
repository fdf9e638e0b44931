//! `--set key=value`: overrides of a recipe's values.

use std::collections::BTreeMap;
use std::path::Path;

use toml::{Table, Value};

use super::KeyFault;
use super::lines::Lines;
use super::nearest::nearest_name;
use super::reader::{KnownKeys, element_name};

/// The origin of an overridden key, in messages.
const ORIGIN: &str = "--set";

/// The origins of a file's values.
#[derive(Debug)]
pub struct Origins<'a> {
    path: &'a Path,
    lines: Lines,
    /// The overridden keys, as the recipe's reader and as the user names them. The reader's keys have elements of lists
    /// also by index.
    overridden: BTreeMap<String, String>,
}

impl<'a> Origins<'a> {
    /// Returns the origins of the values in the file `path`, with its keys on these `lines`.
    pub fn new(path: &'a Path, lines: Lines) -> Self {
        Origins { path, lines, overridden: BTreeMap::new() }
    }

    /// Applies `key=value` overrides to a recipe, in order, creating missing tables. Returns a fault for an override
    /// without `=`, for an unknown stage, and for a key below a value that is not a table. Unknown keys are found when
    /// the recipe is read. A value needs no quotes if `known` has its key as a text.
    pub(super) fn override_with(
        &mut self,
        recipe: &mut Value,
        overrides: &[String],
        known: &KnownKeys,
    ) -> Vec<KeyFault> {
        let mut faults = Vec::new();
        for text in overrides {
            let (key, value) = text.split_once('=').unwrap_or(("", ""));
            let key = key.trim();
            let parts: Vec<&str> = key.split('.').map(str::trim).collect();
            let mut indices = Vec::new();
            let result = if parts.iter().any(|part| part.is_empty()) {
                Err(format!("{text:?}: expected key=value, such as stage.moh.tokens=1e9"))
            } else {
                let value = parse_value(value.trim(), known.is_text(&parts));
                set(recipe, &parts, value, &mut indices)
            };
            match result {
                Ok(()) => {
                    let given = parts.join(".");
                    self.overridden.insert(indices.join("."), given.clone());
                    self.overridden.insert(given.clone(), given);
                }
                Err(reason) => faults.push(KeyFault {
                    origin: ORIGIN.to_string(),
                    key: key.to_string(),
                    value: None,
                    reason,
                }),
            }
        }
        faults
    }

    /// Names the origin of each fault, and sorts the faults by line, faults of overrides last.
    pub fn name(&self, mut faults: Vec<KeyFault>) -> Vec<KeyFault> {
        for fault in &mut faults {
            if let Some((key, given)) = self.override_of(&fault.key) {
                fault.key = format!("{given}{}", &fault.key[key.len()..]);
            }
        }
        let line = |fault: &KeyFault| self.lines.line(&fault.key);
        let place = |fault: &KeyFault| match self.is_of_override(&fault.key) {
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

    /// Returns whether an override has set `key` or a table around it. If the file does not have `key`, an override of
    /// a key below it counts too.
    fn is_of_override(&self, key: &str) -> bool {
        let has_set_within = || self.overridden.keys().any(|overridden| is_below(overridden, key));
        self.override_of(key).is_some() || (!self.lines.has(key) && has_set_within())
    }

    /// Returns the override that has set `key` or a table around it.
    fn override_of(&self, key: &str) -> Option<(&String, &String)> {
        self.overridden.iter().find(|(overridden, _)| is_below(key, overridden))
    }
}

/// Returns whether `key` is `table` or below it.
pub fn is_below(key: &str, table: &str) -> bool {
    let rest = key.strip_prefix(table);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns the value as TOML, or as a string if it is not TOML (a path, a name) or if the key `is_text`. Quotes around
/// a string are removed in both cases.
fn parse_value(text: &str, is_text: bool) -> Value {
    match text.parse() {
        Ok(Value::String(text)) => Value::String(text),
        // No key accepts a date, but a directory's name may be one.
        Ok(Value::Datetime(_)) | Err(_) => Value::String(text.to_string()),
        Ok(_) if is_text => Value::String(text.to_string()),
        Ok(value) => value,
    }
}

/// Sets the value at the path `parts` below `node`. `indices` receives the path with the index of each element
/// of a list.
fn set(
    node: &mut Value,
    parts: &[&str],
    value: Value,
    indices: &mut Vec<String>,
) -> Result<(), String> {
    let Some((&first, rest)) = parts.split_first() else {
        *node = value;
        return Ok(());
    };
    match node {
        Value::Table(table) => {
            indices.push(first.to_string());
            if rest.is_empty() {
                table.insert(first.to_string(), value);
                return Ok(());
            }
            let missing = || Value::Table(Table::new());
            let child = table.entry(first.to_string()).or_insert_with(missing);
            set(child, rest, value, indices)
        }
        Value::Array(elements) => {
            let names: Vec<String> = elements
                .iter()
                .enumerate()
                .map(|(index, element)| element_name(element, index))
                .collect();
            let index = names.iter().position(|name| name == first);
            let found = index.and_then(|index| Some((index, elements.get_mut(index)?)));
            let Some((index, element)) = found else {
                return Err(no_element(first, &indices.join("."), elements, &names));
            };
            indices.push(index.to_string());
            set(element, rest, value, indices)
        }
        _ => Err(format!("{first:?} is below a value that is not a table")),
    }
}

/// Returns the message that the list `key` has no element `name`, only the elements `names`.
fn no_element(name: &str, key: &str, elements: &[Value], names: &[String]) -> String {
    // An element without a name is added with the whole list.
    if name.parse::<usize>().is_ok() && elements.iter().all(|element| element.get("name").is_none())
    {
        let list = Value::Array(elements.to_vec());
        return format!(
            "there is no {name:?}, only {}: to add one, set the whole list, now {key}={list}",
            names.join(", ")
        );
    }
    match nearest_name(name, names.iter().map(String::as_str)) {
        Some(meant) => format!("there is no {name:?}, did you mean {meant}"),
        None => format!("there is no {name:?}, only {}", names.join(", ")),
    }
}
