//! Attention on a GPU: on Hopper's tensor cores (`hopper`) or those of any GPU (`tiled`) where the
//! numbers allow it, by plain arithmetic (`plain`) elsewhere.

mod hopper;
mod packed;
mod plain;
mod tiled;

use super::{AttentionShape, KeyValues, Visibility};
use crate::cuda::{Cuda, CudaView, CudaViewMut};
use crate::error::{Result, check_len, ensure};
use crate::router::cuda::CudaRouting;
use crate::scalar::Element;

/// A way to compute attention on a GPU. Each takes fewer problems, and is faster on them, than the
/// next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AttentionPath {
    /// The tensor cores and the copy engine of Hopper (sm_90a): bf16, heads of 64 or 128, contiguous
    /// keys, rows at multiples of 16 bytes.
    Hopper,
    /// The tensor cores of Ampere and later GPUs: bf16, even heads of at most 128.
    Tiled,
    /// Plain arithmetic: everything else.
    Plain,
}

impl AttentionPath {
    /// The first path to try, as the variable `MOH_ATTENTION` says.
    #[cfg(feature = "cuda")]
    pub(crate) fn from_environment() -> Result<Self> {
        let name = std::env::var_os("MOH_ATTENTION");
        name.map_or(Ok(Self::Hopper), |name| Self::named(&name.to_string_lossy()))
    }

    /// The path that the variable names.
    #[cfg(any(feature = "cuda", test))]
    fn named(name: &str) -> Result<Self> {
        match name {
            "hopper" => Ok(Self::Hopper),
            "tiled" => Ok(Self::Tiled),
            "plain" => Ok(Self::Plain),
            _ => Err(crate::Error::Device {
                device: "the GPU".into(),
                operation: "start",
                reason: format!("MOH_ATTENTION = {name:?}: expected hopper, tiled or plain"),
            }),
        }
    }

    /// The first path, from the one that the GPU is to try first, that takes the problem.
    fn choose<T: Element>(cuda: &Cuda, problem: &Problem<'_>, at: &Addresses) -> Self {
        let takes = |path: &Self| match path {
            Self::Hopper => hopper::takes::<T>(cuda, problem, at),
            Self::Tiled => tiled::takes::<T>(cuda, problem, at),
            Self::Plain => true,
        };
        let paths = [Self::Hopper, Self::Tiled, Self::Plain].into_iter();
        let mut allowed = paths.filter(|&path| path >= cuda.first_attention());
        allowed.find(takes).unwrap_or(Self::Plain)
    }

    /// The scratch that the backward pass needs on this path.
    fn backward_scratch_bytes(self, shape: &AttentionShape, routed: bool) -> usize {
        match self {
            Self::Hopper => hopper::backward_scratch_bytes(shape, routed),
            Self::Tiled => packed::scratch_bytes(shape, routed),
            Self::Plain => 0,
        }
    }
}

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

    /// Whether all rows of bf16 start at multiples of `count` numbers.
    fn are_multiples_of(&self, shape: &AttentionShape, count: usize) -> bool {
        let strides = [shape.head_dim, shape.query_stride, self.key_stride];
        let starts = [self.q, self.k, self.v, self.out, self.d_out, self.d_qkv];
        strides.iter().all(|stride| stride.is_multiple_of(count))
            && starts.iter().all(|at| at.is_multiple_of(2 * count as u64))
    }

    /// Whether numbers of queries, keys and values in a sequence fit 32 bits.
    fn fit_32_bits(&self, shape: &AttentionShape) -> bool {
        let longest = shape.query_length.max(shape.key_length);
        let widest = shape.query_stride.max(self.key_stride).max(shape.heads);
        u32::try_from(longest.saturating_mul(widest)).is_ok()
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
        self.selection.map_or(self.shape.heads, |selection| selection.held_shared())
    }

    /// Which routed heads each token selected; none where every head serves every token.
    fn routed_mask(&self) -> Option<CudaView<'a, u8>> {
        self.selection.map(|selection| selection.held_mask()).filter(|mask| mask.len > 0)
    }

    /// Whether some rows may not be selected.
    fn is_routed(&self) -> bool {
        self.routed_mask().is_some()
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

/// The most scratch of the forward pass.
pub(crate) fn forward_scratch_bytes(shape: &AttentionShape, routed: bool) -> usize {
    packed::scratch_bytes(shape, routed)
}

/// The most scratch of the backward pass over aligned rows of `T`, whatever the caller has room
/// for.
pub(crate) fn backward_scratch_bytes<T: Element>(
    cuda: &Cuda,
    shape: &AttentionShape,
    routed: bool,
) -> usize {
    let nowhere = Addresses::of_qkv::<T>(shape, 0);
    let visibility = Visibility { causal: true, query_offset: 0, first_key: None };
    let problem = Problem::new(shape, visibility, None, None);
    let path = AttentionPath::choose::<T>(cuda, &problem, &nowhere);
    delta_bytes(shape) + path.backward_scratch_bytes(shape, routed)
}

/// Bytes of `<d_out, O>` where the caller does not want it; what follows starts at a multiple of
/// 16.
fn delta_bytes(shape: &AttentionShape) -> usize {
    (shape.tokens() * shape.heads * size_of::<f32>()).next_multiple_of(16)
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
    let packed = || cuda.scratch(forward_scratch_bytes(shape, problem.is_routed()));
    let path = AttentionPath::choose::<T>(cuda, problem, &at);
    cuda.remember_attention(path);
    match path {
        AttentionPath::Hopper => hopper::forward(cuda, problem, &at, packed()?),
        AttentionPath::Tiled => tiled::forward(cuda, problem, &at, packed()?),
        AttentionPath::Plain => plain::forward::<T>(cuda, problem, &at),
    }
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
    let mut at = Addresses {
        out: saved.out.address,
        log_sum_exp: saved.log_sum_exp.address,
        d_out: saved.d_out.address,
        d_qkv: d_qkv.address,
        ..Addresses::of_qkv::<T>(&problem.shape, saved.qkv.address)
    };
    let path = AttentionPath::choose::<T>(cuda, problem, &at);
    cuda.remember_attention(path);
    let own_delta = if delta.is_some() { 0 } else { delta_bytes(&problem.shape) };
    let others = path.backward_scratch_bytes(&problem.shape, problem.is_routed());
    let scratch = cuda.scratch(own_delta + others)?;
    at.delta = delta.map_or(scratch, |delta| delta.address);
    let others = scratch + own_delta as u64;
    match path {
        AttentionPath::Hopper => hopper::backward(cuda, problem, &at, others),
        AttentionPath::Tiled => tiled::backward(cuda, problem, &at, others),
        AttentionPath::Plain => plain::backward::<T>(cuda, problem, &at),
    }
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

#[cfg(test)]
mod tests {
    use super::AttentionPath;

    #[test]
    fn the_variable_names_a_path_or_is_refused() {
        assert_eq!(AttentionPath::named("hopper"), Ok(AttentionPath::Hopper));
        assert_eq!(AttentionPath::named("tiled"), Ok(AttentionPath::Tiled));
        assert_eq!(AttentionPath::named("plain"), Ok(AttentionPath::Plain));
        let refused = AttentionPath::named("flash").map_err(|error| error.to_string());
        let message = "MOH_ATTENTION = \"flash\": expected hopper, tiled or plain";
        assert!(refused.is_err_and(|refusal| refusal.ends_with(message)));
    }
}
