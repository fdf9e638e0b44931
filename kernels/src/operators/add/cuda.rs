//! The addition on a GPU.

use super::{Add, check};
use crate::cuda::parameters::addition::Parameters;
use crate::cuda::{Cuda, CudaView, CudaViewMut, blocks, name};
use crate::{Element, Result};

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
