//! The cache of keys and values that generation appends to.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::{Element, Memory, QkvShape, Result, View, ViewMut, check_len, ensure};

/// Arguments of [`KeyValueCache::key_value_append`].
pub struct KeyValueAppend<'a, M: Memory, T: Element> {
    /// Shape of `qkv`.
    pub shape: &'a QkvShape,
    /// The place of each token in the cache, all different: row `r % block_length` of each head of block
    /// `r / block_length`; `[N]`.
    pub rows: View<'a, M, u32>,
    /// Tokens of a block.
    pub block_length: usize,
    /// `[N, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// `[blocks, G, block_length, D]`.
    pub keys: ViewMut<'a, M, T>,
    /// `[blocks, G, block_length, D]`.
    pub values: ViewMut<'a, M, T>,
}

/// Appending to the cache as an operator of a device.
pub trait KeyValueCache: Memory {
    /// Copies the keys and values of new tokens from `qkv` to their rows of the cache. A device does not
    /// check that the rows are within the cache.
    fn key_value_append<T: Element>(&self, args: KeyValueAppend<'_, Self, T>) -> Result<()>;
}

/// Checks the lengths of rows, of queries, keys and values, and of the cache; returns its capacity in
/// tokens.
fn check<M: Memory, T: Element>(
    args: &KeyValueAppend<'_, M, T>,
    rows: usize,
    qkv: usize,
    cache: [usize; 2],
) -> Result<usize> {
    const OPERATOR: &str = "key_value_append";
    let &KeyValueAppend { shape, block_length, .. } = args;
    shape.check(OPERATOR)?;
    check_len(OPERATOR, "rows", rows, shape.tokens())?;
    check_len(OPERATOR, "qkv", qkv, shape.tokens() * shape.row())?;
    let ([keys, values], width) = (cache, shape.kv_heads * shape.head_dim);
    check_len(OPERATOR, "values", values, keys)?;
    let block = block_length * width;
    ensure(OPERATOR, block > 0 && keys.is_multiple_of(block), || {
        format!("a cache of {keys} elements is not of blocks of {block_length} tokens of {width}")
    })?;
    let capacity = keys / width;
    ensure(OPERATOR, rows <= capacity, || format!("{rows} tokens for a cache of {capacity}"))?;
    Ok(capacity)
}
