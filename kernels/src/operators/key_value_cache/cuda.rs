//! Appending to the cache on a GPU.

use super::{KeyValueAppend, KeyValueCache, check};
use crate::cuda::parameters::key_value_cache::Append;
use crate::cuda::{Cuda, name};
use crate::error::Result;
use crate::scalar::Element;

impl KeyValueCache for Cuda {
    fn key_value_append<T: Element>(&self, args: KeyValueAppend<'_, Self, T>) -> Result<()> {
        let KeyValueAppend { shape, rows, qkv, keys, values } = args;
        check(shape, rows.len, qkv.len, [keys.len, values.len])?;
        let parameters = Append {
            qkv: qkv.address,
            keys: keys.address,
            values: values.address,
            rows: rows.address,
            row: shape.row() as u64,
            first: (shape.heads * shape.head_dim) as u64,
            width: (shape.kv_heads * shape.head_dim) as u64,
        };
        self.launch(&name::<T>("key_value_append"), [shape.tokens(), 1], 0, &parameters)
    }
}
