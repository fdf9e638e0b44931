//! Deserializes a recipe from a TOML table, with errors that name the key.
//!
//! serde's own errors name neither the location of a key nor the intended one, and stop at the
//! first. This deserializer tracks the path of every value (stages by name), collects all faults,
//! suggests the nearest known key, and accepts whole floats such as `1e9` as integers.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess,
    Visitor,
};
use serde::forward_to_deserialize_any;
use toml::Value;

use super::nearest::nearest_path;
use super::problem::{Problem, TABLE_OR_LIST, join};
use super::stand_in::{StandIn, known_keys};

/// Maximum number of faults of each kind that are reported.
const MAX_PROBLEMS: usize = 100;

/// Integers up to this are exact as floats.
const MAX_WHOLE_FLOAT: f64 = (1u64 << 53) as f64;

/// A key that its struct does not have.
struct UnknownKey {
    key: String,
    /// The keys of the struct.
    siblings: &'static [&'static str],
}

/// Parses TOML.
///
/// # Errors
/// The syntax error, with its line.
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
    /// The value; stand-ins replace what could not be read. `None` if there are too many faults.
    pub value: Option<T>,
    /// All faults: unknown keys, missing keys and wrong types.
    pub problems: Vec<Problem>,
    /// The keys whose values are not known: those of stand-ins, and those that were misspelt.
    pub stand_ins: BTreeSet<String>,
}

/// Reads a `T` from a table.
///
/// serde stops at the first fault, so the value is read again, with a stand-in for each faulty one,
/// until nothing more is found.
pub fn read<'de, T: Deserialize<'de>>(table: &'de Value) -> Reading<T> {
    let mut problems: Vec<Problem> = Vec::new();
    let mut stand_ins = BTreeSet::new();
    loop {
        let unknown = RefCell::new(Vec::new());
        let context = Context { stand_ins: &stand_ins, unknown: &unknown };
        let result = T::deserialize(Node { value: table, path: String::new(), context });
        let unknown = unknown.into_inner();
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

/// Adds the unknown keys to the faults, each with the nearest known key; returns these.
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

/// Describes a value in a message.
fn describe(value: &Value) -> String {
    match value {
        Value::String(text) => format!("the text {text:?}"),
        Value::Integer(number) => number.to_string(),
        // With an exponent where that is shorter.
        Value::Float(number) => {
            let (plain, short) = (number.to_string(), format!("{number:e}"));
            if short.len() < plain.len() { short } else { plain }
        }
        Value::Boolean(flag) => flag.to_string(),
        Value::Datetime(date) => format!("the date {date}"),
        Value::Array(_) => "a list".to_string(),
        Value::Table(_) => "a table".to_string(),
    }
}

/// What the values of one reading share.
#[derive(Clone, Copy)]
struct Context<'p> {
    /// Paths whose values are stand-ins.
    stand_ins: &'p BTreeSet<String>,
    /// Receives the unknown keys.
    unknown: &'p RefCell<Vec<UnknownKey>>,
}

impl Context<'_> {
    /// Reads `value`, or a stand-in for it.
    fn read<'de, S: DeserializeSeed<'de>>(
        self,
        seed: S,
        value: Option<&'de Value>,
        path: String,
    ) -> Result<S::Value, Problem> {
        match value.filter(|_| !self.stand_ins.contains(&path)) {
            Some(value) => seed
                .deserialize(Node { value, path: path.clone(), context: self })
                .map_err(|problem| problem.at(&path)),
            None => seed.deserialize(StandIn::VALUE),
        }
    }
}

/// A value with its path.
struct Node<'de, 'p> {
    value: &'de Value,
    path: String,
    context: Context<'p>,
}

impl<'de, 'p> Node<'de, 'p> {
    fn refuse<T>(&self, expected: &str) -> Result<T, Problem> {
        let reason = format!("must be {expected}, not {}", describe(self.value));
        Err(Problem::new(reason).at(&self.path))
    }

    /// The entries of `table`, those of the fields `known` alone.
    fn entries(
        &self,
        table: &'de toml::Table,
        known: Option<&'static [&'static str]>,
    ) -> Entries<'de, 'p> {
        let child = |path: &String| {
            let rest = path.strip_prefix(&self.path)?;
            let name = if self.path.is_empty() { rest } else { rest.strip_prefix('.')? };
            (!name.contains('.') && !table.contains_key(name)).then(|| name.to_string())
        };
        Entries {
            entries: table.iter(),
            known,
            missing: self.context.stand_ins.iter().filter_map(child).collect(),
            next: None,
            path: self.path.clone(),
            context: self.context,
        }
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
            None => match self.value {
                Value::Float(number) if number.fract() == 0.0 && *number > MAX_WHOLE_FLOAT => {
                    let expected = format!(
                        "a whole number of at most {MAX_WHOLE_FLOAT} if it has an exponent"
                    );
                    self.refuse(&expected)
                }
                _ => self.refuse("a whole number from 0"),
            },
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
                context: self.context,
            }),
            Value::Table(table) => visitor.visit_map(self.entries(table, None)),
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
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        let Value::Table(table) = self.value else {
            if name == TABLE_OR_LIST {
                return match self.value {
                    Value::Array(_) => self.deserialize_any(visitor),
                    _ => self.refuse(name),
                };
            }
            return self.refuse("a table");
        };
        for key in table.keys().filter(|key| !fields.contains(&key.as_str())) {
            let unknown = UnknownKey { key: join(&self.path, key), siblings: fields };
            self.context.unknown.borrow_mut().push(unknown);
        }
        visitor
            .visit_map(self.entries(table, Some(fields)))
            .map_err(|problem: Problem| problem.at(&self.path))
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 char bytes byte_buf unit unit_struct tuple tuple_struct map
        identifier ignored_any
    }
}

/// The entries of a table, without the keys that its struct does not know and with stand-ins for
/// those that are missing.
struct Entries<'de, 'p> {
    entries: toml::map::Iter<'de, String, Value>,
    known: Option<&'static [&'static str]>,
    /// Missing keys.
    missing: Vec<String>,
    next: Option<(String, Option<&'de Value>)>,
    path: String,
    context: Context<'p>,
}

impl<'de> MapAccess<'de> for Entries<'de, '_> {
    type Error = Problem;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Problem> {
        let is_known = |key: &str| self.known.is_none_or(|known| known.contains(&key));
        let given = self.entries.by_ref().find(|(key, _)| is_known(key));
        let next = match given {
            Some((key, value)) => Some((key.clone(), Some(value))),
            None => self.missing.pop().map(|key| (key, None)),
        };
        self.next = next;
        let Some((key, _)) = &self.next else { return Ok(None) };
        seed.deserialize(de::value::StrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Problem> {
        let Some((key, value)) = self.next.take() else {
            return Err(Problem::new("a value without its key".to_string()));
        };
        self.context.read(seed, value, join(&self.path, &key))
    }
}

struct Elements<'de, 'p> {
    values: std::iter::Enumerate<std::slice::Iter<'de, Value>>,
    path: String,
    context: Context<'p>,
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
        let path = join(&self.path, &element_name(value, index));
        self.context.read(seed, Some(value), path).map(Some)
    }
}

/// The path component of a list's element: its name if it has one, or else its index from 0.
pub fn element_name(value: &Value, index: usize) -> String {
    match value.get("name").and_then(Value::as_str) {
        Some(name) if !name.is_empty() => name.to_string(),
        _ => index.to_string(),
    }
}
