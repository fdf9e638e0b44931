//! A variant of a recipe as the command line names it: `name:key=value,key=value`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use moh_recipe::{Recipe, fine_name};

use crate::{Error, Result};

/// The prefix of the directory names of shared stages.
pub(super) const SHARED: &str = "shared-";

/// A recipe with some values overridden.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    /// The name, also of the run directory.
    pub name: String,
    /// The overrides, as for `--set`. Without overrides, the variant is the recipe itself.
    pub overrides: Vec<String>,
}

/// Returns the error of a variant; `name` is its name or its text on the command line.
pub(super) fn refuse(name: &str, reason: impl fmt::Display) -> Error {
    Error::Invalid(format!("--variant {name}: {reason}"))
}

impl FromStr for Variant {
    type Err = Error;

    /// Parses `name:key=value,key=value`. Commas between brackets, braces or quotes belong to a value, as in
    /// `stage.moh.moh.shared_heads=[8,4]`.
    fn from_str(text: &str) -> Result<Self> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let name = name.trim();
        if let Err(reason) = fine_name(name) {
            let reason = format!("expected NAME:KEY=VALUE,KEY=VALUE, and the name {reason}");
            return Err(refuse(text, reason));
        }
        if name.to_ascii_lowercase().starts_with(SHARED) {
            let reason = format!("names that begin with {SHARED} are those of shared stages");
            return Err(refuse(name, reason));
        }
        let parts = match rest.trim() {
            "" => Vec::new(),
            rest => split(rest).map_err(|reason| refuse(name, reason))?,
        };
        for part in &parts {
            if part.split_once('=').is_none_or(|(key, _)| key.is_empty()) {
                let reason =
                    format!("{part:?}: expected KEY=VALUE; a list is in brackets, as in KEY=[8,4]");
                return Err(refuse(name, reason));
            }
        }
        let overrides = parts.into_iter().map(str::to_owned).collect();
        Ok(Variant { name: name.to_owned(), overrides })
    }
}

impl Variant {
    /// Loads the recipe at `path`, which is valid with `overrides`, with these overrides and the variant's. Fails as
    /// [`Recipe::load`]; faults name the variant.
    pub(super) fn load(&self, path: &Path, overrides: &[String]) -> Result<Recipe> {
        let overrides: Vec<String> = overrides.iter().chain(&self.overrides).cloned().collect();
        let loaded = Recipe::load(path, &overrides).map_err(|error| match error {
            moh_recipe::Error::Recipe { mut faults } => {
                for fault in &mut faults {
                    fault.origin = match fault.origin.as_str() {
                        "--set" => format!("--variant {}", self.name),
                        origin => format!("--variant {}: {origin}", self.name),
                    };
                }
                moh_recipe::Error::Recipe { faults }
            }
            error => error,
        });
        Ok(loaded?)
    }
}

/// Splits overrides at the commas between them. Brackets, braces and quotes count only at the start of a value or an
/// element: inside a path they are ordinary characters.
fn split(text: &str) -> Result<Vec<&str>, &'static str> {
    let (mut parts, mut start) = (Vec::new(), 0);
    let (mut depth, mut quote, mut before) = (0_u32, None, ' ');
    let mut characters = text.char_indices();
    while let Some((index, c)) = characters.next() {
        let begins = matches!(before, '=' | ',' | '[' | '{');
        match (quote, c) {
            (Some('"'), '\\') => {
                // Skips the escaped character, which may be a quote.
                characters.next();
            }
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') if begins => quote = Some(c),
            (None, '[' | '{') if begins => depth += 1,
            (None, ']' | '}') => depth = depth.saturating_sub(1),
            (None, ',') if depth == 0 => {
                parts.push(text[start..index].trim());
                start = index + 1;
            }
            (None, _) => {}
        }
        if !c.is_whitespace() {
            before = c;
        }
    }
    parts.push(text[start..].trim());
    match (quote, depth) {
        (None, 0) => Ok(parts),
        (Some(_), _) => Err("a quote is not closed"),
        _ => Err("a bracket is not closed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overrides(text: &str) -> Vec<String> {
        text.parse::<Variant>().unwrap().overrides
    }

    fn refusal(text: &str) -> String {
        text.parse::<Variant>().unwrap_err().to_string()
    }

    #[test]
    fn a_variant_has_a_name_and_overrides_and_may_be_the_recipe_itself() {
        let variant: Variant = "half:stage.moh.moh.shared_heads=2, run.seed = 3".parse().unwrap();
        assert_eq!(variant.name, "half");
        assert_eq!(variant.overrides, ["stage.moh.moh.shared_heads=2", "run.seed = 3"]);
        for text in ["base", "base:", " base : "] {
            let base: Variant = text.parse().unwrap();
            assert_eq!((base.name.as_str(), base.overrides.len()), ("base", 0));
        }
    }

    #[test]
    fn commas_in_lists_tables_and_quotes_belong_to_the_value() {
        for value in [
            "a.b=[8,4,4]",
            "a.b=[[1, 2], [3]]",
            "a.b={ x = 1, y = [2,3] }",
            "a.b=\"x,y\"",
            "a.b='x,y'",
            r#"a.b="\",""#,
            r#"a.b=["]", 'x,"', 3]"#,
        ] {
            assert_eq!(overrides(&format!("v:{value},c=1")), [value, "c=1"], "{value}");
            assert_eq!(overrides(&format!("v:c=1,{value}")), ["c=1", value], "{value}");
        }
        // Paths without quotes.
        let paths = ["a.path=data/[1]", "b.path=o'neil", "c.path=x{", "d.path=a:b=c"];
        assert_eq!(overrides(&format!("v:{}", paths.join(","))), paths);
    }

    #[test]
    fn refusals_name_the_variant_and_say_what_was_expected() {
        for (text, name, expected) in [
            ("", "", "expected NAME:KEY=VALUE,KEY=VALUE, and the name must be 1 to 64 letters"),
            ("a/b:c=1", "a/b:c=1", "must be 1 to 64 letters, digits, - and _"),
            ("stage.moh.tokens=1", "stage.moh.tokens=1", "expected NAME:KEY=VALUE"),
            ("..:c=1", "..:c=1", "the first a letter or digit"),
            ("Shared-adapt", "Shared-adapt", "names that begin with shared- are those of"),
            ("v:a=8,4", "v", "\"4\": expected KEY=VALUE; a list is in brackets, as in KEY=[8,4]"),
            ("v:a=1,", "v", "\"\": expected KEY=VALUE"),
            ("v:=1", "v", "\"=1\": expected KEY=VALUE"),
            ("v:a=[1,2", "v", "a bracket is not closed"),
            ("v:a=\"1,2", "v", "a quote is not closed"),
        ] {
            let message = refusal(text);
            assert!(message.starts_with(&format!("--variant {name}: ")), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }
}
