//! Attention on a GPU: on tensor cores (`tiled`) where the numbers allow it, by plain arithmetic
//! (`plain`) elsewhere.

mod plain;
mod tiled;

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

/// Where the tensors lie; 0 for those that the pass does not know.
#[derive(Default)]
struct Addresses {
    q: u64,
    k: u64,
    v: u64,
    /// Numbers from one key to the next.
    key_stride: usize,
    block_table: u64,
    block_length: usize,
    out: u64,
    log_sum_exp: u64,
    d_out: u64,
    d_qkv: u64,
    delta: u64,
}

impl Addresses {
    fn of_keys<T: Element>(shape: &AttentionShape, key_values: KeyValues<'_, Cuda, T>) -> Self {
        match key_values {
            KeyValues::Contiguous { keys, values, row_stride } => Addresses {
                k: keys.address,
                v: values.address,
                key_stride: row_stride,
                ..Self::default()
            },
            KeyValues::Paged { keys, values, block_table, block_length } => Addresses {
                k: keys.address,
                v: values.address,
                key_stride: shape.kv_heads * shape.head_dim,
                block_table: block_table.address,
                block_length,
                ..Self::default()
            },
        }
    }

    /// Queries, keys and values side by side.
    fn of_qkv<T: Element>(shape: &AttentionShape, qkv: u64) -> Self {
        let at = |heads: usize| qkv + (heads * shape.head_dim * size_of::<T>()) as u64;
        Addresses {
            q: qkv,
            k: at(shape.heads),
            v: at(shape.heads + shape.kv_heads),
            key_stride: shape.query_stride,
            ..Self::default()
        }
    }
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

    /// Heads before the routed ones.
    fn shared_heads(&self) -> usize {
        self.selection.map_or(self.shape.heads, |selection| selection.shared_heads())
    }

    /// Which routed heads each token selected; none where every head serves every token.
    fn routed_mask(&self) -> Option<CudaView<'a, u8>> {
        self.selection.map(|selection| selection.mask()).filter(|mask| mask.len > 0)
    }

    /// Factor of the scores.
    fn scale(&self) -> f32 {
        (self.shape.head_dim as f32).sqrt().recip()
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
    let at = Addresses {
        q: queries.address,
        out: out.address,
        log_sum_exp: log_sum_exp.address,
        ..Addresses::of_keys(shape, key_values)
    };
    if tiled::takes::<T>(cuda, problem, &at) {
        return tiled::forward(cuda, problem, &at, cuda.scratch(tiled::scratch_bytes(problem))?);
    }
    plain::forward::<T>(cuda, problem, &at)
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
    let packed = tiled::scratch_bytes(problem);
    let own_delta = if delta.is_some() { 0 } else { saved.log_sum_exp.len * size_of::<f32>() };
    let scratch = cuda.scratch(packed + own_delta)?;
    let at = Addresses {
        out: saved.out.address,
        log_sum_exp: saved.log_sum_exp.address,
        d_out: saved.d_out.address,
        d_qkv: d_qkv.address,
        delta: delta.map_or(scratch + packed as u64, |delta| delta.address),
        ..Addresses::of_qkv::<T>(&problem.shape, saved.qkv.address)
    };
    if tiled::takes::<T>(cuda, problem, &at) {
        return tiled::backward(cuda, problem, &at, scratch);
    }
    plain::backward::<T>(cuda, problem, &at)
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
