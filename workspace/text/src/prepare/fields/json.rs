//! The wanted fields of a JSON object. Other fields are checked and skipped. A wanted field is borrowed as it is
//! written: nothing is allocated for it.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::{Fields, MAX_SHOWN_KEYS, Node, Nouns, Slots, Value};
use crate::numbers::{MARK, finite_json};

impl Fields {
    /// Returns the text of an object of JSON; `slots` are overwritten.
    pub(crate) fn of_json<'a>(
        &'a self,
        object: &'a str,
        nouns: Nouns,
        slots: &mut Slots<'a>,
    ) -> Result<Cow<'a, str>, String> {
        slots.fill(None);
        if read_object(&self.tree, object, slots).is_err() {
            return self.of_json_of_python(object, nouns).map(Cow::Owned);
        }
        self.text(slots, nouns, || keys(object)).map_err(|reason| match list_of_records(object) {
            Some(key) if reason.starts_with("no ") => format!(
                "{reason}; if its list {key:?} has the documents, write them as lines, as in `jq -c '.{key}[]' FILE`"
            ),
            _ => reason,
        })
    }

    /// Returns the text of an object that Python wrote, with NaN or infinities in it.
    fn of_json_of_python(&self, object: &str, nouns: Nouns) -> Result<String, String> {
        let marked = finite_json(object);
        let mut slots = self.slots();
        if matches!(marked, Cow::Borrowed(_))
            || read_object(&self.tree, &marked, &mut slots).is_err()
        {
            return Err(fault(object, nouns));
        }
        let text = self.text(&slots, nouns, || keys(&marked))?.into_owned();
        // Templates of conversations get the numbers.
        match !self.is_chat() && text.contains(MARK) && !object.contains(MARK) {
            true => Err(format!(
                "a field has NaN or Infinity, which are no JSON and no text: write a string, or leave the {} out",
                nouns.record
            )),
            false => Ok(text),
        }
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

/// Compares a key with the wanted keys.
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

fn value(raw: &str) -> Value<'_> {
    match raw.as_bytes() {
        [b'"', .., b'"'] => Value::Escaped(raw),
        [b'{' | b'[', ..] => Value::Json(Cow::Borrowed(raw)),
        b"null" => Value::Null,
        _ => Value::Scalar(Cow::Borrowed(raw)),
    }
}

fn fault(object: &str, nouns: Nouns) -> String {
    match serde_json::from_str::<IgnoredAny>(object) {
        Ok(_) => format!("expected one JSON object per {}", nouns.record),
        Err(fault) => {
            format!("broken JSON at column {}: {}", fault.column(), reason(&fault))
        }
    }
}

/// Returns the reason without its place: the column is useful, "line 1" is not.
pub(super) fn reason(fault: &serde_json::Error) -> String {
    let text = fault.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

/// Returns the first key in a JSON text with a list of objects as its value. Keys of conversations are skipped.
pub(crate) fn list_of_records(text: &str) -> Option<&str> {
    let lists =
        text.match_indices('[').filter(|(at, _)| text[at + 1..].trim_start().starts_with('{'));
    let keys = lists.filter_map(|(at, _)| {
        let before = text[..at].trim_end().strip_suffix(':')?.trim_end().strip_suffix('"')?;
        before.rsplit('"').next()
    });
    keys.into_iter().find(|key| !["messages", "conversations", "tools"].contains(key))
}

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
