//! Attention on a GPU.

mod plain;

use super::{AttentionShape, KeyValues, Visibility};
use crate::cuda::{Cuda, CudaView, CudaViewMut};
use crate::error::{Result, check_len, ensure};
use crate::router::cuda::CudaRouting;
use crate::scalar::Element;

/// The problem and who takes part in it.
pub(crate) struct Problem<'a> {
    pub shape: AttentionShape,
    pub causal: bool,
    pub query_offset: usize,
    pub first_key: Option<CudaView<'a, u32>>,
    pub selection: Option<&'a CudaRouting>,
    pub weights: Option<CudaView<'a, f32>>,
}

/// The saved tensors and gradients that the backward pass reads.
pub(crate) struct Saved<'a, T> {
    pub qkv: CudaView<'a, T>,
    pub out: CudaView<'a, T>,
    pub log_sum_exp: CudaView<'a, f32>,
    pub d_out: CudaView<'a, T>,
}

impl<'a> Problem<'a> {
    pub(crate) fn new<'v: 'a>(
        shape: &AttentionShape,
        visibility: Visibility<'v, Cuda>,
        selection: Option<&'a CudaRouting>,
        weights: Option<CudaView<'a, f32>>,
    ) -> Self {
        let Visibility { causal, query_offset, first_key } = visibility;
        Problem { shape: *shape, causal, query_offset, first_key, selection, weights }
    }

    fn check(&self, operator: &'static str) -> Result<()> {
        let (tokens, shape) = (self.shape.tokens(), &self.shape);
        if let Some(selection) = self.selection {
            selection.check(operator, tokens, shape.heads)?;
        }
        if let Some(weights) = self.weights {
            check_len(operator, "weights", weights.len, tokens * shape.heads)?;
        }
        if let Some(first_key) = self.first_key {
            check_len(operator, "first_key", first_key.len, tokens)?;
        }
        ensure(operator, tokens == 0 || shape.key_length > 0, || "query 0 sees no key".into())?;
        let end = self.query_offset.saturating_add(shape.query_length);
        ensure(operator, !self.causal || end <= shape.key_length, || {
            format!("queries up to position {end} of {} keys", shape.key_length)
        })
    }
}

/// The forward pass.
pub(crate) fn forward<T: Element>(
    cuda: &Cuda,
    problem: &Problem<'_>,
    queries: CudaView<'_, T>,
    key_values: KeyValues<'_, Cuda, T>,
    out: CudaViewMut<'_, T>,
    log_sum_exp: CudaViewMut<'_, f32>,
) -> Result<()> {
    const OPERATOR: &str = "attention_forward";
    let shape = &problem.shape;
    shape.check(OPERATOR, out.len, log_sum_exp.len)?;
    problem.check(OPERATOR)?;
    check_key_values(shape, key_values)?;
    shape.check_queries(OPERATOR, queries.len)?;
    plain::forward(cuda, problem, queries, key_values, out, log_sum_exp)
}

/// The backward pass.
pub(crate) fn backward<T: Element>(
    cuda: &Cuda,
    problem: &Problem<'_>,
    saved: Saved<'_, T>,
    d_qkv: CudaViewMut<'_, T>,
    delta: Option<CudaViewMut<'_, f32>>,
) -> Result<()> {
    problem.shape.check_backward(&super::BackwardLens {
        qkv: saved.qkv.len,
        out: saved.out.len,
        log_sum_exp: saved.log_sum_exp.len,
        d_out: saved.d_out.len,
        d_qkv: d_qkv.len,
        delta: delta.as_ref().map(|delta| delta.len),
    })?;
    problem.check("attention_backward")?;
    let delta = match delta {
        Some(delta) => delta.address,
        None => cuda.scratch(saved.log_sum_exp.len * size_of::<f32>())?,
    };
    plain::backward(cuda, problem, saved, d_qkv, delta)
}

fn check_key_values<T: Element>(
    shape: &AttentionShape,
    key_values: KeyValues<'_, Cuda, T>,
) -> Result<()> {
    const OPERATOR: &str = "attention_forward";
    match key_values {
        KeyValues::Contiguous { keys, values, row_stride } => {
            shape.check_contiguous(OPERATOR, keys.len, values.len, row_stride)
        }
        KeyValues::Paged { keys, values, block_table, block_length } => {
            ensure(OPERATOR, block_length > 0, || "blocks of no token".into())?;
            let blocks = shape.batch * shape.key_length.div_ceil(block_length);
            check_len(OPERATOR, "block_table", block_table.len, blocks)?;
            // The numbers in the table are the GPU's to read; a sequence has none twice.
            let rows = shape.key_length.div_ceil(block_length) * block_length;
            let needed = rows * shape.kv_heads * shape.head_dim;
            ensure(OPERATOR, keys.len >= needed && values.len >= needed, || {
                format!("{} keys and {} values, expected {needed}", keys.len, values.len)
            })
        }
    }
}
