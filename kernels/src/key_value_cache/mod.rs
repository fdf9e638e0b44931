//! The cache of keys and values that generation appends to.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use std::ops::Range;

use crate::error::{Result, check_len, ensure};
use crate::rope::QkvShape;

/// Checks the lengths of queries, keys and values and of the cache; returns where in the cache the
/// tokens go.
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
