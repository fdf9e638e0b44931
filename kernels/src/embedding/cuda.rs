//! The embedding on a GPU.

use bytemuck::{Pod, Zeroable};

use super::check;
use crate::cuda::{Cuda, CudaView, CudaViewMut, name};
use crate::error::Result;
use crate::ranks::VocabularyRows;
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
    first_row: u64,
    count: u64,
}

pub(crate) fn forward<T: Element>(
    cuda: &Cuda,
    width: usize,
    held: VocabularyRows,
    ids: CudaView<'_, u32>,
    table: CudaView<'_, T>,
    out: CudaViewMut<'_, T>,
) -> Result<()> {
    check("embedding_forward", width, held, ids.len, table.len, ("out", out.len))?;
    let parameters = Parameters {
        ids: ids.address,
        table: table.address,
        rows: out.address,
        tokens: ids.len as u64,
        width: width as u64,
        first_row: held.first as u64,
        count: held.count as u64,
    };
    cuda.launch(&name::<T>("embedding_forward"), [ids.len, 1], 0, &parameters)
}

pub(crate) fn backward<T: Element, G: Element>(
    cuda: &Cuda,
    width: usize,
    held: VocabularyRows,
    ids: CudaView<'_, u32>,
    d_out: CudaView<'_, T>,
    d_table: CudaViewMut<'_, G>,
) -> Result<()> {
    let gradient = ("d_out", d_out.len);
    check("embedding_backward", width, held, ids.len, d_table.len, gradient)?;
    let parameters = Parameters {
        ids: ids.address,
        table: d_table.address,
        rows: d_out.address,
        tokens: ids.len as u64,
        width: width as u64,
        first_row: held.first as u64,
        count: held.count as u64,
    };
    let kernel = name::<G>(&name::<T>("embedding_backward"));
    cuda.launch(&kernel, [ids.len, 1], 0, &parameters)
}
