//! Launching kernels and matmuls.

use bytemuck::Pod;

use super::{Cuda, Matmul};
use crate::gpu_sizes::MAX_BLOCKS;
use crate::{Element, Result};

/// Threads per block, unless a kernel specifies another number (`operators.cuh`).
pub(crate) const THREADS: usize = 256;

/// Returns the blocks for `count` threads, at most [`MAX_BLOCKS`].
pub(crate) fn blocks(count: usize) -> usize {
    count.div_ceil(THREADS).clamp(1, MAX_BLOCKS)
}

/// Returns the name of a kernel for elements of type `T`.
pub(crate) fn name<T: Element>(kernel: &str) -> String {
    format!("{kernel}_{}", T::ELEMENT.name())
}

impl Cuda {
    /// Runs a matmul, unless its left operand is empty.
    pub(crate) fn matmul(&self, matmul: &Matmul) -> Result<()> {
        if matmul.left.rows == 0 || matmul.left.columns == 0 {
            return Ok(());
        }
        self.device().matmul(matmul, self.algorithms)
    }

    /// Launches a kernel on `grid` blocks; does nothing if a size is 0.
    pub(crate) fn launch<P: Pod>(
        &self,
        kernel: &str,
        grid: [usize; 2],
        shared_bytes: usize,
        parameters: &P,
    ) -> Result<()> {
        let parameters = [bytemuck::bytes_of(parameters)];
        self.launch_with(THREADS, kernel, [grid[0], grid[1], 1], shared_bytes, &parameters)
    }

    /// Launches like [`Cuda::launch`], with `threads` threads per block and with the kernel's structs as bytes.
    pub(crate) fn launch_with(
        &self,
        threads: usize,
        kernel: &str,
        grid: [usize; 3],
        shared_bytes: usize,
        parameters: &[&[u8]],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        // Grids come from shapes of existing buffers, far below 2^32 blocks.
        let grid = grid.map(|size| size as u32);
        self.device().launch(kernel, grid, threads as u32, shared_bytes as u32, parameters)
    }
}
