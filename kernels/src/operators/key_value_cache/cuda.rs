//! Appending to the cache on a GPU.

use super::{KeyValueAppend, KeyValueCache, check};
use crate::cuda::parameters::key_value_cache::Append;
use crate::cuda::{Cuda, name};
use crate::{Element, Result};

impl KeyValueCache for Cuda {
    fn key_value_append<T: Element>(&self, args: KeyValueAppend<'_, Self, T>) -> Result<()> {
        check(&args, args.rows.len, args.qkv.len, [args.keys.len, args.values.len])?;
        let KeyValueAppend { shape, rows, block_length, qkv, keys, values } = args;
        let parameters = Append {
            qkv: qkv.address,
            keys: keys.address,
            values: values.address,
            rows: rows.address,
            row: shape.row() as u64,
            first: (shape.heads * shape.head_dim) as u64,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            block_length: block_length as u32,
            padding: 0,
        };
        self.launch(&name::<T>("key_value_append"), [shape.tokens(), 1], 0, &parameters)
    }
}
