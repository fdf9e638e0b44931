//! Attention on tensor cores (tiled.cu).

use bytemuck::{Pod, Zeroable};

use super::{Addresses, Problem};
use crate::cuda::{Cuda, address_or_null};
use crate::error::Result;
use crate::scalar::{DType, Element};

/// Widths of a head that kernels are compiled for; narrower heads are padded with zeros.
const WIDTHS: [usize; 4] = [32, 64, 96, 128];
/// Threads and (token, head) pairs of a block of the kernels that take a warp for each pair.
const PAIR_THREADS: usize = 256;
const PAIRS: usize = 8;

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

/// `Parameters` of tiled.cuh.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Parameters {
    q: u64,
    k: u64,
    v: u64,
    block_table: u64,
    rows: u64,
    row_counts: u64,
    selected: u64,
    first_key: u64,
    weights: u64,
    out: u64,
    log_sum_exp: u64,
    d_out: u64,
    delta: u64,
    d_q: u64,
    d_k: u64,
    d_v: u64,
    q_stride: u64,
    kv_stride: u64,
    d_q_stride: u64,
    d_kv_stride: u64,
    batch: u32,
    query_length: u32,
    key_length: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    routed: u32,
    block_length: u32,
    query_offset: u32,
    causal: u32,
    scale: f32,
    padding: u32,
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
    let strides = [shape.head_dim, shape.query_stride, at.key_stride];
    let longest = shape.query_length.max(shape.key_length);
    let largest = longest.saturating_mul(shape.query_stride.max(at.key_stride).max(shape.heads));
    T::DTYPE == DType::BF16
        && strides.iter().all(|stride| stride.is_multiple_of(2))
        && [at.q, at.k, at.v, at.out, at.d_out, at.d_qkv].iter().all(|at| at.is_multiple_of(4))
        && u32::try_from(largest).is_ok()
        && DKDV.shared_bytes(width) <= cuda.device().most_shared_bytes()
}

/// Scratch for the packed rows.
pub(super) fn scratch_bytes(problem: &Problem<'_>) -> usize {
    let shape = &problem.shape;
    let routed = problem.routed_mask().is_some();
    if routed { (shape.tokens() * shape.heads + shape.batch * shape.kv_heads) * 4 } else { 0 }
}

struct Launch<'a> {
    cuda: &'a Cuda,
    problem: &'a Problem<'a>,
    width: usize,
    parameters: Parameters,
}

impl<'a> Launch<'a> {
    /// Packs the rows, where the heads are selected, into `scratch`.
    fn new(cuda: &'a Cuda, problem: &'a Problem<'a>, at: &Addresses, scratch: u64) -> Result<Self> {
        let shape = &problem.shape;
        let mask = problem.routed_mask();
        let rows = if mask.is_some() { scratch } else { 0 };
        let parameters = Parameters {
            q: at.q,
            k: at.k,
            v: at.v,
            block_table: at.block_table,
            rows,
            row_counts: rows + (shape.tokens() * shape.heads * 4) as u64,
            selected: address_or_null(mask),
            first_key: address_or_null(problem.first_key),
            weights: address_or_null(problem.weights),
            out: at.out,
            log_sum_exp: at.log_sum_exp,
            d_out: at.d_out,
            delta: at.delta,
            d_q: at.d_qkv,
            d_k: at.d_qkv + (shape.heads * shape.head_dim * 2) as u64,
            d_v: at.d_qkv + ((shape.heads + shape.kv_heads) * shape.head_dim * 2) as u64,
            q_stride: shape.query_stride as u64,
            kv_stride: at.key_stride as u64,
            d_q_stride: shape.query_stride as u64,
            d_kv_stride: shape.query_stride as u64,
            batch: shape.batch as u32,
            query_length: shape.query_length as u32,
            key_length: shape.key_length as u32,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            routed: (shape.heads - problem.shared_heads()) as u32,
            block_length: at.block_length as u32,
            query_offset: problem.query_offset as u32,
            causal: u32::from(problem.causal),
            scale: problem.scale(),
            padding: 0,
        };
        // `takes` found one; the widest serves the empty case.
        let width = width(shape.head_dim).unwrap_or(WIDTHS[3]);
        let launch = Launch { cuda, problem, width, parameters };
        if mask.is_some() {
            const PACK_THREADS: usize = 1024;
            let grid = [shape.kv_heads, shape.batch, 1];
            launch.run(PACK_THREADS, "attention_pack", grid, 0)?;
        }
        Ok(launch)
    }

    fn run(
        &self,
        threads: usize,
        kernel: &str,
        grid: [usize; 3],
        shared_bytes: usize,
    ) -> Result<()> {
        self.cuda.launch_blocks_of(threads, kernel, grid, shared_bytes, &self.parameters)
    }

    /// Runs a kernel with a block for every tile of `count` rows of each key/value head.
    fn run_tiles(&self, tiling: &Tiling, count: usize) -> Result<()> {
        let Problem { shape, .. } = self.problem;
        let grid = [count.div_ceil(tiling.rows), shape.kv_heads, shape.batch];
        let kernel = format!("{}_d{}", tiling.kernel, self.width);
        self.run(tiling.threads, &kernel, grid, tiling.shared_bytes(self.width))
    }

    /// Runs a kernel with a warp for each of `count` pairs.
    fn run_pairs(&self, kernel: &str, count: usize) -> Result<()> {
        self.run(PAIR_THREADS, kernel, [count.div_ceil(PAIRS), 1, 1], 0)
    }
}

pub(super) fn forward(
    cuda: &Cuda,
    problem: &Problem<'_>,
    at: &Addresses,
    scratch: u64,
) -> Result<()> {
    let shape = &problem.shape;
    let launch = Launch::new(cuda, problem, at, scratch)?;
    if problem.routed_mask().is_some() {
        let pairs = shape.tokens() * (shape.heads - problem.shared_heads());
        launch.run_pairs("attention_clear", pairs)?;
    }
    launch.run_tiles(&FORWARD, shape.query_length * shape.group_size())
}

pub(super) fn backward(
    cuda: &Cuda,
    problem: &Problem<'_>,
    at: &Addresses,
    scratch: u64,
) -> Result<()> {
    let shape = &problem.shape;
    let launch = Launch::new(cuda, problem, at, scratch)?;
    launch.run_pairs("attention_backward_delta", shape.tokens() * shape.heads)?;
    launch.run_tiles(&DQ, shape.query_length * shape.group_size())?;
    launch.run_tiles(&DKDV, shape.key_length)
}
