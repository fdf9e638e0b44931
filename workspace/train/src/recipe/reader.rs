//! Deserializes a recipe from a TOML table, with errors that name the key.
//!
//! serde's own errors name neither the location of a key nor the intended one. This deserializer
//! tracks the path of every value (stages by name), collects all unknown keys with the most similar
//! known key, and accepts whole floats such as `1e9` as integers.

use std::cell::RefCell;
use std::fmt::{self, Display};

use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess,
    Visitor,
};
use serde::forward_to_deserialize_any;
use toml::Value;

/// Integers up to this are exact as floats.
const MAX_WHOLE_FLOAT: f64 = (1u64 << 53) as f64;

/// An invalid key or value, with its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// The full key; empty until the enclosing value is known.
    pub(crate) key: String,
    /// The problem.
    pub(crate) reason: String,
    /// The most similar known key.
    meant: Option<&'static str>,
}

/// Parses TOML.
///
/// # Errors
/// The syntax error, with its line.
pub(crate) fn parse_table(text: &str) -> Result<toml::Table, String> {
    text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| {
            let before = text.get(..span.start).unwrap_or(text);
            before.matches('\n').count() + 1
        });
        format!("line {line}: {}", error.message().trim())
    })
}

/// Reads a `T` from a table.
///
/// # Errors
/// Returns all unknown keys, and the first missing key or invalid value.
pub(crate) fn read<'de, T: Deserialize<'de>>(table: &'de Value) -> Result<T, Vec<Problem>> {
    let unknown = RefCell::new(Vec::new());
    let node = Node { value: table, path: String::new(), unknown: &unknown };
    let result = T::deserialize(node);
    let mut problems = unknown.into_inner();
    match result {
        Ok(value) if problems.is_empty() => return Ok(value),
        Ok(_) => {}
        // A misspelt key is also missing: one message is enough.
        Err(missing) => {
            let is_meant = |problem: &Problem| {
                problem.meant.is_some_and(|meant| {
                    let (parent, _) = split_last(&problem.key);
                    join(parent, meant) == missing.key
                })
            };
            if !problems.iter().any(is_meant) {
                problems.push(missing);
            }
        }
    }
    Err(problems)
}

/// The known key most similar to a misspelt `name`, if any is similar enough.
pub(super) fn closest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Minimum Jaro-Winkler similarity of a useful suggestion.
    const SIMILAR: f64 = 0.75;
    let name = name.to_lowercase();
    let similarity = |candidate: &str| {
        let similarity = strsim::jaro_winkler(&name, candidate);
        // One edit, or a substring: Jaro-Winkler rates short names too low.
        let slip = strsim::damerau_levenshtein(&name, candidate) == 1;
        let part = name.len() > 2 && (candidate.contains(&name) || name.contains(candidate));
        match slip || part {
            true => similarity.max(SIMILAR),
            false => similarity,
        }
    };
    known
        .into_iter()
        .map(|candidate| (similarity(candidate), candidate))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

fn join(parent: &str, key: &str) -> String {
    match parent {
        "" => key.to_string(),
        parent => format!("{parent}.{key}"),
    }
}

fn split_last(key: &str) -> (&str, &str) {
    key.rsplit_once('.').unwrap_or(("", key))
}

impl Problem {
    fn new(reason: String) -> Self {
        Problem { key: String::new(), reason, meant: None }
    }

    fn unknown_key(key: String, known: &'static [&'static str]) -> Self {
        let (_, name) = split_last(&key);
        let meant = closest(name, known.iter().copied());
        let reason = match meant {
            Some(meant) => format!("unknown key, did you mean {meant}"),
            None => format!("unknown key, expected one of {}", known.join(", ")),
        };
        Problem { key, reason, meant }
    }

    /// Sets the problem's path, unless it has one.
    fn at(mut self, path: &str) -> Self {
        if self.key.is_empty() {
            self.key = path.to_string();
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

    fn missing_field(field: &'static str) -> Self {
        Problem { key: String::new(), reason: "missing".to_string(), meant: Some(field) }
    }
}

/// Describes a value in a message.
fn describe(value: &Value) -> String {
    match value {
        Value::String(text) => format!("the text {text:?}"),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(flag) => flag.to_string(),
        Value::Datetime(date) => format!("the date {date}"),
        Value::Array(_) => "a list".to_string(),
        Value::Table(_) => "a table".to_string(),
    }
}

/// A value with its path.
struct Node<'de, 'p> {
    value: &'de Value,
    path: String,
    unknown: &'p RefCell<Vec<Problem>>,
}

impl<'de> Node<'de, '_> {
    fn refuse<T>(&self, expected: &str) -> Result<T, Problem> {
        let reason = format!("must be {expected}, not {}", describe(self.value));
        Err(Problem::new(reason).at(&self.path))
    }

    /// The value as an integer.
    fn whole(&self) -> Option<i64> {
        match *self.value {
            Value::Integer(number) => Some(number),
            Value::Float(number) if number.fract() == 0.0 && number.abs() <= MAX_WHOLE_FLOAT => {
                Some(number as i64)
            }
            _ => None,
        }
    }

    fn visit_unsigned<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.whole().and_then(|number| u64::try_from(number).ok()) {
            Some(number) => {
                visitor.visit_u64(number).map_err(|problem: Problem| problem.at(&self.path))
            }
            None => self.refuse("a whole number from 0"),
        }
    }
}

/// Implements the integer methods, all of which accept whole floats.
macro_rules! unsigned {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
            self.visit_unsigned(visitor)
        }
    )*};
}

impl<'de, 'p> Deserializer<'de> for Node<'de, 'p> {
    type Error = Problem;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        let path = self.path.clone();
        match self.value {
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Integer(number) => visitor.visit_i64(*number),
            Value::Float(number) => visitor.visit_f64(*number),
            Value::Boolean(flag) => visitor.visit_bool(*flag),
            Value::Datetime(_) => return self.refuse("no date"),
            Value::Array(values) => visitor.visit_seq(Elements {
                values: values.iter().enumerate(),
                path: self.path,
                unknown: self.unknown,
            }),
            Value::Table(table) => visitor.visit_map(Entries {
                entries: table.iter(),
                known: None,
                next: None,
                path: self.path,
                unknown: self.unknown,
            }),
        }
        .map_err(|problem| problem.at(&path))
    }

    unsigned!(deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64);

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match *self.value {
            Value::Integer(number) => visitor.visit_f64(number as f64),
            Value::Float(number) => visitor.visit_f64(number),
            _ => self.refuse("a number"),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.value {
            Value::Boolean(flag) => visitor.visit_bool(*flag),
            _ => self.refuse("true or false"),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.value {
            Value::String(text) => {
                visitor.visit_borrowed_str(text).map_err(|problem: Problem| problem.at(&self.path))
            }
            _ => self.refuse("a text in quotes"),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        self.deserialize_str(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        match self.value {
            Value::String(text) => visitor
                .visit_enum(text.as_str().into_deserializer())
                .map_err(|problem: Problem| problem.at(&self.path)),
            _ => {
                let names: Vec<String> = variants.iter().map(|name| format!("{name:?}")).collect();
                self.refuse(&names.join(" or "))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Problem> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.value {
            Value::Array(_) => self.deserialize_any(visitor),
            _ => self.refuse("a list"),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        let Value::Table(table) = self.value else {
            return self.refuse("a table");
        };
        for key in table.keys().filter(|key| !fields.contains(&key.as_str())) {
            let key = join(&self.path, key);
            let problem = Problem::unknown_key(key, fields);
            self.unknown.borrow_mut().push(problem);
        }
        let entries = Entries {
            entries: table.iter(),
            known: Some(fields),
            next: None,
            path: self.path.clone(),
            unknown: self.unknown,
        };
        visitor.visit_map(entries).map_err(|mut problem| {
            if let (true, Some(field)) = (problem.key.is_empty(), problem.meant) {
                problem.key = join(&self.path, field);
            }
            problem.at(&self.path)
        })
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 char bytes byte_buf unit unit_struct tuple tuple_struct map
        identifier ignored_any
    }
}

/// The entries of a table, without the keys that its struct does not know.
struct Entries<'de, 'p> {
    entries: toml::map::Iter<'de, String, Value>,
    known: Option<&'static [&'static str]>,
    next: Option<(&'de str, &'de Value)>,
    path: String,
    unknown: &'p RefCell<Vec<Problem>>,
}

impl<'de> MapAccess<'de> for Entries<'de, '_> {
    type Error = Problem;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Problem> {
        let is_known = |key: &str| self.known.is_none_or(|known| known.contains(&key));
        let Some((key, value)) = self.entries.by_ref().find(|(key, _)| is_known(key)) else {
            return Ok(None);
        };
        self.next = Some((key, value));
        seed.deserialize(de::value::StrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Problem> {
        let Some((key, value)) = self.next.take() else {
            return Err(Problem::new("a value without its key".to_string()));
        };
        let path = join(&self.path, key);
        seed.deserialize(Node { value, path: path.clone(), unknown: self.unknown })
            .map_err(|problem| problem.at(&path))
    }
}

struct Elements<'de, 'p> {
    values: std::iter::Enumerate<std::slice::Iter<'de, Value>>,
    path: String,
    unknown: &'p RefCell<Vec<Problem>>,
}

impl<'de> SeqAccess<'de> for Elements<'de, '_> {
    type Error = Problem;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Problem> {
        let Some((index, value)) = self.values.next() else {
            return Ok(None);
        };
        let name = element_name(value, index);
        let node = Node { value, path: join(&self.path, &name), unknown: self.unknown };
        seed.deserialize(node).map(Some)
    }
}

/// The path component of a list's element: its name if it has one, or else its index from 0.
pub(crate) fn element_name(value: &Value, index: usize) -> String {
    match value.get("name").and_then(Value::as_str) {
        Some(name) if !name.is_empty() => name.to_string(),
        _ => index.to_string(),
    }
}
