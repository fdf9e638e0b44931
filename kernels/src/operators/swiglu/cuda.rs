//! SwiGLU on a GPU.

use super::{Swiglu, check};
use crate::cuda::parameters::swiglu::Parameters;
use crate::cuda::{Cuda, CudaView, CudaViewMut, name};
use crate::{Element, Result};

impl Swiglu for Cuda {
    fn swiglu_forward<T: Element>(
        &self,
        width: usize,
        gate_up: CudaView<'_, T>,
        out: CudaViewMut<'_, T>,
    ) -> Result<()> {
        check("swiglu_forward", width, gate_up.len, out.len)?;
        let parameters =
            Parameters { gate_up: gate_up.address, out: out.address, width: width as u64 };
        self.launch(&name::<T>("swiglu_forward"), [out.len / width, 1], 0, &parameters)
    }

    fn swiglu_backward<T: Element>(
        &self,
        width: usize,
        gate_up: CudaViewMut<'_, T>,
        out: CudaViewMut<'_, T>,
    ) -> Result<()> {
        check("swiglu_backward", width, gate_up.len, out.len)?;
        let parameters =
            Parameters { gate_up: gate_up.address, out: out.address, width: width as u64 };
        self.launch(&name::<T>("swiglu_backward"), [out.len / width, 1], 0, &parameters)
    }
}
