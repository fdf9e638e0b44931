//! A deserializer without input: it answers every request with some valid value.
//!
//! A value that cannot be read is replaced by it, so that reading continues to the next fault
//! (`reader.rs`). Recording the fields that are requested gives the tree of known keys, so the
//! structs remain the only schema.

use std::cell::RefCell;

use serde::de::value::StrDeserializer;
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::nearest::ANY;
use super::problem::{Problem, TABLE_OR_LIST, join};

/// The keys that a type can have; elements of lists are [`ANY`].
#[derive(Default)]
pub(super) struct KnownKeys {
    /// The paths of all keys.
    pub(super) all: Vec<String>,
    /// Those of keys whose values are texts.
    texts: Vec<String>,
}

impl KnownKeys {
    /// Whether the value of `key` is a text. A table that may be a list is meant by the key of either.
    pub(super) fn is_text(&self, key: &[&str]) -> bool {
        self.texts.iter().any(|known| {
            let known: Vec<&str> = known.split('.').collect();
            let is_same = known.len() == key.len()
                && known.iter().zip(key).all(|(known, part)| known == part || *known == ANY);
            is_same || known.iter().filter(|part| **part != ANY).eq(key)
        })
    }
}

/// The keys that a `T` can have.
pub(super) fn known_keys<'de, T: Deserialize<'de>>() -> KnownKeys {
    let keys = RefCell::new(KnownKeys::default());
    // Only the keys matter.
    let _ = T::deserialize(StandIn { path: String::new(), keys: Some(&keys) });
    keys.into_inner()
}

/// Answers with a valid value.
#[derive(Clone)]
pub(super) struct StandIn<'k> {
    path: String,
    /// Receives the paths of fields.
    keys: Option<&'k RefCell<KnownKeys>>,
}

impl StandIn<'_> {
    /// A value whose keys do not matter.
    pub(super) const VALUE: StandIn<'static> = StandIn { path: String::new(), keys: None };

    fn below(&self, key: &str) -> Self {
        StandIn { path: join(&self.path, key), keys: self.keys }
    }
}

/// Implements a method by one of the visitor's.
macro_rules! answer {
    ($($method:ident => $visit:ident($value:expr);)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
            visitor.$visit($value)
        }
    )*};
}

impl<'de> Deserializer<'de> for StandIn<'_> {
    type Error = Problem;

    answer! {
        deserialize_any => visit_i64(1);
        deserialize_u8 => visit_u8(1);
        deserialize_u16 => visit_u16(1);
        deserialize_u32 => visit_u32(1);
        deserialize_u64 => visit_u64(1);
        deserialize_f64 => visit_f64(1.0);
        deserialize_bool => visit_bool(false);
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        if let Some(keys) = self.keys {
            keys.borrow_mut().texts.push(self.path);
        }
        visitor.visit_str("x")
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
        visitor.visit_enum(variants.first().copied().unwrap_or_default().into_deserializer())
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
        visitor.visit_seq(OneElement(Some(self.below(ANY))))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        if name == TABLE_OR_LIST {
            if let Some(keys) = self.keys {
                let paths = fields.iter().map(|field| join(&self.path, field));
                keys.borrow_mut().all.extend(paths);
            }
            return visitor.visit_seq(OneElement(Some(self.below(ANY))));
        }
        visitor.visit_map(Fields { fields: fields.iter(), value: None, table: self })
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 char bytes byte_buf unit unit_struct tuple tuple_struct map
        identifier ignored_any
    }
}

/// A list of one element.
struct OneElement<'k>(Option<StandIn<'k>>);

impl<'de> SeqAccess<'de> for OneElement<'_> {
    type Error = Problem;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Problem> {
        self.0.take().map(|element| seed.deserialize(element)).transpose()
    }
}

/// All fields of a struct.
struct Fields<'k> {
    fields: std::slice::Iter<'static, &'static str>,
    value: Option<StandIn<'k>>,
    table: StandIn<'k>,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Problem;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Problem> {
        let Some(field) = self.fields.next() else { return Ok(None) };
        let value = self.table.below(field);
        if let Some(keys) = value.keys {
            keys.borrow_mut().all.push(value.path.clone());
        }
        self.value = Some(value);
        seed.deserialize(StrDeserializer::new(field)).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Problem> {
        seed.deserialize(self.value.take().unwrap_or(StandIn::VALUE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;

    #[test]
    fn the_keys_are_those_of_the_structs() {
        let known = known_keys::<Recipe>();
        let is_text = |key: &str| known.is_text(&key.split('.').collect::<Vec<_>>());
        for key in [
            "run.dir",
            "model.from",
            "data.sources.0.path",
            "data.validation.path",
            "stage.moh.name",
        ] {
            assert!(is_text(key), "{key}");
        }
        for key in ["run", "run.seed", "data.sources", "stage.moh.tokens", "stage.moh", "", "zzz"] {
            assert!(!is_text(key), "{key}");
        }
        let keys = known.all;
        for expected in [
            "run",
            "run.dir",
            "model.new.rope_scaling.factor",
            "model.new.eos_token_id",
            "data.sources.*.weight",
            "data.validation.batches",
            "data.validation.*.batches",
            "stage.*.moh.routed_top_k",
            "stage.*.parallel.virtual_stages",
            "log.tensorboard",
        ] {
            assert!(keys.iter().any(|key| key == expected), "{expected}: {keys:?}");
        }
        // The last field of the last table: nothing stopped before.
        assert_eq!(keys.last().map(String::as_str), Some("guard.rewind"));
    }

    #[test]
    fn a_stand_in_is_a_valid_value() {
        assert!(Recipe::deserialize(StandIn::VALUE).is_ok());
    }
}
