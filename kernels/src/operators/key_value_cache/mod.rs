//! The cache of keys and values that generation appends to.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::error::{Result, check_len, ensure};
use crate::memory::{Memory, View, ViewMut};
use crate::rope::QkvShape;
use crate::scalar::Element;

/// Arguments of [`KeyValueCache::key_value_append`].
pub struct KeyValueAppend<'a, M: Memory, T: Element> {
    /// Shape of `qkv`.
    pub shape: &'a QkvShape,
    /// The row of the cache for each token, none twice; `[N]`.
    pub rows: View<'a, M, u32>,
    /// `[N, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// `[capacity, G D]`.
    pub keys: ViewMut<'a, M, T>,
    /// `[capacity, G D]`.
    pub values: ViewMut<'a, M, T>,
}

/// Appending to the cache as an operator of a device.
pub trait KeyValueCache: Memory {
    /// Copies the keys and values of new tokens from `qkv` to their rows of the cache. A device does not
    /// check that these are within the cache.
    fn key_value_append<T: Element>(&self, args: KeyValueAppend<'_, Self, T>) -> Result<()>;
}

/// Checks the lengths of rows, of queries, keys and values, and of the cache; returns its capacity in
/// tokens.
fn check(shape: &QkvShape, rows: usize, qkv: usize, cache: [usize; 2]) -> Result<usize> {
    const OPERATOR: &str = "key_value_append";
    shape.check(OPERATOR)?;
    check_len(OPERATOR, "rows", rows, shape.tokens())?;
    check_len(OPERATOR, "qkv", qkv, shape.tokens() * shape.row())?;
    let ([keys, values], width) = (cache, shape.kv_heads * shape.head_dim);
    check_len(OPERATOR, "values", values, keys)?;
    ensure(OPERATOR, keys.is_multiple_of(width), || {
        format!("a cache of {keys} elements is not of rows of {width}")
    })?;
    let capacity = keys / width;
    ensure(OPERATOR, rows <= capacity, || format!("{rows} tokens for a cache of {capacity}"))?;
    Ok(capacity)
}
