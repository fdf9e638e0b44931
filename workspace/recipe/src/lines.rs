//! The lines of a TOML file on which its keys are set, for messages.

use std::collections::BTreeMap;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::join;

/// Depth of the deepest key that is looked up. Keys of recipes are shallower.
const MAX_DEPTH: usize = 16;

/// The line of every key of a file. Elements of lists are found by index and, if they have a name, by name.
#[derive(Debug, Default)]
pub struct Lines(BTreeMap<String, usize>);

impl Lines {
    /// Returns the lines of `text`; empty if it is not TOML.
    pub fn new(text: &str) -> Self {
        let mut lines = Lines::default();
        if let Ok(table) = DeTable::parse(text) {
            let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
            let line = |at: usize| ends.partition_point(|&end| end < at) + 1;
            lines.add_below("", &DeValue::Table(table.into_inner()), &line, MAX_DEPTH);
        }
        lines
    }

    /// Returns whether the file has `key`.
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Returns the line, from 1, of `key`, or else of the innermost table around it that the file has.
    pub fn line(&self, key: &str) -> Option<usize> {
        let mut key = key;
        loop {
            if let Some(line) = self.0.get(key) {
                return Some(*line);
            }
            key = key.rsplit_once('.')?.0;
        }
    }

    /// Adds the keys below the value at `path`.
    fn add_below(
        &mut self,
        path: &str,
        value: &DeValue<'_>,
        line: &dyn Fn(usize) -> usize,
        depth: usize,
    ) {
        let Some(depth) = depth.checked_sub(1) else { return };
        let mut add = |key: &str, at: Range<usize>, value: &Spanned<DeValue<'_>>| {
            let path = join(path, key);
            self.0.insert(path.clone(), line(at.start));
            self.add_below(&path, value.get_ref(), line, depth);
        };
        match value {
            DeValue::Table(table) => {
                table.iter().for_each(|(key, value)| add(key.get_ref(), key.span(), value));
            }
            DeValue::Array(elements) => {
                for (index, element) in elements.iter().enumerate() {
                    add(&index.to_string(), element.span(), element);
                    if let Some(name) = name_of(element).filter(|name| !name.is_empty()) {
                        add(name, element.span(), element);
                    }
                }
            }
            _ => {}
        }
    }
}

fn name_of<'a>(element: &'a Spanned<DeValue<'_>>) -> Option<&'a str> {
    element.get_ref().get("name")?.get_ref().as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_in_tables_lists_and_inline_tables() {
        let text = "a.b = 1\n[run]\n  dir = \"x\" # y\n\n[[stage]]\nname = \"one\"\nmoh = { k = 1 }\n\
                    [[stage]]\nrate = { max = 1 }\n[list]\nitems = [\n  { path = \"p\" },\n  3,\n]\n";
        let lines = Lines::new(text);
        for (key, line) in [
            ("a.b", 1),
            ("run", 2),
            ("run.dir", 3),
            ("run.seed", 2),
            ("stage.one.name", 6),
            ("stage.one.moh.k", 7),
            ("stage.one.tokens", 5),
            ("stage.0.moh", 7),
            ("stage.1.rate.max", 9),
            ("stage.1.name", 8),
            ("list.items.0.path", 12),
            ("list.items.1", 13),
        ] {
            assert_eq!(lines.line(key), Some(line), "{key}");
        }
        assert_eq!(lines.line("model"), None);
        assert_eq!(Lines::new("a = = 1").line("a"), None);
        Lines::new(&format!("{}b = 1", "a.".repeat(70))).line("a");
    }
}
