//! The addition on a GPU.

use bytemuck::{Pod, Zeroable};

use super::{Add, check};
use crate::cuda::{Cuda, CudaView, CudaViewMut, blocks, mirrored, name};
use crate::error::Result;
use crate::scalar::Element;

/// `Parameters` of add.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Parameters {
    x: u64,
    y: u64,
    out: u64,
    count: u64,
}

mirrored!(Parameters, 32, x 0, y 8, out 16, count 24);

impl Add for Cuda {
    fn add<T: Element>(
        &self,
        x: CudaView<'_, T>,
        y: CudaView<'_, T>,
        out: CudaViewMut<'_, T>,
    ) -> Result<()> {
        check([x.len, y.len, out.len])?;
        let parameters =
            Parameters { x: x.address, y: y.address, out: out.address, count: x.len as u64 };
        self.launch(&name::<T>("add"), [blocks(x.len), 1], 0, &parameters)
    }
}
