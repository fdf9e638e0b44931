//! The CPU body of appending to the cache.

use super::{KeyValueAppend, KeyValueCache, check};
use crate::cpu::Cpu;
use crate::error::{Result, ensure};
use crate::scalar::Element;

impl KeyValueCache for Cpu {
    fn key_value_append<T: Element>(&self, args: KeyValueAppend<'_, Self, T>) -> Result<()> {
        let KeyValueAppend { shape, rows, qkv, keys, values } = args;
        let capacity = check(shape, rows.len(), qkv.len(), [keys.len(), values.len()])?;
        let width = shape.kv_heads * shape.head_dim;
        let first = shape.heads * shape.head_dim;
        for (token, &row) in qkv.chunks_exact(shape.row()).zip(rows) {
            let row = row as usize;
            ensure("key_value_append", row < capacity, || {
                format!("row {row} of a cache of {capacity} tokens")
            })?;
            let part = row * width..(row + 1) * width;
            keys[part.clone()].copy_from_slice(&token[first..first + width]);
            values[part].copy_from_slice(&token[first + width..]);
        }
        Ok(())
    }
}
