//! The wanted fields of a JSON object. The others are checked and skipped, and a wanted one is borrowed as
//! it is written: nothing is built.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::{Fields, MAX_SHOWN_KEYS, Node, Nouns, Slots, Value};

impl Fields {
    /// The text of an object of JSON; `slots` are overwritten.
    pub(crate) fn of_json<'a>(
        &'a self,
        object: &'a str,
        nouns: Nouns,
        slots: &mut Slots<'a>,
    ) -> Result<Cow<'a, str>, String> {
        slots.fill(None);
        if read_object(&self.tree, object, slots).is_err() {
            return Err(fault(object, nouns));
        }
        self.text(slots, nouns, || keys(object))
    }
}

fn read_object<'a>(
    node: &Node,
    object: &'a str,
    slots: &mut Slots<'a>,
) -> Result<(), serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_str(object);
    reader.deserialize_map(ObjectVisitor { node, slots })?;
    reader.end()
}

struct ObjectVisitor<'n, 's, 'a> {
    node: &'n Node,
    slots: &'s mut Slots<'a>,
}

impl<'a> Visitor<'a> for ObjectVisitor<'_, '_, 'a> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<M: MapAccess<'a>>(self, mut map: M) -> Result<(), M::Error> {
        while let Some(found) = map.next_key_seed(Key(self.node))? {
            let Some(node) = found else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let raw = map.next_value::<&'a RawValue>()?.get();
            node.clear(self.slots);
            if let Some(slot) = node.slot {
                self.slots[slot] = Some(value(raw));
            }
            if !node.keys.is_empty() && raw.starts_with('{') {
                read_object(node, raw, self.slots).map_err(serde::de::Error::custom)?;
            }
        }
        Ok(())
    }
}

/// Compares a key with those that are wanted.
struct Key<'n>(&'n Node);

impl<'de, 'n> DeserializeSeed<'de> for Key<'n> {
    type Value = Option<&'n Node>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Self::Value, D::Error> {
        reader.deserialize_str(self)
    }
}

impl<'n> Visitor<'_> for Key<'n> {
    type Value = Option<&'n Node>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(self.0.keys.iter().find(|(wanted, _)| wanted == key).map(|(_, node)| node))
    }
}

/// The value that `raw` writes.
fn value(raw: &str) -> Value<'_> {
    match raw.as_bytes() {
        [b'"', .., b'"'] => Value::Escaped(raw),
        [b'{' | b'[', ..] => Value::Json(Cow::Borrowed(raw)),
        b"null" => Value::Null,
        _ => Value::Scalar(Cow::Borrowed(raw)),
    }
}

/// Why `object` is not an object of JSON.
fn fault(object: &str, nouns: Nouns) -> String {
    match serde_json::from_str::<IgnoredAny>(object) {
        Ok(_) => format!("expected one JSON object per {}", nouns.record),
        Err(fault) => {
            format!("broken JSON at column {}: {}", fault.column(), reason(&fault))
        }
    }
}

/// What is wrong, without its place: the column is useful, "line 1" is not.
pub(super) fn reason(fault: &serde_json::Error) -> String {
    let text = fault.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

/// The first keys of an object.
fn keys(object: &str) -> Vec<String> {
    struct Keys(Vec<String>);
    impl<'de> Visitor<'de> for Keys {
        type Value = Vec<String>;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("an object")
        }

        fn visit_map<M: MapAccess<'de>>(mut self, mut map: M) -> Result<Vec<String>, M::Error> {
            while let Some((key, _)) = map.next_entry::<String, IgnoredAny>()? {
                if self.0.len() < MAX_SHOWN_KEYS && !self.0.contains(&key) {
                    self.0.push(key);
                }
            }
            Ok(self.0)
        }
    }
    let mut reader = serde_json::Deserializer::from_str(object);
    reader.deserialize_map(Keys(Vec::new())).unwrap_or_default()
}
