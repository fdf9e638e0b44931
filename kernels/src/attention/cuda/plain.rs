//! Attention by plain arithmetic (plain.cu).

use bytemuck::{Pod, Zeroable};

use super::{Problem, Saved};
use crate::attention::KeyValues;
use crate::cuda::{Cuda, CudaView, CudaViewMut, THREADS, address_or_null, name};
use crate::error::{Result, ensure};
use crate::scalar::Element;

/// Widest head.
const MOST_HEAD_DIM: usize = 256;
/// Warps of a block; each takes a row.
const WARPS: usize = THREADS / 32;

/// `Parameters` of plain.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Parameters {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    log_sum_exp: u64,
    d_out: u64,
    d_qkv: u64,
    delta: u64,
    selected: u64,
    weights: u64,
    first_key: u64,
    block_table: u64,
    query_stride: u64,
    key_stride: u64,
    query_offset: u64,
    batch: u32,
    query_length: u32,
    key_length: u32,
    block_length: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    shared_heads: u32,
    routed: u32,
    causal: u32,
    scale: f32,
    padding: u32,
}

impl Parameters {
    fn new(operator: &'static str, problem: &Problem<'_>) -> Result<Self> {
        let shape = &problem.shape;
        ensure(operator, shape.head_dim <= MOST_HEAD_DIM, || {
            format!("heads of {} numbers, at most {MOST_HEAD_DIM}", shape.head_dim)
        })?;
        let selected = problem.selection.map(|selection| selection.mask());
        let shared_heads = problem.selection.map_or(shape.heads, |s| s.shared_heads());
        Ok(Parameters {
            // A mask without a number: every head is shared.
            selected: address_or_null(selected.filter(|mask| mask.len > 0)),
            weights: address_or_null(problem.weights),
            first_key: address_or_null(problem.first_key),
            query_stride: shape.query_stride as u64,
            query_offset: problem.query_offset as u64,
            batch: shape.batch as u32,
            query_length: shape.query_length as u32,
            key_length: shape.key_length as u32,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            shared_heads: shared_heads as u32,
            routed: (shape.heads - shared_heads) as u32,
            causal: u32::from(problem.causal),
            scale: (shape.head_dim as f32).sqrt().recip(),
            ..Self::zeroed()
        })
    }
}

pub(super) fn forward<T: Element>(
    cuda: &Cuda,
    problem: &Problem<'_>,
    queries: CudaView<'_, T>,
    key_values: KeyValues<'_, Cuda, T>,
    out: CudaViewMut<'_, T>,
    log_sum_exp: CudaViewMut<'_, f32>,
) -> Result<()> {
    let mut parameters = Parameters::new("attention_forward", problem)?;
    let shape = &problem.shape;
    match key_values {
        KeyValues::Contiguous { keys, values, row_stride } => {
            (parameters.k, parameters.v) = (keys.address, values.address);
            parameters.key_stride = row_stride as u64;
        }
        KeyValues::Paged { keys, values, block_table, block_length } => {
            (parameters.k, parameters.v) = (keys.address, values.address);
            parameters.key_stride = (shape.kv_heads * shape.head_dim) as u64;
            parameters.block_table = block_table.address;
            parameters.block_length = block_length as u32;
        }
    }
    parameters.q = queries.address;
    parameters.out = out.address;
    parameters.log_sum_exp = log_sum_exp.address;
    let blocks = (shape.tokens() * shape.heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_forward"), [blocks, 1], 0, &parameters)
}

/// The backward pass; `delta` is the address of room for `[B*T, H]` f32.
pub(super) fn backward<T: Element>(
    cuda: &Cuda,
    problem: &Problem<'_>,
    saved: Saved<'_, T>,
    d_qkv: CudaViewMut<'_, T>,
    delta: u64,
) -> Result<()> {
    let mut parameters = Parameters::new("attention_backward", problem)?;
    let shape = &problem.shape;
    let at = |heads: usize| saved.qkv.address + (heads * shape.head_dim * size_of::<T>()) as u64;
    parameters.q = saved.qkv.address;
    parameters.k = at(shape.heads);
    parameters.v = at(shape.heads + shape.kv_heads);
    parameters.key_stride = shape.query_stride as u64;
    parameters.log_sum_exp = saved.log_sum_exp.address;
    parameters.d_out = saved.d_out.address;
    parameters.d_qkv = d_qkv.address;
    parameters.delta = delta;
    let blocks = (shape.tokens() * shape.heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_backward_queries"), [blocks, 1], 0, &parameters)?;
    let blocks = (shape.tokens() * shape.kv_heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_backward_keys"), [blocks, 1], 0, &parameters)
}
