//! The CPU body of appending to the cache.

use super::check;
use crate::error::Result;
use crate::rope::QkvShape;
use crate::scalar::Element;

pub(crate) fn append<T: Element>(
    shape: &QkvShape,
    first_position: usize,
    qkv: &[T],
    keys: &mut [T],
    values: &mut [T],
) -> Result<()> {
    let part = check(shape, first_position, qkv.len(), keys.len().min(values.len()))?;
    let width = shape.kv_heads * shape.head_dim;
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
