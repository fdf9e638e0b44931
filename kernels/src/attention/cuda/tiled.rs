//! Attention on tensor cores (tiled.cu).

use super::packed::Packed;
use super::{Addresses, Problem};
use crate::cuda::Cuda;
use crate::error::Result;
use crate::scalar::{DType, Element};

/// Widths of a head that kernels are compiled for; narrower heads are padded with zeros.
const WIDTHS: [usize; 4] = [32, 64, 96, 128];

/// A kernel's launch geometry, as tiled.cuh lists it.
struct Tiling {
    kernel: &'static str,
    threads: usize,
    /// Packed rows, or keys, of a block.
    rows: usize,
    /// Rows of all tiles in shared memory, and bytes beside them.
    tile_rows: usize,
    other_bytes: usize,
}

const FORWARD: Tiling = Tiling {
    kernel: "attention_forward",
    threads: 128,
    rows: 128,
    tile_rows: 256,
    other_bytes: 4 * 128 * 4,
};
const DQ: Tiling = Tiling {
    kernel: "attention_backward_dq",
    threads: 256,
    rows: 128,
    tile_rows: 256,
    other_bytes: 4 * 128 * 4,
};
const DKDV: Tiling = Tiling {
    kernel: "attention_backward_dkdv",
    threads: 256,
    rows: 128,
    tile_rows: 512,
    other_bytes: 2 * 6 * 64 * 4,
};

impl Tiling {
    fn shared_bytes(&self, width: usize) -> usize {
        self.tile_rows * width * 2 + self.other_bytes
    }
}

/// The width that heads of `head_dim` numbers are padded to.
fn width(head_dim: usize) -> Option<usize> {
    WIDTHS.into_iter().find(|&width| head_dim <= width)
}

/// Whether these kernels take the problem: bf16, an even head_dim of at most 128, pairs of numbers
/// that start at whole words, and indices into a sequence that fit 32 bits.
pub(super) fn takes<T: Element>(cuda: &Cuda, problem: &Problem<'_>, at: &Addresses) -> bool {
    let shape = &problem.shape;
    let Some(width) = width(shape.head_dim) else { return false };
    T::DTYPE == DType::BF16
        && at.are_multiples_of(shape, 2)
        && at.fit_32_bits(shape)
        && DKDV.shared_bytes(width) <= cuda.device().most_shared_bytes()
}

/// Runs a kernel with a block for every tile of `count` rows of each key/value head.
fn run_tiles(packed: &Packed<'_>, tiling: &Tiling, count: usize) -> Result<()> {
    let shape = &packed.problem.shape;
    // `takes` found one; the widest serves the empty case.
    let width = width(shape.head_dim).unwrap_or(WIDTHS[3]);
    let grid = [count.div_ceil(tiling.rows), shape.kv_heads, shape.batch];
    let kernel = format!("{}_d{width}", tiling.kernel);
    packed.run(tiling.threads, &kernel, grid, tiling.shared_bytes(width))
}

pub(super) fn forward(
    cuda: &Cuda,
    problem: &Problem<'_>,
    at: &Addresses,
    scratch: u64,
) -> Result<()> {
    let shape = &problem.shape;
    let packed = Packed::new(cuda, problem, at, scratch)?;
    packed.run_routed_pairs("attention_clear")?;
    run_tiles(&packed, &FORWARD, shape.query_length * shape.group_size())
}

pub(super) fn backward(
    cuda: &Cuda,
    problem: &Problem<'_>,
    at: &Addresses,
    scratch: u64,
) -> Result<()> {
    let shape = &problem.shape;
    let packed = Packed::new(cuda, problem, at, scratch)?;
    packed.run_pairs("attention_backward_delta", shape.tokens() * shape.heads)?;
    run_tiles(&packed, &DQ, shape.query_length * shape.group_size())?;
    run_tiles(&packed, &DKDV, shape.key_length)
}
