//! Element types in recipes: `"f32"` and `"bf16"`.

use moh_kernels::ElementType;
use serde::{Deserializer, Serializer};

use super::name::from_name;

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
    from_name(deserializer, NAMES, ElementType::from_name)
}
