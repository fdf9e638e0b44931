//! A Mixture-of-Head model in f64 (section 2 of docs/design.md). candle's autograd computes its
//! gradients.

use std::collections::HashMap;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::{silu, softmax};
use moh_kernels::Cpu;
use moh_kernels::cross_entropy::IGNORED;
use moh_kernels::router::SharedHeads;
use moh_model::{AuxiliaryLoss, FlatBuffers, Model, ModelConfig, RouterKind, Sums};

use crate::models::{SCALE, VOCABULARY};

/// Bound of f32's rounding error over a pass of a few blocks.
const TOLERANCE: f64 = 2e-5;

/// A model in f64.
pub struct Reference {
    pub config: ModelConfig,
    pub weights: HashMap<String, Var>,
}

/// The inputs that a router may read.
struct RouterInput<'a> {
    layer: usize,
    /// The block's normed input, `[N, C]`.
    x: &'a Tensor,
    /// Queries before RoPE, `[N, H, D]`.
    queries: &'a Tensor,
}

/// The results of a pass of the reference.
pub struct Pass {
    /// The mean over the targets that are not ignored.
    pub cross_entropy: Tensor,
    /// The mean over the layers that route.
    pub balance: Tensor,
    /// `[N, R]` of each layer.
    pub masks: Vec<Vec<u8>>,
}

/// The results of a router: a weight for every (token, head), the balance loss and the selection.
pub struct Routed {
    pub weights: Tensor,
    pub balance: Tensor,
    pub mask: Vec<u8>,
}

impl Reference {
    /// Creates a model with these weights, as the reference of `model`.
    pub fn of(model: &Model<Cpu>) -> Self {
        let weights = model.layout().segments().map(|(flat, segment)| {
            let values = model.weights().read(&Cpu, flat, segment).unwrap();
            let values = values.iter().map(|&value| f64::from(value)).collect();
            let tensor = Tensor::from_vec(values, segment.shape(), &Device::Cpu).unwrap();
            (segment.name.clone(), Var::from_tensor(&tensor).unwrap())
        });
        Reference { weights: weights.collect(), config: model.config().clone() }
    }

    /// Returns `x W^T`.
    pub fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        x.matmul(&self.weights[&format!("{name}.weight")].t()?)
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + self.config.rms_norm_eps)?;
        x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(&self.weights[&format!("{name}.weight")])
    }

    /// Returns `[B, T, heads, D]` with the pairs (i, i + D / 2) rotated.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let (_, length, _, width) = x.dims4()?;
        let half = width / 2;
        let angle = |at: usize| {
            let (position, i) = ((at / half) as f64, (at % half) as f64);
            position * self.config.rope.theta.powf(-2.0 * i / width as f64)
        };
        let table = |of: fn(f64) -> f64| {
            let values: Vec<f64> = (0..length * half).map(|at| of(angle(at))).collect();
            Tensor::from_vec(values, (1, length, 1, half), &Device::Cpu)
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        let (a, b) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second], 3)
    }

    /// Returns the causal attention of `[B, T, heads, D]`, as `[N, H, D]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (batch, length, heads, width) = q.dims4()?;
        let repeated = |x: &Tensor| {
            let (group, kv) = (self.config.group_size(), self.config.num_key_value_heads);
            let shape = (batch, length, kv, group, width);
            x.unsqueeze(3)?.broadcast_as(shape)?.reshape((batch, length, heads, width))
        };
        let by_head = |x: &Tensor| x.transpose(1, 2)?.contiguous();
        let (q, k, v) = (by_head(q)?, by_head(&repeated(k)?)?, by_head(&repeated(v)?)?);
        let hidden = (0..length * length)
            .map(|at| if at % length > at / length { -1e30 } else { 0.0 })
            .collect::<Vec<f64>>();
        let hidden = Tensor::from_vec(hidden, (length, length), &Device::Cpu)?;
        let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? / (width as f64).sqrt())?;
        let attended = softmax(&scores.broadcast_add(&hidden)?, D::Minus1)?.matmul(&v)?;
        by_head(&attended)?.reshape((batch * length, heads, width))
    }

    /// Returns the losses of a micro-batch of `batch` sequences.
    pub fn forward(&self, ids: &[u32], targets: &[u32], batch: usize) -> Result<Pass> {
        let device = &Device::Cpu;
        let (logits, balance, masks) = self.logits(ids, batch)?;
        // The mean excludes rows with an ignored target.
        let (rows, targets) = counted(targets);
        let logits = logits.index_select(&Tensor::new(rows, device)?, 0)?;
        let targets = Tensor::new(targets, device)?;
        let routing = masks.iter().filter(|mask| !mask.is_empty()).count();
        Ok(Pass {
            cross_entropy: candle_nn::loss::cross_entropy(&logits, &targets)?,
            balance: (balance / routing as f64)?,
            masks,
        })
    }

    /// Returns the logits `[N, V]` of a micro-batch of `batch` sequences, the sum of the layers' balance losses, and
    /// their masks.
    pub fn logits(&self, ids: &[u32], batch: usize) -> Result<(Tensor, Tensor, Vec<Vec<u8>>)> {
        let mut x = self.embed(ids)?;
        let mut balance = Tensor::zeros((), DType::F64, &Device::Cpu)?;
        let mut masks = Vec::new();
        for layer in 0..self.config.num_hidden_layers {
            let (attention, routed) = self.attention(layer, &x, batch)?;
            let mut mask = Vec::new();
            if let Some(routed) = routed {
                balance = (balance + routed.balance)?;
                mask = routed.mask;
            }
            masks.push(mask);
            x = self.mlp(layer, &(x + attention)?)?;
        }
        Ok((self.linear(&self.norm(&x, "model.norm")?, "lm_head")?, balance, masks))
    }

    /// Returns the residual stream before the first layer, `[N, C]`.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        let ids = Tensor::from_slice(ids, ids.len(), &Device::Cpu)?;
        self.weights["model.embed_tokens.weight"].index_select(&ids, 0)
    }

    /// Returns the attention output of a layer for the residual stream `x` before it, both `[N, C]`, and its routing.
    pub fn attention(
        &self,
        layer: usize,
        x: &Tensor,
        batch: usize,
    ) -> Result<(Tensor, Option<Routed>)> {
        let (config, tokens) = (&self.config, x.dim(0)?);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let normed = self.norm(x, &name("input_layernorm"))?;
        let heads = |part: &str, count: usize| {
            let shape = (batch, tokens / batch, count, config.head_dim);
            self.linear(&normed, &name(&format!("self_attn.{part}_proj")))?.reshape(shape)
        };
        let (count, kv) = (config.num_attention_heads, config.num_key_value_heads);
        let (q, k, v) = (heads("q", count)?, heads("k", kv)?, heads("v", kv)?);
        let prepare = |heads: &Tensor, norm: &str| {
            let norms = config.architecture.norms_queries_and_keys();
            let normed = norms.then(|| self.norm(heads, &name(&format!("self_attn.{norm}"))));
            self.rotate(normed.transpose()?.as_ref().unwrap_or(heads))
        };
        let mut attended = self.attend(&prepare(&q, "q_norm")?, &prepare(&k, "k_norm")?, &v)?;
        let queries = &q.reshape((tokens, count, config.head_dim))?;
        let routed = routed(self, &RouterInput { layer, x: &normed, queries })?;
        if let Some(routed) = &routed {
            attended = attended.broadcast_mul(&routed.weights.unsqueeze(2)?)?;
        }
        let attended = attended.reshape((tokens, config.query_width()))?;
        Ok((self.linear(&attended, &name("self_attn.o_proj"))?, routed))
    }

    /// Returns the residual stream after a layer. `x` is the stream after the layer's attention. Both are `[N, C]`.
    pub fn mlp(&self, layer: usize, x: &Tensor) -> Result<Tensor> {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let normed = self.norm(x, &name("post_attention_layernorm"))?;
        let gate = silu(&self.linear(&normed, &name("mlp.gate_proj"))?)?;
        let up = self.linear(&normed, &name("mlp.up_proj"))?;
        x + self.linear(&(gate * up)?, &name("mlp.down_proj"))?
    }

    /// Compares the losses, and the gradients of the total loss, with the results of a model's pass.
    #[track_caller]
    pub fn check(
        &self,
        model: &Model<Cpu>,
        gradients: &FlatBuffers<Cpu>,
        sums: Sums,
        expected: &Pass,
    ) {
        let Sums { cross_entropy, auxiliary, .. } = sums;
        let balance = auxiliary[AuxiliaryLoss::Balance];
        let number = |tensor: &Tensor| tensor.to_scalar::<f64>().unwrap();
        close(cross_entropy / 80.0, number(&expected.cross_entropy), "cross-entropy");
        close(balance, number(&expected.balance), "balance loss");
        self.check_gradients(model, gradients, expected);
    }

    /// Compares the gradients of the total loss with a model's gradients.
    #[track_caller]
    pub fn check_gradients(
        &self,
        model: &Model<Cpu>,
        gradients: &FlatBuffers<Cpu>,
        expected: &Pass,
    ) {
        let balance =
            (f64::from(SCALE.auxiliary[AuxiliaryLoss::Balance]) * &expected.balance).unwrap();
        let all = (&expected.cross_entropy + balance).unwrap().backward().unwrap();
        for (flat, segment) in model.layout().segments() {
            let found = gradients.read(&Cpu, flat, segment).unwrap();
            let expected = all.get(&self.weights[&segment.name]).unwrap();
            assert_gradient(&segment.name, &found, expected);
        }
    }
}

/// Compares the gradient of a tensor.
#[track_caller]
pub fn assert_gradient(name: &str, found: &[f32], expected: &Tensor) {
    let expected = expected.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let square = |sum: f64, x: f64| sum + x * x;
    let norm = expected.iter().copied().fold(0.0, square).sqrt();
    let differences = found.iter().zip(&expected).map(|(&a, &b)| f64::from(a) - b);
    let error = differences.fold(0.0, square).sqrt() / norm;
    assert!(error < TOLERANCE, "{name}: gradient off by {error}");
}

/// Returns the rows with targets that are not ignored, and these targets.
pub fn counted(targets: &[u32]) -> (Vec<u32>, Vec<u32>) {
    (0..).zip(targets).filter(|(_, target)| **target != IGNORED).unzip()
}

/// Routes the tokens of a layer: items 2 to 7 of query-norm, and the changes of other routers. `None` for a dense
/// layer.
fn routed(reference: &Reference, input: &RouterInput<'_>) -> Result<Option<Routed>> {
    let config = &reference.config;
    let heads = config.layer_heads(input.layer);
    let (tokens, count, _) = input.queries.dims3()?;
    let size = config.group_size();
    let is_routed = |head: &usize| !heads.shared.contains(*head);
    if (0..count).filter(is_routed).count() == 0 {
        return Ok(None);
    }
    let router = config.moh.as_ref().unwrap().router;
    if router.has_matrices() {
        return by_logits(reference, input, router).map(Some);
    }
    let squares = input.queries.sqr()?.sum(2)?;
    // Gates [N, R] and the selection of each token, over the routed heads in ascending order.
    let routed: Vec<usize> = (0..count).filter(is_routed).collect();
    let indices: Vec<u32> = routed.iter().map(|&head| head as u32).collect();
    let of = |table: &Tensor| {
        table.index_select(&Tensor::from_slice(&indices, indices.len(), &Device::Cpu)?, 1)
    };
    let (scores, ranked) = match router {
        RouterKind::Group => {
            let groups = squares.reshape((tokens, count / size, size))?.sum_keepdim(2)?;
            let sums = groups.broadcast_as((tokens, count / size, size))?.contiguous()?;
            let sums = sums.reshape((tokens, count))?;
            (of(&(&sums / size as f64)?.sqrt()?)?, of(&sums)?)
        }
        _ => {
            let norms = of(&squares.sqrt()?)?;
            let deviation = norms.broadcast_sub(&norms.mean_keepdim(1)?)?;
            let squared = deviation.sqr()?.sum_keepdim(1)?;
            let std = (squared / (routed.len() as f64 - 1.0))?.sqrt()?;
            (norms.broadcast_div(&std)?, norms)
        }
    };
    let gates = softmax(&scores, 1)?;
    let ranked = ranked.to_vec2::<f64>()?;
    let mask: Vec<u8> = ranked.iter().flat_map(|row| select(row, heads.top_k)).collect();
    let routed = routed.len();
    let (mut balance, _, mut weights) = selected_gates(&mask, &gates)?;
    if router == RouterKind::Static {
        // With a single routed head, the gate is not a number.
        let selected = Tensor::from_slice(&mask, gates.dims2()?, &Device::Cpu)?;
        (balance, weights) = (balance.zeros_like()?, selected.to_dtype(DType::F64)?);
    }
    // A shared head has weight 1 for every token.
    let of_shared = Tensor::ones((tokens, count - routed), DType::F64, &Device::Cpu)?;
    Ok(Some(Routed { weights: by_head(heads.shared, &of_shared, &weights)?, balance, mask }))
}

/// Returns the weight of every (token, head), from the weights of shared and of routed heads, in ascending order.
fn by_head(shared: SharedHeads, of_shared: &Tensor, of_routed: &Tensor) -> Result<Tensor> {
    let (mut next_shared, mut next_routed) = (0.., 0..);
    let heads = 0..of_shared.dim(1)? + of_routed.dim(1)?;
    let weights = heads.map(|head| match shared.contains(head) {
        true => of_shared.narrow(1, next_shared.next().unwrap(), 1),
        false => of_routed.narrow(1, next_routed.next().unwrap(), 1),
    });
    Tensor::cat(&weights.collect::<Result<Vec<_>>>()?, 1)
}

/// Returns the balance loss, the gates of selected heads, and the weights of selected heads, which are 1 and pass
/// gradients to the gates. The selection and the gates of the routed heads are `[N, R]`.
fn selected_gates(mask: &[u8], gates: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let selected = Tensor::from_slice(mask, gates.dims2()?, &Device::Cpu)?;
    let selected = selected.to_dtype(DType::F64)?;
    let balance = (selected.mean(0)? * gates.mean(0)?)?.sum_all()?;
    let through = (&selected * gates)?;
    let weights = (&selected + (&through - through.detach())?)?;
    Ok((balance, through, weights))
}

fn by_logits(reference: &Reference, input: &RouterInput<'_>, router: RouterKind) -> Result<Routed> {
    let config = &reference.config;
    let (heads, count) = (config.layer_heads(input.layer), config.num_attention_heads);
    let name = format!("model.layers.{}.self_attn.router", input.layer);
    let logits = reference.linear(input.x, &name)?;
    let tokens = logits.dim(0)?;
    let (shared, routed): (Vec<u32>, Vec<u32>) =
        (0..count as u32).partition(|&head| heads.shared.contains(head as usize));
    let of = |heads: &[u32]| {
        logits.index_select(&Tensor::from_slice(heads, heads.len(), &Device::Cpu)?, 1)
    };
    let gates = softmax(&of(&routed)?, 1)?;
    let ranked = of(&routed)?.to_vec2::<f64>()?;
    let mask: Vec<u8> = ranked.iter().flat_map(|row| select(row, heads.top_k)).collect();
    let (mut balance, through, mut of_routed) = selected_gates(&mask, &gates)?;
    let mut of_shared = Tensor::ones((tokens, shared.len()), DType::F64, &Device::Cpu)?;
    if router.weighs() {
        balance = (balance * routed.len() as f64)?;
        of_shared = (softmax(&of(&shared)?, 1)? * shared.len() as f64)?;
        of_routed = (through.broadcast_div(&through.sum_keepdim(1)?)? * heads.top_k as f64)?;
    }
    if router == RouterKind::TwoStage {
        let stages = reference.linear(input.x, &format!("{name}.stages"))?;
        let stages = (softmax(&stages, 1)? * 2.0)?;
        of_shared = of_shared.broadcast_mul(&stages.narrow(1, 0, 1)?)?;
        of_routed = of_routed.broadcast_mul(&stages.narrow(1, 1, 1)?)?;
    }
    Ok(Routed { weights: by_head(heads.shared, &of_shared, &of_routed)?, balance, mask })
}

/// Returns 1 for the `top_k` largest scores, and 0 otherwise. Among equal scores, lower heads are first.
fn select(scores: &[f64], top_k: usize) -> Vec<u8> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    (0..scores.len()).map(|head| u8::from(order[..top_k].contains(&head))).collect()
}

/// Returns two sequences of 40 tokens and their targets, as the tests' `upload` has them.
pub fn micro_batch() -> (Vec<u32>, Vec<u32>) {
    let ids: Vec<u32> = (0..80).map(|i| (i * 37 + i * i) % VOCABULARY).collect();
    let targets = ids.iter().map(|id| (id * 7 + 3) % VOCABULARY).collect();
    (ids, targets)
}

#[track_caller]
pub fn close(found: f64, expected: f64, what: &str) {
    let most = TOLERANCE * expected.abs();
    assert!((found - expected).abs() <= most, "{what}: {found}, not {expected}");
}
