//! Attention by plain arithmetic (plain.cu).

use bytemuck::{Pod, Zeroable};

use super::{Addresses, Problem};
use crate::cuda::{Cuda, THREADS, address_or_null, name};
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
    fn new(operator: &'static str, problem: &Problem<'_>, at: &Addresses) -> Result<Self> {
        let shape = &problem.shape;
        ensure(operator, shape.head_dim <= MOST_HEAD_DIM, || {
            format!("heads of {} numbers, at most {MOST_HEAD_DIM}", shape.head_dim)
        })?;
        Ok(Parameters {
            q: at.q,
            k: at.k,
            v: at.v,
            out: at.out,
            log_sum_exp: at.log_sum_exp,
            d_out: at.d_out,
            d_qkv: at.d_qkv,
            delta: at.delta,
            selected: address_or_null(problem.routed_mask()),
            weights: address_or_null(problem.weights),
            first_key: address_or_null(problem.first_key),
            block_table: at.block_table,
            query_stride: shape.query_stride as u64,
            key_stride: at.key_stride as u64,
            query_offset: problem.query_offset as u64,
            batch: shape.batch as u32,
            query_length: shape.query_length as u32,
            key_length: shape.key_length as u32,
            block_length: at.block_length as u32,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            shared_heads: problem.shared_heads() as u32,
            routed: (shape.heads - problem.shared_heads()) as u32,
            causal: u32::from(problem.causal),
            scale: problem.scale(),
            padding: 0,
        })
    }
}

pub(super) fn forward<T: Element>(
    cuda: &Cuda,
    problem: &Problem<'_>,
    at: &Addresses,
) -> Result<()> {
    let shape = &problem.shape;
    let parameters = Parameters::new("attention_forward", problem, at)?;
    let blocks = (shape.tokens() * shape.heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_forward"), [blocks, 1], 0, &parameters)
}

pub(super) fn backward<T: Element>(
    cuda: &Cuda,
    problem: &Problem<'_>,
    at: &Addresses,
) -> Result<()> {
    let shape = &problem.shape;
    let parameters = Parameters::new("attention_backward", problem, at)?;
    let blocks = (shape.tokens() * shape.heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_backward_queries"), [blocks, 1], 0, &parameters)?;
    let blocks = (shape.tokens() * shape.kv_heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_backward_keys"), [blocks, 1], 0, &parameters)
}
