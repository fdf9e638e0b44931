//! A Mixture-of-Head model against section 2 of docs/design.md in f64, whose gradients candle's
//! autograd takes: losses, selections, gates' gradients and all others, with the same heads in
//! every layer and with other ones.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::HashMap;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::{silu, softmax};
use moh_kernels::Cpu;
use moh_model::parameters::FlatBuffers;
use moh_model::{
    Activations, Architecture, AuxiliaryLoss, LayerHeads, ModelConfig, MohConfig, PassShape,
    Recompute, RouterKind, StepSums, Sums,
};
use support::{SCALE, SHAPE, VOCABULARY, config, model, upload};

/// What is left of f32's rounding over a pass of a few blocks.
const TOLERANCE: f64 = 2e-5;

/// A model in f64.
struct Reference {
    config: ModelConfig,
    weights: HashMap<String, Var>,
}

/// What a pass of the reference gives.
struct Pass {
    cross_entropy: Tensor,
    /// The mean of the layers that route.
    balance: Tensor,
    /// `[N, R]` of each layer.
    masks: Vec<Vec<u8>>,
}

/// What a router gives: a weight for every (token, head), the balance loss and the selection.
struct Routed {
    weights: Tensor,
    balance: Tensor,
    mask: Vec<u8>,
}

impl Reference {
    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        x.matmul(&self.weights[&format!("{name}.weight")].t()?)
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + self.config.rms_norm_eps)?;
        x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(&self.weights[&format!("{name}.weight")])
    }

    /// `[B, T, heads, D]` with the pairs (i, i + D / 2) turned.
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

    /// Items 2 to 7, of queries `[N, H, D]` before RoPE.
    fn route(&self, queries: &Tensor, heads: LayerHeads) -> Result<Routed> {
        let (tokens, count, _) = queries.dims3()?;
        let routed = count - heads.shared;
        let norms = queries.narrow(1, heads.shared, routed)?.sqr()?.sum(2)?.sqrt()?;
        let deviation = norms.broadcast_sub(&norms.mean_keepdim(1)?)?;
        let std = (deviation.sqr()?.sum_keepdim(1)? / (routed as f64 - 1.0))?.sqrt()?;
        let gates = softmax(&norms.broadcast_div(&std)?, 1)?;
        let mask: Vec<u8> =
            norms.to_vec2::<f64>()?.iter().flat_map(|norms| select(norms, heads.top_k)).collect();
        let selected = Tensor::from_slice(&mask, (tokens, routed), &Device::Cpu)?;
        let selected = selected.to_dtype(DType::F64)?;
        let balance = (selected.mean(0)? * gates.mean(0)?)?.sum_all()?;
        let through = (&selected * &gates)?;
        let weights = (&selected + (&through - through.detach())?)?;
        let shared = Tensor::ones((tokens, heads.shared), DType::F64, &Device::Cpu)?;
        Ok(Routed { weights: Tensor::cat(&[shared, weights], 1)?, balance, mask })
    }

    /// Causal attention of `[B, T, heads, D]`, as `[N, H, D]`.
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

    fn forward(&self, ids: &[u32], targets: &[u32], batch: usize) -> Result<Pass> {
        let (device, config) = (&Device::Cpu, &self.config);
        let (tokens, length) = (ids.len(), ids.len() / batch);
        let ids = Tensor::from_slice(ids, tokens, device)?;
        let mut x = self.weights["model.embed_tokens.weight"].index_select(&ids, 0)?;
        let mut balance = Tensor::zeros((), DType::F64, device)?;
        let mut masks = Vec::new();
        for layer in 0..config.num_hidden_layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let normed = self.norm(&x, &name("input_layernorm"))?;
            let heads = |part: &str, count: usize| {
                let shape = (batch, length, count, config.head_dim);
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
            let of_layer = config.layer_heads(layer);
            let mut mask = Vec::new();
            if of_layer.shared < count {
                let queries = q.reshape((tokens, count, config.head_dim))?;
                let routed = self.route(&queries, of_layer)?;
                attended = attended.broadcast_mul(&routed.weights.unsqueeze(2)?)?;
                balance = (balance + routed.balance)?;
                mask = routed.mask;
            }
            masks.push(mask);
            let attended = attended.reshape((tokens, config.query_width()))?;
            x = (x + self.linear(&attended, &name("self_attn.o_proj"))?)?;
            let normed = self.norm(&x, &name("post_attention_layernorm"))?;
            let gate = silu(&self.linear(&normed, &name("mlp.gate_proj"))?)?;
            let up = self.linear(&normed, &name("mlp.up_proj"))?;
            x = (x + self.linear(&(gate * up)?, &name("mlp.down_proj"))?)?;
        }
        let logits = self.linear(&self.norm(&x, "model.norm")?, "lm_head")?;
        let targets = Tensor::from_slice(targets, tokens, device)?;
        let routing = masks.iter().filter(|mask| !mask.is_empty()).count();
        Ok(Pass {
            cross_entropy: candle_nn::loss::cross_entropy(&logits, &targets)?,
            balance: (balance / routing as f64)?,
            masks,
        })
    }
}

/// 1 for the `top_k` largest norms, lower heads first among equals.
fn select(norms: &[f64], top_k: usize) -> Vec<u8> {
    let mut order: Vec<usize> = (0..norms.len()).collect();
    order.sort_by(|&a, &b| norms[b].total_cmp(&norms[a]));
    (0..norms.len()).map(|head| u8::from(order[..top_k].contains(&head))).collect()
}

/// Two sequences of 40 tokens and their targets, as [`upload`] has them.
fn micro_batch() -> (Vec<u32>, Vec<u32>) {
    let ids: Vec<u32> = (0..80).map(|i| (i * 37 + i * i) % VOCABULARY).collect();
    let targets = ids.iter().map(|id| (id * 7 + 3) % VOCABULARY).collect();
    (ids, targets)
}

#[track_caller]
fn close(found: f64, expected: f64, what: &str) {
    assert!(
        (found - expected).abs() <= TOLERANCE * expected.abs(),
        "{what}: {found}, not {expected}"
    );
}

fn is_the_reference(architecture: Architecture, moh: MohConfig, recompute: Recompute) {
    let config = config(10, false, Some(moh));
    let config = ModelConfig { architecture, num_hidden_layers: 4, ..config };
    let mut model = model::<Cpu, f32>(Cpu, config.clone());
    let shape = PassShape { recompute, document_mask: false, ..SHAPE };
    let mut activations = Activations::new(&model, shape).unwrap();
    upload(&Cpu, &mut activations, 0);
    let mut gradients = FlatBuffers::<Cpu, f32>::zeros(&Cpu, model.layout()).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    model.forward_backward(&mut activations, &mut gradients, SCALE, &mut sums).unwrap();

    let weights = model.layout().segments().map(|(flat, segment)| {
        let values = model.weights().read(&Cpu, flat, segment).unwrap();
        let values = values.iter().map(|&value| f64::from(value)).collect();
        let tensor = Tensor::from_vec(values, segment.shape(), &Device::Cpu).unwrap();
        (segment.name.clone(), Var::from_tensor(&tensor).unwrap())
    });
    let reference = Reference { weights: weights.collect(), config };
    let (ids, targets) = micro_batch();
    let expected = reference.forward(&ids, &targets, 2).unwrap();
    if recompute != Recompute::Block {
        assert_eq!(model.routed_mask(&activations).unwrap(), expected.masks);
    }
    let Sums { cross_entropy, auxiliary, .. } = sums.take(&Cpu).unwrap();
    let balance = auxiliary[AuxiliaryLoss::Balance];
    let number = |tensor: &Tensor| tensor.to_scalar::<f64>().unwrap();
    close(cross_entropy / 80.0, number(&expected.cross_entropy), "cross-entropy");
    close(balance, number(&expected.balance), "balance loss");

    let balance = (f64::from(SCALE.auxiliary[AuxiliaryLoss::Balance]) * expected.balance).unwrap();
    let all = (expected.cross_entropy + balance).unwrap().backward().unwrap();
    for (flat, segment) in model.layout().segments() {
        let found = gradients.read(&Cpu, flat, segment).unwrap();
        let expected = all.get(&reference.weights[&segment.name]).unwrap();
        let expected = expected.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let square = |sum: f64, x: f64| sum + x * x;
        let norm = expected.iter().copied().fold(0.0, square).sqrt();
        let differences = found.iter().zip(&expected).map(|(&a, &b)| f64::from(a) - b);
        let error = differences.fold(0.0, square).sqrt() / norm;
        assert!(error < TOLERANCE, "{}: gradient off by {error}", segment.name);
    }
}

#[test]
fn passes_are_those_of_the_formulas() {
    let counts = |counts: [usize; 4]| counts.into_iter().collect();
    for (shared, top_k) in [
        ([3; 4], [2; 4]),
        // Dense, few shared heads, most of them routed and chosen, routed heads of which none is
        // chosen.
        ([8, 1, 2, 5], [0, 4, 6, 0]),
    ] {
        let router = RouterKind::QueryNorm;
        let (shared_heads, routed_top_k) = (counts(shared), counts(top_k));
        let moh = MohConfig { router, shared_heads, routed_top_k };
        for recompute in [Recompute::None, Recompute::Cheap, Recompute::Block] {
            for architecture in Architecture::ALL {
                is_the_reference(architecture, moh.clone(), recompute);
            }
        }
    }
}
