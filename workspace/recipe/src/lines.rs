//! The lines of a TOML file on which its keys are set, for messages.

use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::join;

/// Depth of the deepest key that is looked up; keys of recipes are shallower.
const MAX_DEPTH: usize = 16;

/// The line of every key of a file. Elements of lists are found by index and, if they have one, by
/// name.
#[derive(Debug, Default)]
pub struct Lines(BTreeMap<String, usize>);

impl Lines {
    /// The lines of `text`; none if it is not TOML.
    pub fn new(text: &str) -> Self {
        let mut lines = Lines::default();
        if let Ok(table) = DeTable::parse(text) {
            let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
            let line = |at: usize| ends.partition_point(|&end| end < at) + 1;
            lines.add_table("", table.get_ref(), &line, MAX_DEPTH);
        }
        lines
    }

    /// Whether the file has `key`.
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// The line, from 1, of `key`, or else of the innermost table around it that the file has.
    pub fn line(&self, key: &str) -> Option<usize> {
        let mut key = key;
        loop {
            if let Some(line) = self.0.get(key) {
                return Some(*line);
            }
            key = key.rsplit_once('.')?.0;
        }
    }

    fn add_table(
        &mut self,
        path: &str,
        table: &DeTable<'_>,
        line: &dyn Fn(usize) -> usize,
        depth: usize,
    ) {
        for (name, value) in table.iter() {
            let path = join(path, name.get_ref());
            self.0.insert(path.clone(), line(name.span().start));
            self.add_value(&path, value, line, depth);
        }
    }

    fn add_value(
        &mut self,
        path: &str,
        value: &Spanned<DeValue<'_>>,
        line: &dyn Fn(usize) -> usize,
        depth: usize,
    ) {
        let Some(depth) = depth.checked_sub(1) else { return };
        match value.get_ref() {
            DeValue::Table(table) => self.add_table(path, table, line, depth),
            DeValue::Array(elements) => {
                for (index, element) in elements.iter().enumerate() {
                    let name = name_of(element).unwrap_or_default();
                    for part in [index.to_string(), name].iter().filter(|part| !part.is_empty()) {
                        let path = join(path, part);
                        self.0.insert(path.clone(), line(element.span().start));
                        self.add_value(&path, element, line, depth);
                    }
                }
            }
            _ => {}
        }
    }
}

/// The name of a list's element.
fn name_of(element: &Spanned<DeValue<'_>>) -> Option<String> {
    let DeValue::Table(table) = element.get_ref() else { return None };
    let (_, name) = table.iter().find(|(key, _)| key.get_ref() == "name")?;
    match name.get_ref() {
        DeValue::String(name) => Some(name.to_string()),
        _ => None,
    }
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
