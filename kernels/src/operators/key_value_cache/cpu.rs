//! The CPU body of appending to the cache.

use super::{KeyValueAppend, KeyValueCache, check};
use crate::{Cpu, Element, Result, ensure};

impl KeyValueCache for Cpu {
    fn key_value_append<T: Element>(&self, args: KeyValueAppend<'_, Self, T>) -> Result<()> {
        let capacity =
            check(&args, args.rows.len(), args.qkv.len(), [args.keys.len(), args.values.len()])?;
        let KeyValueAppend { shape, rows, block_length, qkv, keys, values } = args;
        let (head_dim, kv_heads) = (shape.head_dim, shape.kv_heads);
        let first = shape.heads * head_dim;
        for (token, &row) in qkv.chunks_exact(shape.row()).zip(rows) {
            let row = row as usize;
            ensure("key_value_append", row < capacity, || {
                format!("row {row} of a cache of {capacity} tokens")
            })?;
            let (block, row) = (row / block_length, row % block_length);
            let (of_keys, of_values) = token[first..].split_at(kv_heads * head_dim);
            let heads = of_keys.chunks_exact(head_dim).zip(of_values.chunks_exact(head_dim));
            for (kv_head, (key, value)) in heads.enumerate() {
                let start = ((block * kv_heads + kv_head) * block_length + row) * head_dim;
                keys[start..start + head_dim].copy_from_slice(key);
                values[start..start + head_dim].copy_from_slice(value);
            }
        }
        Ok(())
    }
}
