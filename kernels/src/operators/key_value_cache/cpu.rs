//! The CPU body of appending to the cache.

use super::{KeyValueAppend, KeyValueCache, check};
use crate::cpu::Cpu;
use crate::error::Result;
use crate::scalar::Element;

impl KeyValueCache for Cpu {
    fn key_value_append<T: Element>(&self, args: KeyValueAppend<'_, Self, T>) -> Result<()> {
        let KeyValueAppend { shape, first_position, qkv, keys, values } = args;
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
}
