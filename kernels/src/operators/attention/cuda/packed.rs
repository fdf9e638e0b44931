//! The parameters of attention on tensor cores (`Parameters` of tiled.cuh), and the packing of the
//! selected rows before it (pack.cuh). Both tensor-core paths share them.

use super::Pass;
use crate::cuda::address_or_null;
use crate::cuda::parameters::tiled_attention::Parameters;
use crate::error::Result;

/// Threads and tokens per block of the packing kernels.
const PACK_THREADS: usize = 512;
const PACK_TOKENS: usize = 128;
/// Threads and (token, head) pairs per block of the kernels with one warp per pair.
const PAIR_THREADS: usize = 256;
const PAIRS: usize = 8;

impl Parameters {
    fn new(Pass { args, at, .. }: Pass<'_, '_>, rows: u64) -> Self {
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

    /// Returns the parameters of `count` sequences, starting at index `first`; keys are contiguous.
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
}

/// Kernels that pack the rows, and set the outputs of the pairs that were not selected to zero.
pub(super) const PACK_FORWARD: &str = "attention_pack_forward";
pub(super) const PACK_BACKWARD: &str = "attention_pack_backward";

/// An attention with packed rows.
pub(super) struct Packed<'a, 'v> {
    pub pass: Pass<'a, 'v>,
    pub parameters: Parameters,
}

impl<'a, 'v> Packed<'a, 'v> {
    /// Packs the rows into `scratch` by one of the kernels above if heads are selected.
    pub(super) fn new(kernel: &str, pass: Pass<'a, 'v>, scratch: u64) -> Result<Self> {
        let shape = &pass.args.shape;
        let selected = pass.args.is_routed();
        let parameters = Parameters::new(pass, if selected { scratch } else { 0 });
        let packed = Packed { pass, parameters };
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
        let parameters = [bytemuck::bytes_of(&self.parameters)];
        self.pass.cuda.launch_with(threads, kernel, grid, shared_bytes, &parameters)
    }

    /// Runs a kernel with one warp for each of `count` pairs.
    pub(super) fn run_pairs(&self, kernel: &str, count: usize) -> Result<()> {
        self.run(PAIR_THREADS, kernel, [count.div_ceil(PAIRS), 1, 1], 0)
    }
}
