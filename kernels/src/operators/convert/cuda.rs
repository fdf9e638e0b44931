//! The conversion on a GPU.

use super::Convert;
use crate::cuda::parameters::convert::Parameters;
use crate::cuda::{Cuda, CudaView, CudaViewMut, blocks, name};
use crate::{Element, Result, check_len};

impl Convert for Cuda {
    fn convert<X: Element, Y: Element>(
        &self,
        x: CudaView<'_, X>,
        y: CudaViewMut<'_, Y>,
    ) -> Result<()> {
        check_len("convert", "y", y.len, x.len)?;
        if X::DTYPE == Y::DTYPE {
            return self.device().copy(x.address, y.address, x.len * size_of::<X>());
        }
        let parameters = Parameters { x: x.address, y: y.address, count: x.len as u64 };
        // The two element types differ, so the input's type also determines the output's.
        self.launch(&name::<X>("convert"), [blocks(x.len), 1], 0, &parameters)
    }
}
