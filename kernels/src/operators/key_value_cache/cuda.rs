//! Appending to the cache on a GPU.

use super::{KeyValueAppend, KeyValueCache, check};
use crate::cuda::parameters::key_value_cache::Append;
use crate::cuda::{Cuda, name};
use crate::error::Result;
use crate::scalar::Element;

impl KeyValueCache for Cuda {
    fn key_value_append<T: Element>(&self, args: KeyValueAppend<'_, Self, T>) -> Result<()> {
        let KeyValueAppend { shape, first_position, qkv, keys, values } = args;
        let part = check(shape, first_position, qkv.len, keys.len.min(values.len))?;
        let offset = (part.start * size_of::<T>()) as u64;
        let parameters = Append {
            qkv: qkv.address,
            keys: keys.address + offset,
            values: values.address + offset,
            row: shape.row() as u64,
            first: (shape.heads * shape.head_dim) as u64,
            width: (shape.kv_heads * shape.head_dim) as u64,
        };
        self.launch(&name::<T>("key_value_append"), [shape.length, 1], 0, &parameters)
    }
}
