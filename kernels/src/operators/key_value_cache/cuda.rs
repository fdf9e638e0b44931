//! Appending to the cache on a GPU.

use bytemuck::{Pod, Zeroable};

use super::{KeyValueAppend, KeyValueCache, check};
use crate::cuda::{Cuda, mirrored, name};
use crate::error::Result;
use crate::scalar::Element;

/// `Append` of key_value_cache.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Append {
    qkv: u64,
    keys: u64,
    values: u64,
    row: u64,
    first: u64,
    width: u64,
}

mirrored!(Append, 48, qkv 0, keys 8, values 16, row 24, first 32, width 40);

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
