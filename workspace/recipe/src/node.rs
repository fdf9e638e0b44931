//! A value of a TOML table with its path (stages by name), as serde's deserializer. It accepts whole floats such as
//! `1e9` as integers.
//!
//! A value that is missing or cannot be read has a stand-in. The stand-in answers every request with some valid value,
//! so that reading continues to the next fault (`reader.rs`). It records the keys that are requested from it.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, Error, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;
use toml::{Table, Value};

use super::nearest::ANY;
use super::problem::{Problem, join, one_of};
use super::reader::{KnownKeys, element_name};

/// The name of a newtype struct of a list of tables. A single table may be given without the list.
pub(super) const TABLE_OR_LIST: &str = "TableOrList";

/// Integers up to this are exact as floats.
const MAX_WHOLE_FLOAT: f64 = (1u64 << 53) as f64;

/// A key that its struct does not have.
pub(super) struct UnknownKey {
    pub(super) key: String,
    /// The keys of the struct.
    pub(super) siblings: &'static [&'static str],
}

/// The keys that a reading has met.
#[derive(Default)]
pub(super) struct Found {
    /// Keys of tables that their structs do not have.
    pub(super) unknown: Vec<UnknownKey>,
    /// Keys that were requested from stand-ins.
    pub(super) known: KnownKeys,
}

/// The state that the values of one reading share.
pub(super) struct Context<'p> {
    /// The paths of stand-ins.
    stand_ins: &'p BTreeSet<String>,
    found: RefCell<Found>,
}

impl<'p> Context<'p> {
    pub(super) fn new(stand_ins: &'p BTreeSet<String>) -> Self {
        Context { stand_ins, found: RefCell::default() }
    }

    pub(super) fn into_found(self) -> Found {
        self.found.into_inner()
    }
}

/// A value with its path.
pub(super) struct Node<'de, 'p> {
    /// `None` for a stand-in.
    value: Option<&'de Value>,
    path: String,
    context: &'p Context<'p>,
}

impl<'de, 'p> Node<'de, 'p> {
    /// Returns the outermost value.
    pub(super) fn root(value: Option<&'de Value>, context: &'p Context<'p>) -> Self {
        Node { value, path: String::new(), context }
    }

    /// Returns an entry of this table or an element of this list.
    fn child(&self, key: &str, value: Option<&'de Value>) -> Self {
        let path = join(&self.path, key);
        let value = value.filter(|_| !self.context.stand_ins.contains(&path));
        Node { value, path, context: self.context }
    }

    /// Returns the entries of `table`, or only the fields `known`, with stand-ins for missing keys.
    fn entries(&self, table: &'de Table, known: Option<&[&str]>) -> Vec<(String, Self)> {
        let is_known = |key: &str| known.is_none_or(|known| known.contains(&key));
        let missing = self.context.stand_ins.iter().filter_map(|path| {
            let (parent, key) = path.rsplit_once('.').unwrap_or(("", path));
            (parent == self.path && !table.contains_key(key)).then_some((key, None))
        });
        let given = table.iter().map(|(key, value)| (key.as_str(), Some(value)));
        given
            .filter(|(key, _)| is_known(key))
            .chain(missing)
            .map(|(key, value)| (key.to_owned(), self.child(key, value)))
            .collect()
    }

    fn elements(&self, values: &'de [Value]) -> Vec<Self> {
        let values = values.iter().enumerate();
        values.map(|(index, value)| self.child(&element_name(value, index), Some(value))).collect()
    }

    fn refuse<T>(&self, found: &Value, expected: &str) -> Result<T, Problem> {
        let date = found.as_datetime().map(|date| format!("the date {date}")).unwrap_or_default();
        let found = match found {
            Value::String(text) => Unexpected::Str(text),
            Value::Integer(number) => Unexpected::Signed(*number),
            Value::Float(number) => Unexpected::Float(*number),
            Value::Boolean(flag) => Unexpected::Bool(*flag),
            Value::Datetime(_) => Unexpected::Other(&date),
            Value::Array(_) => Unexpected::Seq,
            Value::Table(_) => Unexpected::Map,
        };
        Err(Problem::invalid_type(found, &expected).at(&self.path))
    }

    fn visit_unsigned<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        let is_whole = |number: f64| number >= 0.0 && number.fract() == 0.0;
        let number = match self.value {
            None => 1,
            Some(&Value::Integer(number)) if number >= 0 => number as u64,
            Some(&Value::Float(number)) if is_whole(number) && number <= MAX_WHOLE_FLOAT => {
                number as u64
            }
            Some(found @ &Value::Float(number)) if is_whole(number) => {
                let most =
                    format!("a whole number of at most {MAX_WHOLE_FLOAT} if it has an exponent");
                return self.refuse(found, &most);
            }
            Some(found) => return self.refuse(found, "a whole number from 0"),
        };
        visitor.visit_u64(number).map_err(|problem: Problem| problem.at(&self.path))
    }
}

/// Implements the integer methods, which all accept whole floats.
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
        match self.value {
            None => visitor.visit_i64(1),
            Some(Value::String(text)) => visitor.visit_borrowed_str(text),
            Some(Value::Integer(number)) => visitor.visit_i64(*number),
            Some(Value::Float(number)) => visitor.visit_f64(*number),
            Some(Value::Boolean(flag)) => visitor.visit_bool(*flag),
            Some(date @ Value::Datetime(_)) => self.refuse(date, "no date"),
            Some(Value::Array(values)) => {
                visitor.visit_seq(SeqDeserializer::new(self.elements(values).into_iter()))
            }
            Some(Value::Table(table)) => {
                visitor.visit_map(MapDeserializer::new(self.entries(table, None).into_iter()))
            }
        }
        .map_err(|problem: Problem| problem.at(&self.path))
    }

    unsigned!(deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64);

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.value {
            None => visitor.visit_f64(1.0),
            Some(Value::Integer(number)) => visitor.visit_f64(*number as f64),
            Some(Value::Float(number)) => visitor.visit_f64(*number),
            Some(found) => self.refuse(found, "a number"),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.value {
            None => visitor.visit_bool(false),
            Some(Value::Boolean(flag)) => visitor.visit_bool(*flag),
            Some(found) => self.refuse(found, "true or false"),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.value {
            None => {
                self.context.found.borrow_mut().known.texts.push(self.path);
                visitor.visit_str("x")
            }
            Some(Value::String(text)) => {
                visitor.visit_borrowed_str(text).map_err(|problem: Problem| problem.at(&self.path))
            }
            Some(found) => self.refuse(found, "a text in quotes"),
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
        let variant = match self.value {
            None => variants.first().copied().unwrap_or_default(),
            Some(Value::String(text)) => text,
            Some(found) => return self.refuse(found, &one_of(variants)),
        };
        let visited = visitor.visit_enum(variant.into_deserializer());
        visited.map_err(|problem: Problem| problem.at(&self.path))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Problem> {
        let elements = match self.value {
            _ if name != TABLE_OR_LIST => return visitor.visit_newtype_struct(self),
            Some(Value::Array(values)) => self.elements(values),
            Some(Value::Table(_)) => vec![self],
            // Both forms have known keys.
            None => vec![self.child(ANY, None), self],
            Some(found) => return self.refuse(found, "a table or a list of tables"),
        };
        visitor.visit_newtype_struct(SeqDeserializer::new(elements.into_iter()))
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        let elements = match self.value {
            None => vec![self.child(ANY, None)],
            Some(Value::Array(values)) => self.elements(values),
            Some(found) => return self.refuse(found, "a list"),
        };
        let visited = visitor.visit_seq(SeqDeserializer::new(elements.into_iter()));
        visited.map_err(|problem: Problem| problem.at(&self.path))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        let entries = match self.value {
            None => {
                let field = |key: &&str| (key.to_string(), self.child(key, None));
                let entries: Vec<_> = fields.iter().map(field).collect();
                let keys = entries.iter().map(|(_, value)| value.path.clone());
                self.context.found.borrow_mut().known.all.extend(keys);
                entries
            }
            Some(Value::Table(table)) => {
                for key in table.keys().filter(|key| !fields.contains(&key.as_str())) {
                    let unknown = UnknownKey { key: join(&self.path, key), siblings: fields };
                    self.context.found.borrow_mut().unknown.push(unknown);
                }
                self.entries(table, Some(fields))
            }
            Some(found) => return self.refuse(found, "a table"),
        };
        let visited = visitor.visit_map(MapDeserializer::new(entries.into_iter()));
        visited.map_err(|problem: Problem| problem.at(&self.path))
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 char bytes byte_buf unit unit_struct tuple tuple_struct map
        identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, Problem> for Node<'de, '_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}
