//! The CPU body of appending to the cache.

use crate::error::{Result, check_len, ensure};
use crate::rope::QkvShape;
use crate::scalar::Element;

pub(crate) fn append<T: Element>(
    shape: &QkvShape,
    first_position: usize,
    qkv: &[T],
    keys: &mut [T],
    values: &mut [T],
) -> Result<()> {
    const OPERATOR: &str = "key_value_append";
    shape.check(OPERATOR)?;
    check_len(OPERATOR, "qkv", qkv.len(), shape.tokens() * shape.row())?;
    ensure(OPERATOR, shape.batch == 1, || {
        format!("{} sequences for the cache of one", shape.batch)
    })?;
    let width = shape.kv_heads * shape.head_dim;
    let end = first_position.saturating_add(shape.length).saturating_mul(width);
    ensure(OPERATOR, keys.len() >= end && values.len() >= end, || {
        format!("a cache of {} tokens is full", keys.len().min(values.len()) / width)
    })?;
    let part = first_position * width..end;
    let first = shape.heads * shape.head_dim;
    let rows = qkv
        .chunks_exact(shape.row())
        .zip(keys[part.clone()].chunks_exact_mut(width))
        .zip(values[part].chunks_exact_mut(width));
    for ((row, key), value) in rows {
        key.copy_from_slice(&row[first..first + width]);
        value.copy_from_slice(&row[first + width..]);
    }
    Ok(())
}
