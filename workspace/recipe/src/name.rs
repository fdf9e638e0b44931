//! Values that are written as one of a few names.

use std::fmt;

use serde::Deserializer;
use serde::de::{EnumAccess, Error, VariantAccess, Visitor};

/// Deserializes one of `names` by `parse`, which accepts all of `names`.
pub(super) fn from_name<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    names: &'static [&'static str],
    parse: fn(&str) -> Option<T>,
) -> Result<T, D::Error> {
    deserializer.deserialize_enum("name", names, Name { names, parse })
}

struct Name<T> {
    names: &'static [&'static str],
    parse: fn(&str) -> Option<T>,
}

impl<'de, T> Visitor<'de> for Name<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<T, A::Error> {
        let (name, variant) = data.variant::<String>()?;
        variant.unit_variant()?;
        (self.parse)(&name).ok_or_else(|| A::Error::unknown_variant(&name, self.names))
    }
}
