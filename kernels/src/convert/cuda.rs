//! The conversion on a GPU.

use bytemuck::{Pod, Zeroable};

use crate::cuda::{Cuda, CudaView, CudaViewMut, blocks, name};
use crate::error::{Result, check_len};
use crate::scalar::Element;

/// `Parameters` of convert.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Parameters {
    x: u64,
    y: u64,
    count: u64,
}

pub(crate) fn convert<X: Element, Y: Element>(
    cuda: &Cuda,
    x: CudaView<'_, X>,
    y: CudaViewMut<'_, Y>,
) -> Result<()> {
    check_len("convert", "y", y.len, x.len)?;
    if X::DTYPE == Y::DTYPE {
        return cuda.device().copy(x.address, y.address, x.len * size_of::<X>());
    }
    let parameters = Parameters { x: x.address, y: y.address, count: x.len as u64 };
    // Of two types, the name of the one that is read says all.
    cuda.launch(&name::<X>("convert"), [blocks(x.len), 1], 0, &parameters)
}
