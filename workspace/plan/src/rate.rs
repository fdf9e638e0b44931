//! Rates of a hardware profile, each with its basis.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The basis of a rate, the most reliable first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// Measured on the machine, with this program or a benchmark.
    Measured,
    /// Published for such a machine by others.
    Published,
    /// Neither: an estimate.
    Assumed,
}

impl Basis {
    /// Returns the word for this basis in profiles and plans.
    pub fn name(self) -> &'static str {
        match self {
            Basis::Measured => "measured",
            Basis::Published => "published",
            Basis::Assumed => "assumed",
        }
    }
}

/// A rate, a time or a share of a hardware profile: `{ value = 675, basis = "measured" }`, or a
/// number alone, which is assumed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// The value, in the key's unit.
    pub value: f64,
    /// The basis of the value.
    pub basis: Basis,
}

impl Rate {
    /// Creates a rate that is an estimate.
    pub fn assumed(value: f64) -> Self {
        Rate { value, basis: Basis::Assumed }
    }
}

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(RateVisitor)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    value: f64,
    basis: Basis,
}

struct RateVisitor;

impl<'de> Visitor<'de> for RateVisitor {
    type Value = Rate;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, or a table such as { value = 675, basis = \"measured\" }")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Rate, E> {
        self.visit_f64(value as f64)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Rate, E> {
        Ok(Rate::assumed(value))
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<Rate, A::Error> {
        let Fields { value, basis } = Fields::deserialize(MapAccessDeserializer::new(table))?;
        Ok(Rate { value, basis })
    }
}
