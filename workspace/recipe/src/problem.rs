//! A fault in a recipe as serde's error: the key, the problem and the expected value.

use std::fmt::{self, Display};

use serde::de::{self, Unexpected};

/// An invalid key or value, with its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The full key; empty until the enclosing value is known.
    pub key: String,
    /// The problem.
    pub reason: String,
    pub(super) missing: Option<&'static str>,
}

/// Returns the key of an entry of the table `parent`, which is empty for the outermost table.
pub(super) fn join(parent: &str, key: &str) -> String {
    match parent {
        "" => key.to_string(),
        parent => format!("{parent}.{key}"),
    }
}

/// Returns the `names` in quotes, as alternatives.
pub(super) fn one_of(names: &[&str]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    names.join(" or ")
}

/// Describes a value that was found, in the words of TOML.
fn describe(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Str(text) => format!("the text {text:?}"),
        Unexpected::Signed(number) => number.to_string(),
        Unexpected::Unsigned(number) => number.to_string(),
        // With an exponent where that is shorter.
        Unexpected::Float(number) => {
            let (plain, short) = (number.to_string(), format!("{number:e}"));
            if short.len() < plain.len() { short } else { plain }
        }
        Unexpected::Bool(flag) => flag.to_string(),
        Unexpected::Seq => "a list".to_string(),
        Unexpected::Map => "a table".to_string(),
        other => other.to_string(),
    }
}

impl Problem {
    pub(super) fn new(reason: String) -> Self {
        Problem { key: String::new(), reason, missing: None }
    }

    pub(super) fn at(mut self, path: &str) -> Self {
        if self.key.is_empty() {
            self.key = self.missing.map_or_else(|| path.to_string(), |field| join(path, field));
        }
        self
    }
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.reason)
    }
}

impl std::error::Error for Problem {}

impl de::Error for Problem {
    fn custom<T: Display>(message: T) -> Self {
        Problem::new(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Problem::new(format!("must be {expected}, not {}", describe(found)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn unknown_variant(found: &str, expected: &'static [&'static str]) -> Self {
        Problem::new(format!("must be {}, not {found:?}", one_of(expected)))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Problem::new(format!("unknown key {field}, expected one of {}", expected.join(", ")))
    }

    fn missing_field(field: &'static str) -> Self {
        Problem { missing: Some(field), ..Problem::new("missing".to_string()) }
    }
}
