//! A fault in a recipe as serde's error: the key, what is wrong with it, and what was expected.

use std::fmt::{self, Display};

use serde::de;

/// The name of a struct that may also be given as a list of such structs.
pub(super) const TABLE_OR_LIST: &str = "a table or a list of tables";

/// An invalid key or value, with its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The full key; empty until the enclosing value is known.
    pub key: String,
    /// The problem.
    pub reason: String,
    /// The field that is missing.
    pub(super) missing: Option<&'static str>,
}

/// The key of an entry of the table `parent`, which is empty for the outermost one.
pub(super) fn join(parent: &str, key: &str) -> String {
    match parent {
        "" => key.to_string(),
        parent => format!("{parent}.{key}"),
    }
}

impl Problem {
    pub(super) fn new(reason: String) -> Self {
        Problem { key: String::new(), reason, missing: None }
    }

    /// Sets the problem's path, unless it has one.
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

    fn invalid_type(found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Problem::new(format!("must be {expected}, not {found}"))
    }

    fn invalid_value(found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn unknown_variant(found: &str, expected: &'static [&'static str]) -> Self {
        let expected: Vec<String> = expected.iter().map(|name| format!("{name:?}")).collect();
        Problem::new(format!("must be {}, not {found:?}", expected.join(" or ")))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Problem::new(format!("unknown key {field}, expected one of {}", expected.join(", ")))
    }

    fn missing_field(field: &'static str) -> Self {
        Problem { missing: Some(field), ..Problem::new("missing".to_string()) }
    }
}
