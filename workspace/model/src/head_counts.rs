//! Head counts that may differ by layer: `moh_shared_heads` and `moh_routed_top_k`, and values derived from them.
//!
//! Files and recipes write an integer if all layers have the same count, otherwise a list with one integer for each
//! layer.

use std::fmt;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

/// Integers up to this limit are exact as floats.
const MAX_WHOLE_FLOAT: f64 = (1u64 << 53) as f64;

/// A head count for every layer. A list of equal counts equals a single count, and is written as an integer.
///
/// ```
/// use moh_model::HeadCounts;
///
/// let counts = HeadCounts::Each(vec![8, 16, 16]);
/// assert_eq!(counts.of_layer(1), 16);
/// assert_eq!(counts.uniform(), None);
/// assert_eq!(HeadCounts::Each(vec![4, 4]), HeadCounts::All(4));
/// ```
#[derive(Debug, Clone)]
pub enum HeadCounts {
    /// The same count in all layers.
    All(usize),
    /// One count for each layer.
    Each(Vec<usize>),
}

impl HeadCounts {
    /// Returns the count of layer `layer`, from 0. A list that is too short, which
    /// [`MohConfig::validate`](crate::MohConfig::validate) rejects, gives 0.
    pub fn of_layer(&self, layer: usize) -> usize {
        match self {
            HeadCounts::All(count) => *count,
            HeadCounts::Each(counts) => counts.get(layer).copied().unwrap_or(0),
        }
    }

    /// Returns a single count, or one count for each layer.
    fn counts(&self) -> &[usize] {
        match self {
            HeadCounts::All(count) => std::slice::from_ref(count),
            HeadCounts::Each(counts) => counts,
        }
    }

    /// Returns the count of all layers; `None` if layers differ or the list is empty.
    pub fn uniform(&self) -> Option<usize> {
        let first = *self.counts().first()?;
        self.counts().iter().all(|&count| count == first).then_some(first)
    }

    /// Applies `change` to every count.
    pub fn map(&self, change: impl Fn(usize) -> usize) -> Self {
        match self {
            HeadCounts::All(count) => HeadCounts::All(change(*count)),
            HeadCounts::Each(counts) => {
                HeadCounts::Each(counts.iter().map(|&count| change(count)).collect())
            }
        }
    }

    /// Returns the smallest count; 0 for an empty list.
    pub fn least(&self) -> usize {
        self.counts().iter().copied().min().unwrap_or(0)
    }

    /// Returns the largest count; 0 for an empty list.
    pub fn most(&self) -> usize {
        self.counts().iter().copied().max().unwrap_or(0)
    }
}

impl From<usize> for HeadCounts {
    fn from(count: usize) -> Self {
        HeadCounts::All(count)
    }
}

impl FromIterator<usize> for HeadCounts {
    fn from_iter<I: IntoIterator<Item = usize>>(counts: I) -> Self {
        HeadCounts::Each(counts.into_iter().collect())
    }
}

impl PartialEq for HeadCounts {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (HeadCounts::Each(a), HeadCounts::Each(b)) if a == b => true,
            _ => self.uniform().is_some() && self.uniform() == other.uniform(),
        }
    }
}

impl Eq for HeadCounts {}

/// Shows the count, or the smallest and the largest count: `8`, `4-8`.
impl fmt::Display for HeadCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.least(), self.most()) {
            (least, most) if least == most => write!(f, "{least}"),
            (least, most) => write!(f, "{least}-{most}"),
        }
    }
}

impl Serialize for HeadCounts {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            HeadCounts::Each(counts) if self.uniform().is_none() => counts.serialize(to),
            _ => self.of_layer(0).serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for HeadCounts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(CountsVisitor)
    }
}

struct CountsVisitor;

impl CountsVisitor {
    fn refuse<T, E: de::Error>(&self, found: de::Unexpected<'_>) -> Result<T, E> {
        Err(E::invalid_value(found, self))
    }
}

impl<'de> Visitor<'de> for CountsVisitor {
    type Value = HeadCounts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number from 0, or a list of one for each layer")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<HeadCounts, E> {
        match usize::try_from(number) {
            Ok(count) => Ok(HeadCounts::All(count)),
            Err(_) => self.refuse(de::Unexpected::Unsigned(number)),
        }
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<HeadCounts, E> {
        match usize::try_from(number) {
            Ok(count) => Ok(HeadCounts::All(count)),
            Err(_) => self.refuse(de::Unexpected::Signed(number)),
        }
    }

    /// Accepts whole floats, as recipes do for all integers.
    fn visit_f64<E: de::Error>(self, number: f64) -> Result<HeadCounts, E> {
        match number {
            whole if whole.fract() == 0.0 && (0.0..=MAX_WHOLE_FLOAT).contains(&whole) => {
                self.visit_u64(whole as u64)
            }
            _ => self.refuse(de::Unexpected::Float(number)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<HeadCounts, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(list)).map(HeadCounts::Each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn counts(list: &[usize]) -> HeadCounts {
        list.iter().copied().collect()
    }

    #[test]
    fn equal_numbers_are_one_number() {
        assert_eq!(counts(&[4, 4, 4]), HeadCounts::All(4));
        assert_eq!(serde_json::to_value(counts(&[4, 4, 4])).unwrap(), json!(4));
        assert_ne!(counts(&[4, 4, 2]), HeadCounts::All(4));
        assert_ne!(counts(&[4, 2]), counts(&[2, 4]));
        assert_ne!(counts(&[]), HeadCounts::All(0));
        assert_eq!(counts(&[]), counts(&[]));
    }

    #[test]
    fn numbers_and_lists_read_back() {
        for (value, expected) in [
            (json!(4), HeadCounts::All(4)),
            (json!(4.0), HeadCounts::All(4)),
            (json!([8, 4, 0]), counts(&[8, 4, 0])),
            (json!([4, 4]), HeadCounts::All(4)),
        ] {
            let read: HeadCounts = serde_json::from_value(value).unwrap();
            assert_eq!(read, expected);
            let written = serde_json::to_value(&read).unwrap();
            assert_eq!(serde_json::from_value::<HeadCounts>(written).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_no_number_is_refused() {
        for text in ["-1", "1.5", "1e300", "\"4\"", "null", "{}", "[-1]", "[[4]]", "[4, \"4\"]"] {
            assert!(serde_json::from_str::<HeadCounts>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_are_shown_as_one_or_as_a_range() {
        assert_eq!(HeadCounts::All(8).to_string(), "8");
        assert_eq!(counts(&[8, 4, 6]).to_string(), "4-8");
        assert_eq!(counts(&[6, 6]).to_string(), "6");
    }
}
