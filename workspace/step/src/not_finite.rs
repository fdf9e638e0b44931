//! Numbers of JSON that may not be finite: they are written as null.

use serde::Deserialize;

/// A number; null is NaN. For serde's `deserialize_with`.
///
/// # Errors
/// Fails if the value is neither a number nor null.
pub fn finite_or_nan<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}
