//! Attention by plain arithmetic (plain.cu).

use bytemuck::{Pod, Zeroable};

use super::{Addresses, AttentionArgs};
use crate::cuda::{Cuda, THREADS, address_or_null, mirrored, name};
use crate::error::{Result, ensure};
use crate::scalar::Element;

/// Widest head.
const MAX_HEAD_DIM: usize = 256;
/// Warps per block; each computes one row.
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
    document_start: u64,
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

mirrored!(
    Parameters, 168,
    q 0, k 8, v 16, out 24, log_sum_exp 32, d_out 40, d_qkv 48, delta 56, selected 64, weights 72,
    document_start 80, block_table 88, query_stride 96, key_stride 104, query_offset 112,
    batch 120, query_length 124, key_length 128, block_length 132, heads 136, kv_heads 140,
    head_dim 144, shared_heads 148, routed 152, causal 156, scale 160, padding 164,
);

impl Parameters {
    fn new(operator: &'static str, args: &AttentionArgs<'_, Cuda>, at: &Addresses) -> Result<Self> {
        let shape = &args.shape;
        ensure(operator, shape.head_dim <= MAX_HEAD_DIM, || {
            format!("heads of {} elements, at most {MAX_HEAD_DIM}", shape.head_dim)
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
            selected: address_or_null(args.routed_mask()),
            weights: address_or_null(args.weights()),
            document_start: address_or_null(args.document_start),
            block_table: at.block_table,
            query_stride: shape.query_stride as u64,
            key_stride: at.key_stride as u64,
            query_offset: args.query_offset as u64,
            batch: shape.batch as u32,
            query_length: shape.query_length as u32,
            key_length: shape.key_length as u32,
            block_length: at.block_length as u32,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            shared_heads: args.shared_heads() as u32,
            routed: (shape.heads - args.shared_heads()) as u32,
            causal: u32::from(args.causal),
            scale: args.scale(),
            padding: 0,
        })
    }
}

pub(super) fn forward<T: Element>(
    cuda: &Cuda,
    args: &AttentionArgs<'_, Cuda>,
    at: &Addresses,
) -> Result<()> {
    let shape = &args.shape;
    let parameters = Parameters::new("attention_forward", args, at)?;
    let blocks = (shape.tokens() * shape.heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_forward"), [blocks, 1], 0, &parameters)
}

pub(super) fn backward<T: Element>(
    cuda: &Cuda,
    args: &AttentionArgs<'_, Cuda>,
    at: &Addresses,
) -> Result<()> {
    let shape = &args.shape;
    let parameters = Parameters::new("attention_backward", args, at)?;
    let blocks = (shape.tokens() * shape.heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_backward_queries"), [blocks, 1], 0, &parameters)?;
    let blocks = (shape.tokens() * shape.kv_heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_backward_keys"), [blocks, 1], 0, &parameters)
}
