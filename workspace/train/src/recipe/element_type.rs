//! Element types in recipes: `"f32"` and `"bf16"`.

use std::fmt;

use moh_kernels::ElementType;
use serde::de::{EnumAccess, Error, VariantAccess, Visitor};
use serde::{Deserializer, Serializer};

const NAMES: &[&str] = &[ElementType::F32.name(), ElementType::BF16.name()];

pub(super) fn serialize<S: Serializer>(
    dtype: &ElementType,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<ElementType, D::Error> {
    deserializer.deserialize_enum("ElementType", NAMES, Name)
}

struct Name;

impl<'de> Visitor<'de> for Name {
    type Value = ElementType;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an element type")
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<ElementType, A::Error> {
        let (name, variant) = data.variant::<String>()?;
        variant.unit_variant()?;
        ElementType::from_name(&name).ok_or_else(|| A::Error::unknown_variant(&name, NAMES))
    }
}
