//! Attention on tensor cores (tiled.cu).

use super::Pass;
use super::packed::{PACK_BACKWARD, PACK_FORWARD, Packed};
use crate::cuda::Cuda;
use crate::workspace::gpu::attention::MAX_TILED_HEAD_DIM;
use crate::{DType, Element, Result};

/// Widths of a head with compiled kernels. Narrower heads are padded with zeros.
const WIDTHS: [usize; 4] = [32, 64, 96, MAX_TILED_HEAD_DIM];

/// A kernel's launch geometry (tiled.cuh).
struct Tiling {
    kernel: &'static str,
    /// The part of the kernel's name after the width.
    suffix: &'static str,
    threads: usize,
    /// Packed rows, or keys, per block.
    rows: usize,
    /// Rows of all tiles in shared memory, and the other bytes of shared memory.
    tile_rows: usize,
    other_bytes: usize,
}

const FORWARD: Tiling = Tiling {
    kernel: "attention_forward",
    suffix: "",
    threads: 128,
    rows: 128,
    tile_rows: 256,
    other_bytes: 4 * 128 * 4,
};
const DQ: Tiling = Tiling {
    kernel: "attention_backward_dq",
    suffix: "",
    threads: 256,
    rows: 128,
    tile_rows: 256,
    other_bytes: 4 * 128 * 4,
};
const DKDV: Tiling = Tiling {
    kernel: "attention_backward_dkdv",
    suffix: "",
    threads: 256,
    rows: 128,
    tile_rows: 512,
    other_bytes: 2 * 6 * 64 * 4,
};
/// The tiling with half as many packed rows at a time, for the widest heads on GPUs with 99 KiB of
/// shared memory per block.
const SMALL_DKDV: Tiling =
    Tiling { suffix: "_r32", tile_rows: 384, other_bytes: 2 * 6 * 32 * 4, ..DKDV };

impl Tiling {
    fn shared_bytes(&self, width: usize) -> usize {
        self.tile_rows * width * 2 + self.other_bytes
    }
}

/// Returns the padded width of heads of `head_dim` elements.
fn width(head_dim: usize) -> Option<usize> {
    WIDTHS.into_iter().find(|&width| head_dim <= width)
}

/// Returns whether these kernels support the problem: bf16, an even head_dim of at most 128, pairs of elements
/// that start at whole words, and indices into a sequence that fit 32 bits.
pub(super) fn supports<T: Element>(pass: Pass<'_, '_>) -> bool {
    let Pass { cuda, args, at } = pass;
    let shape = &args.shape;
    let Some(width) = width(shape.head_dim) else { return false };
    T::DTYPE == DType::BF16
        && at.are_multiples_of(shape, 2)
        && at.fit_32_bits(shape)
        && dkdv(cuda, width).is_some()
}

/// Returns the kernel for the gradients of keys and values on this GPU; `None` if a block has too little
/// shared memory. No other kernel of this path requires more shared memory.
fn dkdv(cuda: &Cuda, width: usize) -> Option<&'static Tiling> {
    let tilings: &[Tiling] = if width == 128 { &[DKDV, SMALL_DKDV] } else { &[DKDV] };
    tilings.iter().find(|tiling| tiling.shared_bytes(width) <= cuda.most_shared_bytes)
}

/// Returns the width of a problem that these kernels support, checked by `supports`.
fn width_of(packed: &Packed<'_, '_>) -> usize {
    // `supports` has checked that the width exists.
    width(packed.pass.args.shape.head_dim).unwrap_or(WIDTHS[3])
}

/// Runs a kernel with one block per tile of the `count` rows of each key/value head.
fn run_tiles(packed: &Packed<'_, '_>, tiling: &Tiling, count: usize) -> Result<()> {
    let (shape, width) = (&packed.pass.args.shape, width_of(packed));
    let grid = [count.div_ceil(tiling.rows), shape.kv_heads, shape.batch];
    let kernel = format!("{}_d{width}{}", tiling.kernel, tiling.suffix);
    packed.run(tiling.threads, &kernel, grid, tiling.shared_bytes(width))
}

pub(super) fn forward(pass: Pass<'_, '_>, scratch: u64) -> Result<()> {
    let shape = &pass.args.shape;
    let packed = Packed::new(PACK_FORWARD, pass, scratch)?;
    run_tiles(&packed, &FORWARD, shape.query_length * shape.group_size())
}

pub(super) fn backward(pass: Pass<'_, '_>, scratch: u64) -> Result<()> {
    let shape = &pass.args.shape;
    let packed = Packed::new(PACK_BACKWARD, pass, scratch)?;
    packed.run_pairs("attention_backward_delta", shape.tokens() * shape.heads)?;
    run_tiles(&packed, &DQ, shape.query_length * shape.group_size())?;
    let dkdv = dkdv(pass.cuda, width_of(&packed)).unwrap_or(&DKDV);
    run_tiles(&packed, dkdv, shape.key_length)
}
