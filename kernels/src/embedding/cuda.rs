//! The embedding on a GPU.

use bytemuck::{Pod, Zeroable};

use super::check;
use crate::cuda::{Cuda, CudaView, CudaViewMut, name};
use crate::error::Result;
use crate::scalar::Element;

/// `Parameters` of embedding.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Parameters {
    ids: u64,
    table: u64,
    rows: u64,
    tokens: u64,
    width: u64,
    vocab_size: u64,
}

pub(crate) fn forward<T: Element>(
    cuda: &Cuda,
    width: usize,
    ids: CudaView<'_, u32>,
    table: CudaView<'_, T>,
    out: CudaViewMut<'_, T>,
) -> Result<()> {
    let vocab_size = check("embedding_forward", width, ids.len, table.len, ("out", out.len))?;
    let parameters = Parameters {
        ids: ids.address,
        table: table.address,
        rows: out.address,
        tokens: ids.len as u64,
        width: width as u64,
        vocab_size: vocab_size as u64,
    };
    cuda.launch(&name::<T>("embedding_forward"), [ids.len, 1], 0, &parameters)
}

pub(crate) fn backward<T: Element, G: Element>(
    cuda: &Cuda,
    width: usize,
    ids: CudaView<'_, u32>,
    d_out: CudaView<'_, T>,
    d_table: CudaViewMut<'_, G>,
) -> Result<()> {
    let gradient = ("d_out", d_out.len);
    let vocab_size = check("embedding_backward", width, ids.len, d_table.len, gradient)?;
    let parameters = Parameters {
        ids: ids.address,
        table: d_table.address,
        rows: d_out.address,
        tokens: ids.len as u64,
        width: width as u64,
        vocab_size: vocab_size as u64,
    };
    let kernel = name::<G>(&name::<T>("embedding_backward"));
    cuda.launch(&kernel, [ids.len, 1], 0, &parameters)
}
