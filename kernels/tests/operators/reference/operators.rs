//! The operators as plain mathematics in f64, on candle tensors with gradients by autograd.
//! Only primitive operations: candle's fused operations have no backward pass.

use candle_core::{D, Device, Result, Tensor};
use moh_kernels::adamw::AdamW;
use moh_kernels::cross_entropy::IGNORED;
use moh_kernels::rope::QkvShape;
use moh_kernels::router::SharedHeads;
use moh_kernels::router::logits::{HeadWeights, LogitRouter};
use moh_kernels::router::query_norm::{QueryNormRouter, Selects};

/// Returns the rows of a table `[V, C]`.
pub fn embedding(table: &Tensor, ids: &[u32]) -> Result<Tensor> {
    table.index_select(&Tensor::from_slice(ids, ids.len(), &Device::Cpu)?, 0)
}

/// Computes RMSNorm; x `[N, C]`, weight `[C]`.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean = (x.sqr()?.mean_keepdim(1)? + eps)?;
    x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(weight)
}

/// Computes a linear layer; x `[N, inputs]`, weight `[outputs, inputs]`.
pub fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.matmul(&weight.t()?)
}

/// Computes SwiGLU; gate_up `[N, 2I]`.
pub fn swiglu(gate_up: &Tensor) -> Result<Tensor> {
    let width = gate_up.dim(1)? / 2;
    let (gate, up) = (gate_up.narrow(1, 0, width)?, gate_up.narrow(1, width, width)?);
    (gate.clone() / (gate.neg()?.exp()? + 1.0)?)? * up
}

/// Returns the summed loss of logits x weight^T over the targets that are not ignored.
pub fn cross_entropy(x: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let logits = linear(x, weight)?;
    let valid: Vec<f64> = targets.iter().map(|&t| f64::from(u8::from(t != IGNORED))).collect();
    let chosen: Vec<u32> = targets.iter().map(|&t| if t == IGNORED { 0 } else { t }).collect();
    let valid = Tensor::from_vec(valid, targets.len(), &Device::Cpu)?;
    let chosen = Tensor::from_vec(chosen, (targets.len(), 1), &Device::Cpu)?;
    let losses = (log_sum_exp(&logits)? - logits.gather(&chosen, 1)?.squeeze(1)?)?;
    (losses * valid)?.sum_all()
}

/// Returns T^2 KL(softmax(teachers / T) || softmax(students / T)) over the first `rows` columns of both logits, summed
/// over the tokens with a target.
pub fn distillation(
    students: &Tensor,
    teachers: &Tensor,
    targets: &[u32],
    rows: usize,
    temperature: f64,
) -> Result<Tensor> {
    let log_softmax = |logits: &Tensor| {
        let logits = (logits.narrow(1, 0, rows)? / temperature)?;
        logits.broadcast_sub(&log_sum_exp(&logits)?.unsqueeze(1)?)
    };
    let (own, other) = (log_softmax(students)?, log_softmax(teachers)?);
    let divergences = (other.exp()? * (&other - own)?)?.sum(1)?;
    let valid: Vec<f64> = targets.iter().map(|&t| f64::from(u8::from(t != IGNORED))).collect();
    let valid = Tensor::from_vec(valid, targets.len(), &Device::Cpu)?;
    (divergences * valid)?.sum_all()? * (temperature * temperature)
}

/// Returns the log-sum-exp over the last dimension, which is removed.
pub fn log_sum_exp(x: &Tensor) -> Result<Tensor> {
    let largest = x.max_keepdim(D::Minus1)?.detach();
    let sum = x.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?;
    (sum.log()? + largest)?.squeeze(D::Minus1)
}

/// Packed queries, keys and values as a tensor `[B, T, H + 2G, D]`.
pub struct Packed {
    batch: usize,
    length: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Packed {
    pub fn new(shape: &QkvShape) -> Self {
        let &QkvShape { batch, length, heads, kv_heads, head_dim } = shape;
        Packed { batch, length, heads, kv_heads, head_dim }
    }

    pub fn dims(&self) -> (usize, usize, usize, usize) {
        (self.batch, self.length, self.heads + 2 * self.kv_heads, self.head_dim)
    }

    pub fn split(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        let &Packed { heads, kv_heads, .. } = self;
        Ok([
            qkv.narrow(2, 0, heads)?,
            qkv.narrow(2, heads, kv_heads)?,
            qkv.narrow(2, heads + kv_heads, kv_heads)?,
        ])
    }

    /// Normalises queries and keys, each kind with its row of `weight` `[2, D]`.
    pub fn norm(&self, qkv: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
        let [queries, keys, values] = self.split(qkv)?;
        let normed = |heads: Tensor, of| {
            let rows = heads.contiguous()?.reshape(((), self.head_dim))?;
            rms_norm(&rows, &weight.get(of)?, eps)?.reshape(heads.dims())
        };
        Tensor::cat(&[normed(queries, 0)?, normed(keys, 1)?, values], 2)
    }

    /// Returns the queries as `[N, H, D]`, for the router.
    pub fn queries(&self, qkv: &Tensor) -> Result<Tensor> {
        let &Packed { batch, length, heads, head_dim, .. } = self;
        qkv.narrow(2, 0, heads)?.reshape((batch * length, heads, head_dim))
    }

    /// Returns the rows of f32 tables for its tokens, exactly.
    pub fn table(&self, cos: &[f32], sin: &[f32], first_position: usize) -> [Tensor; 2] {
        let half = self.head_dim / 2;
        let part = first_position * half..(first_position + self.length) * half;
        [cos, sin].map(|table| super::tensor(&table[part.clone()], (self.length, half)))
    }

    pub fn rotate(&self, qkv: &Tensor, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
        let turned = qkv.narrow(2, 0, self.heads + self.kv_heads)?;
        let values = qkv.narrow(2, self.heads + self.kv_heads, self.kv_heads)?;
        Tensor::cat(&[rope(&turned, cos, sin)?, values], 2)
    }
}

/// Rotates x `[B, T, heads, D]` by cos and sin `[T, D/2]` of its positions.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let half = x.dim(3)? / 2;
    let (cos, sin) = (cos.unsqueeze(1)?, sin.unsqueeze(1)?);
    let (low, high) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
    let low_out = (low.broadcast_mul(&cos)? - high.broadcast_mul(&sin)?)?;
    let high_out = (high.broadcast_mul(&cos)? + low.broadcast_mul(&sin)?)?;
    Tensor::cat(&[low_out, high_out], 3)
}

/// Returns the gates `[N, H]` of the queries `[N, H, D]` before RoPE, 0 for shared heads. A key/value head has
/// `group` query heads.
pub fn gates(queries: &Tensor, router: QueryNormRouter, group: usize) -> Result<Tensor> {
    gates_over(queries, router, group, |deviations| deviations)
}

/// Returns [`gates`] with a backward pass that treats the standard deviations as constants. If two heads share a
/// standard deviation, the gradient through it cancels the gradient through the norms. This function has only the
/// latter.
pub fn gates_over_constants(
    queries: &Tensor,
    router: QueryNormRouter,
    group: usize,
) -> Result<Tensor> {
    gates_over(queries, router, group, |deviations| deviations.detach())
}

fn gates_over(
    queries: &Tensor,
    router: QueryNormRouter,
    group: usize,
    deviations: fn(Tensor) -> Tensor,
) -> Result<Tensor> {
    let (tokens, heads, _) = queries.dims3()?;
    let groups = heads / group;
    let squares = queries.sqr()?.sum(2)?;
    let is_routed = |head: &usize| !router.shared.contains(*head);
    match router.selects {
        Selects::Heads => {
            let routed: Vec<usize> = (0..heads).filter(is_routed).collect();
            normalised_gates(&squares.sqrt()?, &routed, deviations)
        }
        Selects::Groups => {
            let norms =
                (squares.reshape((tokens, groups, group))?.sum(2)? / group as f64)?.sqrt()?;
            let routed: Vec<usize> = (0..groups).filter(|of| is_routed(&(of * group))).collect();
            let gates = placed(&softmax(&chosen(&norms, &routed)?)?, &routed, groups)?;
            let gates = gates.unsqueeze(2)?.broadcast_as((tokens, groups, group))?;
            gates.contiguous()?.reshape((tokens, heads))? / group as f64
        }
    }
}

/// Returns the softmax `[N, M]` of the norms `[N, M]` of `routed` heads over their standard deviation; 0 for other
/// heads.
/// A single head has no standard deviation.
fn normalised_gates(
    norms: &Tensor,
    routed: &[usize],
    deviations: fn(Tensor) -> Tensor,
) -> Result<Tensor> {
    let heads = norms.dim(1)?;
    let norms = chosen(norms, routed)?;
    let centred = norms.broadcast_sub(&norms.mean_keepdim(1)?)?;
    let scores = match routed.len() {
        0 => return Tensor::zeros((norms.dim(0)?, heads), norms.dtype(), &Device::Cpu),
        1 => norms.zeros_like()?,
        count => {
            let variance = (centred.sqr()?.sum_keepdim(1)? / (count as f64 - 1.0))?;
            norms.broadcast_div(&deviations(variance.sqrt()?))?
        }
    };
    placed(&softmax(&scores)?, routed, heads)
}

fn chosen(matrix: &Tensor, columns: &[usize]) -> Result<Tensor> {
    let indices: Vec<u32> = columns.iter().map(|&column| column as u32).collect();
    matrix.index_select(&Tensor::from_vec(indices, columns.len(), &Device::Cpu)?, 1)
}

/// Returns a matrix of `count` columns: the columns of `matrix` in the places `columns`, and zeros elsewhere.
fn placed(matrix: &Tensor, columns: &[usize], count: usize) -> Result<Tensor> {
    // Row i has its 1 in the destination of column i.
    let places = columns.iter().flat_map(|&of| (0..count).map(move |at| f64::from(at == of)));
    let shape = (columns.len(), count);
    matrix.matmul(&Tensor::from_vec(places.collect::<Vec<_>>(), shape, &Device::Cpu)?)
}

pub fn softmax(scores: &Tensor) -> Result<Tensor> {
    let exponentials = scores.broadcast_sub(&scores.max_keepdim(1)?.detach())?.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(1)?)
}

/// Returns `[N, H]`: 1 for shared heads and for selected heads. These have the largest norms, or are in groups with
/// the largest sums of squares; among equals, lower heads first.
pub fn selection(queries: &Tensor, router: QueryNormRouter, group: usize) -> Result<Tensor> {
    let QueryNormRouter { shared, top_k, selects } = router;
    let (top_k, size) = match selects {
        Selects::Heads => (top_k, 1),
        Selects::Groups => (top_k / group, group),
    };
    largest(&queries.sqr()?.sum(2)?, shared, top_k, size)
}

/// Returns `[N, H]`: 1 for shared heads, and for the `top_k` parts of `size` heads with the largest sums of scores.
fn largest(scores: &Tensor, shared: SharedHeads, top_k: usize, size: usize) -> Result<Tensor> {
    let (tokens, heads) = scores.dims2()?;
    let mut mask = Vec::with_capacity(tokens * heads);
    for scores in &scores.to_vec2::<f64>()? {
        let sum = |first: usize| scores[first..first + size].iter().sum::<f64>();
        let mut ranked: Vec<usize> =
            (0..heads).step_by(size).filter(|&head| !shared.contains(head)).collect();
        ranked.sort_by(|&a, &b| sum(b).total_cmp(&sum(a)).then(a.cmp(&b)));
        let chosen = &ranked[..top_k];
        let is_active = |head| shared.contains(head) || chosen.contains(&(head - head % size));
        mask.extend((0..heads).map(|head| f64::from(u8::from(is_active(head)))));
    }
    Tensor::from_vec(mask, (tokens, heads), &Device::Cpu)
}

/// Returns the gates `[N, H]` of the logits `[N, L]` of H heads, 0 for shared heads.
pub fn logit_gates(logits: &Tensor, router: LogitRouter, heads: usize) -> Result<Tensor> {
    let routed: Vec<usize> = (0..heads).filter(|&head| !router.shared.contains(head)).collect();
    placed(&softmax(&chosen(logits, &routed)?)?, &routed, heads)
}

/// Returns `[N, H]`: 1 for shared heads and for the routed heads with the largest logits; among equal logits, lower
/// heads first.
pub fn logit_selection(logits: &Tensor, router: LogitRouter, heads: usize) -> Result<Tensor> {
    largest(&logits.narrow(1, 0, heads)?, router.shared, router.top_k, 1)
}

/// Returns the weights `[N, H]` of one-stage or two-stage routing of the logits `[N, L]` and the selection
/// `[N, H]`.
pub fn logit_weights(logits: &Tensor, router: LogitRouter, mask: &Tensor) -> Result<Tensor> {
    let heads = mask.dim(1)?;
    let kept = (logit_gates(logits, router, heads)? * mask)?;
    let routed = (kept.broadcast_div(&kept.sum_keepdim(1)?)? * router.top_k as f64)?;
    let shared: Vec<usize> = router.shared.heads().collect();
    if shared.is_empty() {
        return Ok(routed);
    }
    let of_shared = (softmax(&chosen(logits, &shared)?)? * shared.len() as f64)?;
    let of_shared = placed(&of_shared, &shared, heads)?;
    if router.weights == HeadWeights::OneStage {
        return of_shared + routed;
    }
    let stages = (softmax(&logits.narrow(1, heads, 2)?)? * 2.0)?;
    let weighed = |part: Tensor, stage| part.broadcast_mul(&stages.narrow(1, stage, 1)?);
    weighed(of_shared, 0)? + weighed(routed, 1)?
}

/// Returns weights `[N, H]` with the mask as their value. Their gradient is added to the gates `[N, H]` of
/// the selected heads: mask * (1 + gate - detach(gate)).
pub fn straight_through(mask: &Tensor, gates: &Tensor) -> Result<Tensor> {
    mask * ((gates - gates.detach())? + 1.0)?
}

/// Returns `sum_i f_i P_i` of the gates `[N, H]` and the selection `[N, H]`.
pub fn balance_loss(mask: &Tensor, gates: &Tensor) -> Result<Tensor> {
    (mask.mean(0)? * gates.mean(0)?)?.sum_all()
}

/// Returns `[B, T, keys]`: 0 if a query sees a key, otherwise minus infinity.
pub fn visibility(
    (batch, queries, keys): (usize, usize, usize),
    causal: bool,
    query_offset: usize,
    document_start: Option<&[u32]>,
) -> Result<Tensor> {
    let mut mask = Vec::with_capacity(batch * queries * keys);
    for token in 0..batch * queries {
        let first = document_start.map_or(0, |document_start| document_start[token] as usize);
        let last = if causal { query_offset + token % queries } else { keys - 1 };
        let sees = |key| key >= first && key <= last;
        mask.extend((0..keys).map(|key| if sees(key) { 0.0 } else { f64::NEG_INFINITY }));
    }
    Tensor::from_vec(mask, (batch, queries, keys), &Device::Cpu)
}

/// The factor of the scores in all tests with this reference.
pub const SCORE_FACTOR: f32 = 1.25;

/// Returns the output `[B, T, H, D]` of every head before its weight, and the log-sum-exp `[B, T, H]`.
///
/// q `[B, T, H, D]`, k and v `[B, keys, G, D]`, mask `[B, T, keys]`.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor) -> Result<(Tensor, Tensor)> {
    let (_, _, heads, head_dim) = q.dims4()?;
    let group = heads / k.dim(2)?;
    let owner: Vec<u32> = (0..heads).map(|head| (head / group) as u32).collect();
    let owner = Tensor::from_vec(owner, heads, &Device::Cpu)?;
    let by_head =
        |x: &Tensor| x.contiguous()?.index_select(&owner, 2)?.transpose(1, 2)?.contiguous();
    let (k, v) = (by_head(k)?, by_head(v)?);
    let q = q.transpose(1, 2)?.contiguous()?;
    let scale = f64::from(SCORE_FACTOR) / (head_dim as f64).sqrt();
    let scores = (q.matmul(&k.t()?.contiguous()?)? * scale)?;
    let scores = scores.broadcast_add(&mask.unsqueeze(1)?)?;
    let log_sum_exp = log_sum_exp(&scores)?;
    let probabilities = scores.broadcast_sub(&log_sum_exp.unsqueeze(3)?)?.exp()?;
    Ok((probabilities.matmul(&v)?.transpose(1, 2)?, log_sum_exp.transpose(1, 2)?))
}

/// Computes one AdamW step: the new (parameters, first moment, second moment).
pub fn adamw(
    step: &AdamW,
    gradient: &Tensor,
    [parameter, first, second]: [&Tensor; 3],
) -> Result<[Tensor; 3]> {
    let &AdamW { learning_rate, beta1, beta2, eps, weight_decay, clip_norm, grad_norm, step } =
        step;
    let gradient = (gradient * (clip_norm / (grad_norm + 1e-6)).min(1.0))?;
    let first = ((first * beta1)? + (&gradient * (1.0 - beta1))?)?;
    let second = ((second * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
    let mean = (&first / (1.0 - beta1.powf(step as f64)))?;
    let root = (&second / (1.0 - beta2.powf(step as f64)))?.sqrt()?;
    let decayed = (parameter * (1.0 - learning_rate * weight_decay))?;
    let parameter = (decayed - ((mean / (root + eps)?)? * learning_rate)?)?;
    Ok([parameter, first, second])
}
