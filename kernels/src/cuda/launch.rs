//! Launching kernels and matrix products.

use bytemuck::Pod;

use super::{Cuda, Gemm};
use crate::error::Result;
use crate::gpu_workspace::MOST_BLOCKS;
use crate::scalar::Element;

/// Threads of a block, in every kernel that does not say otherwise (`operators.cuh`).
pub(crate) const THREADS: usize = 256;

/// Asserts the size of a structure that kernels take and the offset of each field; the same numbers
/// stand beside the kernels' structure.
macro_rules! mirrored {
    ($structure:ident, $size:literal, $($field:ident $offset:literal),+ $(,)?) => {
        const _: () = {
            assert!(size_of::<$structure>() == $size);
            $(assert!(std::mem::offset_of!($structure, $field) == $offset);)+
        };
    };
}
pub(crate) use mirrored;

/// Blocks that give `count` threads, at the most [`MOST_BLOCKS`].
pub(crate) fn blocks(count: usize) -> usize {
    count.div_ceil(THREADS).clamp(1, MOST_BLOCKS)
}

/// The name of a kernel for elements of type `T`.
pub(crate) fn name<T: Element>(kernel: &str) -> String {
    format!("{kernel}_{}", T::ELEMENT.name())
}

impl Cuda {
    /// Runs a matrix product.
    pub(crate) fn gemm(&self, gemm: &Gemm) -> Result<()> {
        self.device().gemm(gemm, self.is_deterministic())
    }

    /// Runs a kernel on `grid` blocks; none where one of its sizes is 0.
    pub(crate) fn launch<P: Pod>(
        &self,
        kernel: &str,
        grid: [usize; 2],
        shared_bytes: usize,
        parameters: &P,
    ) -> Result<()> {
        self.launch_blocks_of(THREADS, kernel, [grid[0], grid[1], 1], shared_bytes, parameters)
    }

    /// As [`Cuda::launch`], with blocks of `threads` threads.
    pub(crate) fn launch_blocks_of<P: Pod>(
        &self,
        threads: usize,
        kernel: &str,
        grid: [usize; 3],
        shared_bytes: usize,
        parameters: &P,
    ) -> Result<()> {
        self.launch_with(threads, kernel, grid, shared_bytes, &[bytemuck::bytes_of(parameters)])
    }

    /// As [`Cuda::launch_blocks_of`], for a kernel of several structures, given as their bytes.
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
        // Grids come from shapes whose buffers exist, far below 2^32 blocks.
        let grid = grid.map(|size| size as u32);
        self.device().launch(kernel, grid, threads as u32, shared_bytes as u32, parameters)
    }
}
