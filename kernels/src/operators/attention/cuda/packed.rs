//! The parameters of attention on tensor cores (`Parameters` of tiled.cuh), and the packing of the
//! selected rows before it (pack.cuh). Both paths share them.

use bytemuck::{Pod, Zeroable};

use super::{Addresses, AttentionArgs};
use crate::cuda::{Cuda, address_or_null, mirrored};
use crate::error::Result;

/// Threads and tokens per block of the packing kernels.
const PACK_THREADS: usize = 512;
const PACK_TOKENS: usize = 128;
/// Threads and (token, head) pairs per block of the kernels with one warp per pair.
const PAIR_THREADS: usize = 256;
const PAIRS: usize = 8;

/// `Parameters` of tiled.cuh.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct Parameters {
    q: u64,
    k: u64,
    v: u64,
    block_table: u64,
    rows: u64,
    row_counts: u64,
    selected: u64,
    document_start: u64,
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

mirrored!(
    Parameters, 208,
    q 0, k 8, v 16, block_table 24, rows 32, row_counts 40, selected 48, document_start 56,
    weights 64, out 72, log_sum_exp 80, d_out 88, delta 96, d_q 104, d_k 112, d_v 120,
    q_stride 128, kv_stride 136, d_q_stride 144, d_kv_stride 152, batch 160, query_length 164,
    key_length 168, heads 172, kv_heads 176, head_dim 180, routed 184, block_length 188,
    query_offset 192, causal 196, scale 200, padding 204,
);

impl Parameters {
    fn new(args: &AttentionArgs<'_, Cuda>, at: &Addresses, rows: u64) -> Self {
        let shape = &args.shape;
        Parameters {
            q: at.q,
            k: at.k,
            v: at.v,
            block_table: at.block_table,
            rows,
            row_counts: rows + (shape.tokens() * shape.heads * 4) as u64,
            selected: address_or_null(args.routed_mask()),
            document_start: address_or_null(args.document_start),
            weights: address_or_null(args.weights()),
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
            routed: (shape.heads - args.shared_heads()) as u32,
            block_length: at.block_length as u32,
            query_offset: args.query_offset as u32,
            causal: u32::from(args.causal),
            scale: args.scale(),
            padding: 0,
        }
    }

    /// The parameters of `count` sequences from index `first`; keys are contiguous.
    pub(super) fn of_sequences(&self, first: usize, count: usize) -> Self {
        let first = first as u64;
        let tokens = first * u64::from(self.query_length);
        let keys = first * u64::from(self.key_length);
        let pairs = tokens * u64::from(self.heads);
        let outputs = 2 * pairs * u64::from(self.head_dim);
        let at = |address: u64, bytes: u64| if address == 0 { 0 } else { address + bytes };
        Parameters {
            q: self.q + 2 * tokens * self.q_stride,
            k: self.k + 2 * keys * self.kv_stride,
            v: self.v + 2 * keys * self.kv_stride,
            rows: at(self.rows, 4 * pairs),
            row_counts: at(self.row_counts, 4 * first * u64::from(self.kv_heads)),
            selected: at(self.selected, tokens * u64::from(self.routed)),
            document_start: at(self.document_start, 4 * tokens),
            weights: at(self.weights, 4 * pairs),
            out: self.out + outputs,
            log_sum_exp: self.log_sum_exp + 4 * pairs,
            d_out: self.d_out + outputs,
            delta: self.delta + 4 * pairs,
            d_q: self.d_q + 2 * tokens * self.d_q_stride,
            d_k: self.d_k + 2 * keys * self.d_kv_stride,
            d_v: self.d_v + 2 * keys * self.d_kv_stride,
            batch: count as u32,
            ..*self
        }
    }

    /// Addresses of the keys and values, and elements from one key to the next.
    pub(super) fn key_values(&self) -> ([u64; 2], u64) {
        ([self.k, self.v], self.kv_stride)
    }

    pub(super) fn batch(&self) -> usize {
        self.batch as usize
    }
}

/// Kernels that pack the rows, and set the outputs of the pairs that were not selected to zero.
pub(super) const PACK_FORWARD: &str = "attention_pack_forward";
pub(super) const PACK_BACKWARD: &str = "attention_pack_backward";

/// An attention whose rows are packed.
pub(super) struct Packed<'a, 'v> {
    pub cuda: &'a Cuda,
    pub args: &'a AttentionArgs<'v, Cuda>,
    pub parameters: Parameters,
}

impl<'a, 'v> Packed<'a, 'v> {
    /// Packs the rows into `scratch` by one of the kernels above, if heads are selected.
    pub(super) fn new(
        kernel: &str,
        cuda: &'a Cuda,
        args: &'a AttentionArgs<'v, Cuda>,
        at: &Addresses,
        scratch: u64,
    ) -> Result<Self> {
        let shape = &args.shape;
        let selected = args.routed_mask().is_some();
        let parameters = Parameters::new(args, at, if selected { scratch } else { 0 });
        let packed = Packed { cuda, args, parameters };
        if selected {
            let blocks = shape.query_length.div_ceil(PACK_TOKENS);
            let grid = [blocks, shape.kv_heads, shape.batch];
            packed.run(PACK_THREADS, kernel, grid, 0)?;
        }
        Ok(packed)
    }

    pub(super) fn run(
        &self,
        threads: usize,
        kernel: &str,
        grid: [usize; 3],
        shared_bytes: usize,
    ) -> Result<()> {
        self.cuda.launch_blocks_of(threads, kernel, grid, shared_bytes, &self.parameters)
    }

    /// Runs a kernel with one warp for each of `count` pairs.
    pub(super) fn run_pairs(&self, kernel: &str, count: usize) -> Result<()> {
        self.run(PAIR_THREADS, kernel, [count.div_ceil(PAIRS), 1, 1], 0)
    }
}
