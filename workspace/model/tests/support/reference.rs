//! A model's logits in plain loops of f64, written from the formulas: dense or Mixture-of-Head, with query
//! and key norms where the architecture has them.

use std::collections::HashMap;

use moh_model::{LayerHeads, ModelConfig, rope};

/// Tensors by name.
pub type Weights = HashMap<String, Vec<f32>>;

/// Rows of a matrix.
type Rows = Vec<Vec<f64>>;

fn linear(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let rows = weight.chunks_exact(x.len());
    rows.map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
}

fn rms_norm(x: &[f64], weight: &[f32], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = (mean + eps).sqrt().recip();
    x.iter().zip(weight).map(|(x, &weight)| x * scale * f64::from(weight)).collect()
}

fn rotate(head: &[f64], position: usize, frequencies: &[f64]) -> Vec<f64> {
    let (low, high) = head.split_at(frequencies.len());
    let angles = frequencies.iter().map(|frequency| (position as f64 * frequency).sin_cos());
    let turned = low.iter().zip(high).zip(angles);
    let (low, high): (Vec<f64>, Vec<f64>) =
        turned.map(|((a, b), (sin, cos))| (a * cos - b * sin, b * cos + a * sin)).unzip();
    [low, high].concat()
}

/// The heads of a token that are computed: the shared ones, and the routed ones of largest norm.
fn active(config: &ModelConfig, layer: usize, queries: &[f64]) -> Vec<bool> {
    let LayerHeads { shared, top_k } = config.layer_heads(layer);
    let norms: Vec<f64> =
        queries.chunks_exact(config.head_dim).map(|q| q.iter().map(|x| x * x).sum()).collect();
    let rank =
        |head: usize| (shared..norms.len()).filter(|&other| norms[other] > norms[head]).count();
    let on = |head| head < shared || rank(head) < top_k;
    (0..norms.len()).map(on).collect()
}

/// Attention of one layer before its output projection.
fn attention(
    config: &ModelConfig,
    weights: &Weights,
    layer: usize,
    x: &Rows,
    frequencies: &[f64],
) -> Rows {
    let (dim, group) = (config.head_dim, config.group_size());
    let named = |name: &str| &weights[&format!("model.layers.{layer}.self_attn.{name}.weight")];
    let project = |name: &str| x.iter().map(|x| linear(x, named(name))).collect::<Rows>();
    let (queries, keys, values) = (project("q_proj"), project("k_proj"), project("v_proj"));
    let norms = config.architecture.norms_queries_and_keys();
    let prepare = |row: &[f64], norm: &str, position| {
        let heads = row.chunks_exact(dim).map(|head| {
            let normed = norms.then(|| rms_norm(head, named(norm), config.rms_norm_eps));
            rotate(normed.as_deref().unwrap_or(head), position, frequencies)
        });
        heads.collect::<Rows>()
    };
    let prepared = |rows: &Rows, norm: &str| {
        rows.iter().enumerate().map(|(t, row)| prepare(row, norm, t)).collect::<Vec<Rows>>()
    };
    let (rotated, keys) = (prepared(&queries, "q_norm"), prepared(&keys, "k_norm"));
    let head = |t: usize, head: usize| {
        let of = head / group;
        let scores: Vec<f64> = (0..=t)
            .map(|s| rotated[t][head].iter().zip(&keys[s][of]).map(|(q, k)| q * k).sum::<f64>())
            .map(|score| (score / (dim as f64).sqrt()).exp())
            .collect();
        let sum: f64 = scores.iter().sum();
        let value = |i| scores.iter().enumerate().map(|(s, p)| p * values[s][of * dim + i]).sum();
        (0..dim)
            .map(|i| {
                let value: f64 = value(i);
                value / sum
            })
            .collect::<Vec<f64>>()
    };
    let row = |t: usize| {
        let on = active(config, layer, &queries[t]);
        let heads = (0..config.num_attention_heads)
            .flat_map(|h| if on[h] { head(t, h) } else { vec![0.0; dim] });
        heads.collect()
    };
    (0..x.len()).map(row).collect()
}

fn swiglu(gate: Vec<f64>, up: Vec<f64>) -> Vec<f64> {
    gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
}

/// The logits of every token, `[T, V]`.
pub fn logits(config: &ModelConfig, weights: &Weights, ids: &[u32]) -> Vec<f64> {
    let (width, eps) = (config.hidden_size, config.rms_norm_eps);
    let frequencies = rope::frequencies(&config.rope, config.head_dim);
    let embedding = &weights["model.embed_tokens.weight"];
    let row = |&id: &u32| embedding[id as usize * width..][..width].iter().map(|&x| x.into());
    let mut stream: Rows = ids.iter().map(|id| row(id).collect()).collect();
    let add = |stream: &mut Rows, branch: Rows| {
        for (x, y) in stream.iter_mut().flatten().zip(branch.iter().flatten()) {
            *x += y;
        }
    };
    let norm = |stream: &Rows, weight: &[f32]| -> Rows {
        stream.iter().map(|x| rms_norm(x, weight, eps)).collect()
    };
    for layer in 0..config.num_hidden_layers {
        let named = |name: &str| &weights[&format!("model.layers.{layer}.{name}.weight")];
        let normed = norm(&stream, named("input_layernorm"));
        let heads = attention(config, weights, layer, &normed, &frequencies);
        let output = named("self_attn.o_proj");
        add(&mut stream, heads.iter().map(|x| linear(x, output)).collect());
        let mlp = |x: &Vec<f64>| {
            let [gate, up] = ["mlp.gate_proj", "mlp.up_proj"].map(|name| linear(x, named(name)));
            linear(&swiglu(gate, up), named("mlp.down_proj"))
        };
        let branch = norm(&stream, named("post_attention_layernorm")).iter().map(mlp).collect();
        add(&mut stream, branch);
    }
    let head = weights.get("lm_head.weight").unwrap_or(embedding);
    let normed = norm(&stream, &weights["model.norm.weight"]);
    normed.iter().flat_map(|x| linear(x, head)).collect()
}
