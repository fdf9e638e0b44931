//! Scratch of a GPU, one buffer.

use super::{WorkingSet, Workspace, gpu};
use crate::cross_entropy::HeadShape;
use crate::cuda::Cuda;
use crate::{Element, Result, attention};

impl Workspace for Cuda {
    fn cross_entropy_scratch(&self, shape: &HeadShape) -> usize {
        gpu::cross_entropy_scratch(shape)
    }

    fn cross_entropy_sums(&self, shape: &HeadShape, ranks: usize) -> usize {
        gpu::cross_entropy_sums(shape, ranks)
    }

    fn reserve<T: Element>(&self, passes: &WorkingSet) -> Result<()> {
        let WorkingSet { attention, routed, .. } = passes;
        let backward = attention::cuda::backward_scratch_bytes::<T>(self, attention, *routed);
        self.scratch(gpu::scratch_bytes(passes, backward))?;
        self.counter()?;
        Ok(())
    }
}
