//! Appending to the cache on a GPU.

use bytemuck::{Pod, Zeroable};

use super::check;
use crate::cuda::{Cuda, CudaView, CudaViewMut, name};
use crate::error::Result;
use crate::rope::QkvShape;
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

pub(crate) fn append<T: Element>(
    cuda: &Cuda,
    shape: &QkvShape,
    first_position: usize,
    qkv: CudaView<'_, T>,
    keys: CudaViewMut<'_, T>,
    values: CudaViewMut<'_, T>,
) -> Result<()> {
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
    cuda.launch(&name::<T>("key_value_append"), [shape.length, 1], 0, &parameters)
}
