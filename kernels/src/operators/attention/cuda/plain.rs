//! Attention by plain arithmetic (plain.cu).

use super::{AttentionArgs, Pass};
use crate::cuda::parameters::plain_attention::Parameters;
use crate::cuda::{THREADS, address_or_null, name};
use crate::{Element, Result, ensure};

const MAX_HEAD_DIM: usize = 256;
/// Warps per block; each computes one row.
const WARPS: usize = THREADS / 32;

impl Parameters {
    fn new(operator: &'static str, Pass { args, at, .. }: Pass<'_, '_>) -> Result<Self> {
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
            routed: (shape.heads - args.shared_heads()) as u32,
            causal: u32::from(args.causal),
            scale: args.scale(),
        })
    }
}

pub(super) fn forward<T: Element>(pass: Pass<'_, '_>) -> Result<()> {
    let Pass { cuda, args: AttentionArgs { shape, .. }, .. } = pass;
    let parameters = Parameters::new("attention_forward", pass)?;
    let blocks = (shape.tokens() * shape.heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_forward"), [blocks, 1], 0, &parameters)
}

pub(super) fn backward<T: Element>(pass: Pass<'_, '_>) -> Result<()> {
    let Pass { cuda, args: AttentionArgs { shape, .. }, .. } = pass;
    let parameters = Parameters::new("attention_backward", pass)?;
    let blocks = (shape.tokens() * shape.heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_backward_queries"), [blocks, 1], 0, &parameters)?;
    let blocks = (shape.tokens() * shape.kv_heads).div_ceil(WARPS);
    cuda.launch(&name::<T>("plain_attention_backward_keys"), [blocks, 1], 0, &parameters)
}
