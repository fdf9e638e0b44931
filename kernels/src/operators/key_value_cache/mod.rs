//! The cache of keys and values that generation appends to.

mod cpu;
#[cfg(gpu)]
mod cuda;

use std::ops::Range;

use crate::error::{Result, check_len, ensure};
use crate::memory::{Memory, View, ViewMut};
use crate::rope::QkvShape;
use crate::scalar::Element;

/// Arguments of [`KeyValueCache::key_value_append`].
pub struct KeyValueAppend<'a, M: Memory, T: Element> {
    /// Shape of `qkv`, of one sequence.
    pub shape: &'a QkvShape,
    /// Position of the first token, and its row of the cache.
    pub first_position: usize,
    /// `[T, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// `[capacity, G D]`.
    pub keys: ViewMut<'a, M, T>,
    /// `[capacity, G D]`.
    pub values: ViewMut<'a, M, T>,
}

/// Appending to the cache as an operator of a device.
pub trait KeyValueCache: Memory {
    /// Copies the keys and values of one sequence's new tokens from `qkv` to rows
    /// `first_position..` of a contiguous cache.
    fn key_value_append<T: Element>(&self, args: KeyValueAppend<'_, Self, T>) -> Result<()>;
}

/// Checks the lengths of queries, keys and values and of the cache; returns the tokens' range in
/// the cache.
fn check(
    shape: &QkvShape,
    first_position: usize,
    qkv: usize,
    cache: usize,
) -> Result<Range<usize>> {
    const OPERATOR: &str = "key_value_append";
    shape.check(OPERATOR)?;
    check_len(OPERATOR, "qkv", qkv, shape.tokens() * shape.row())?;
    ensure(OPERATOR, shape.batch == 1, || {
        format!("{} sequences for the cache of one", shape.batch)
    })?;
    let width = shape.kv_heads * shape.head_dim;
    let end = first_position.saturating_add(shape.length).saturating_mul(width);
    ensure(OPERATOR, cache >= end, || format!("a cache of {} tokens is full", cache / width))?;
    Ok(first_position * width..end)
}
