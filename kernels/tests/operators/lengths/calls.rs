//! Calls of every operator on buffers of given lengths, in the order of its arguments.

use super::{ATTENTION, HEAD, QUERIES, ROUTER, ROW, SHAPE, STEP, TOKENS, WIDTH};
use crate::reference::table;
use half::bf16;
use moh_kernels::adamw::AdamWUpdate;
use moh_kernels::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, KeyValues, Selection,
};
use moh_kernels::cross_entropy::{CrossEntropyArgs, HeadGradients};
use moh_kernels::embedding::{EmbeddingBackward, EmbeddingForward};
use moh_kernels::key_value_cache::KeyValueAppend;
use moh_kernels::linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use moh_kernels::qk_norm::{QkNormBackward, QkNormForward};
use moh_kernels::ranks::{Heads, VocabularyRows};
use moh_kernels::rms_norm::{RmsNormBackward, RmsNormForward};
use moh_kernels::rope::{QkvShape, RopeArgs};
use moh_kernels::router::query_norm::{
    QueryNormBackward, QueryNormForward, QueryNormRopeBackward, QueryNormRopeForward,
};
use moh_kernels::router::{RouterGradient, Routing};
use moh_kernels::{Accumulation, Backend, Result, Scalar, View};

const ROWS: VocabularyRows = VocabularyRows { vocab_size: 7, first: 0, count: 7 };

/// Runs an operator on buffers of these lengths.
pub fn call<B: Backend>(device: &B, operator: &str, lengths: &[usize]) -> Result<()> {
    let run: fn(&B, &[usize]) -> Result<()> = match operator {
        "embedding_forward" => embedding_forward,
        "embedding_backward" => embedding_backward,
        "rms_norm_forward" => rms_norm_forward,
        "rms_norm_backward" => rms_norm_backward,
        "qk_norm_forward" => qk_norm_forward,
        "qk_norm_backward" => qk_norm_backward,
        "linear_forward" => linear_forward,
        "linear_backward_input" => linear_backward_input,
        "linear_backward_weight" => linear_backward_weight,
        "rope_forward" => rope_forward,
        "rope_backward" => rope_backward,
        "query_norm_forward" => query_norm_forward,
        "query_norm_rope_forward" => query_norm_rope_forward,
        "query_norm_backward" => query_norm_backward,
        "query_norm_rope_backward" => query_norm_rope_backward,
        "balance_loss" => balance_loss,
        "selected" => selected,
        "gates" => gates,
        "attention_forward" => attention_forward,
        "attention_forward of all heads, weighted" => attention_forward_weighted,
        "attention_forward by block table" => attention_forward_by_block_table,
        "attention_backward" => attention_backward,
        "key_value_append" => key_value_append,
        "swiglu_forward" => swiglu_forward,
        "swiglu_backward" => swiglu_backward,
        "cross_entropy" => cross_entropy,
        "add" => add,
        "squared_norms" => squared_norms,
        "adamw" => adamw,
        _ => unreachable!("{operator} is not in the table"),
    };
    run(device, lengths)
}

pub fn zeros<B: Backend, S: Scalar>(device: &B, len: usize) -> B::Buffer<S> {
    device.allocate(len).unwrap()
}

/// The first `N` buffers.
fn floats<B: Backend, const N: usize>(device: &B, lengths: &[usize]) -> [B::Buffer<f32>; N] {
    std::array::from_fn(|at| zeros(device, lengths[at]))
}

/// A routing with room for `tokens` tokens.
fn room<B: Backend>(device: &B, tokens: usize) -> Result<Routing<B>> {
    Routing::new(device, ROUTER.routing_shape(tokens, Heads::all(SHAPE.heads))?)
}

/// A routing of `tokens` tokens.
pub fn routing<B: Backend>(device: &B, tokens: usize) -> Routing<B> {
    let shape = &QkvShape { length: tokens, ..SHAPE };
    let qkv = zeros::<B, f32>(device, tokens * ROW);
    let (qkv, mut routing) = (B::whole::<f32>(&qkv), room(device, tokens).unwrap());
    let forward = QueryNormForward { shape, qkv, routing: &mut routing, all_reduce: None };
    device.query_norm_forward(ROUTER, forward).unwrap();
    routing
}

fn embedding_forward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let ids = zeros::<B, u32>(device, lengths[0]);
    let [_, table, mut out] = floats(device, lengths);
    device.embedding_forward::<f32>(EmbeddingForward {
        width: WIDTH,
        rows: ROWS,
        ids: B::whole(&ids),
        table: B::whole(&table),
        out: B::whole_mut(&mut out),
    })
}

fn embedding_backward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let ids = zeros::<B, u32>(device, lengths[0]);
    let [_, d_out, mut d_table] = floats(device, lengths);
    device.embedding_backward::<f32, f32>(EmbeddingBackward {
        width: WIDTH,
        rows: ROWS,
        ids: B::whole(&ids),
        d_out: B::whole(&d_out),
        d_table: B::whole_mut(&mut d_table),
    })
}

fn rms_norm_forward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [x, weight, mut y, mut inv_rms] = floats(device, lengths);
    device.rms_norm_forward::<f32>(RmsNormForward {
        eps: 1e-5,
        x: B::whole(&x),
        weight: B::whole(&weight),
        y: B::whole_mut(&mut y),
        inv_rms: B::whole_mut(&mut inv_rms),
    })
}

fn rms_norm_backward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [x, weight, inv_rms, d_y, mut d_x, mut d_weight] = floats(device, lengths);
    device.rms_norm_backward::<f32, f32>(RmsNormBackward {
        x: B::whole(&x),
        weight: B::whole(&weight),
        inv_rms: B::whole(&inv_rms),
        d_y: B::whole(&d_y),
        d_x: B::whole_mut(&mut d_x),
        d_weight: B::whole_mut(&mut d_weight),
    })
}

fn qk_norm_forward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [qkv, weight, mut normed] = floats(device, lengths);
    device.qk_norm_forward::<f32>(QkNormForward {
        shape: &SHAPE,
        eps: 1e-5,
        qkv: B::whole(&qkv),
        weight: B::whole(&weight),
        normed: B::whole_mut(&mut normed),
    })
}

fn qk_norm_backward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [qkv, weight, mut d_qkv, mut d_weight] = floats(device, lengths);
    device.qk_norm_backward::<f32, f32>(QkNormBackward {
        shape: &SHAPE,
        eps: 1e-5,
        qkv: B::whole(&qkv),
        weight: B::whole(&weight),
        d_qkv: B::whole_mut(&mut d_qkv),
        d_weight: B::whole_mut(&mut d_weight),
    })
}

fn linear_forward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [x, weight, residual, mut y] = floats(device, lengths);
    device.linear_forward::<f32>(LinearForward {
        inputs: WIDTH,
        x: B::whole(&x),
        weight: B::whole(&weight),
        residual: Some(B::whole(&residual)),
        y: B::whole_mut(&mut y),
    })
}

fn linear_backward_input<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [d_y, weight, mut d_x] = floats(device, lengths);
    device.linear_backward_input::<f32>(LinearBackwardInput {
        inputs: WIDTH,
        d_y: B::whole(&d_y),
        weight: B::whole(&weight),
        d_x: B::whole_mut(&mut d_x),
        accumulation: Accumulation::Overwrite,
    })
}

fn linear_backward_weight<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [x, d_y, mut d_weight] = floats(device, lengths);
    device.linear_backward_weight::<f32, f32>(LinearBackwardWeight {
        inputs: WIDTH,
        x: B::whole(&x),
        d_y: B::whole(&d_y),
        d_weight: B::whole_mut(&mut d_weight),
        accumulation: Accumulation::Overwrite,
    })
}

fn rope_forward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [cos, sin, mut qkv] = floats(device, lengths);
    let (table, qkv) = (table(&cos, &sin), B::whole_mut(&mut qkv));
    device.rope_forward::<f32>(RopeArgs { shape: &SHAPE, table, qkv })
}

fn rope_backward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [cos, sin, mut d_qkv] = floats(device, lengths);
    let (table, qkv) = (table(&cos, &sin), B::whole_mut(&mut d_qkv));
    device.rope_backward::<f32>(RopeArgs { shape: &SHAPE, table, qkv })
}

fn query_norm_forward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [qkv] = floats(device, lengths);
    let (shape, qkv, routing) = (&SHAPE, B::whole(&qkv), &mut room(device, lengths[1])?);
    let args = QueryNormForward { shape, qkv, routing, all_reduce: None };
    device.query_norm_forward::<f32>(ROUTER, args)
}

fn query_norm_rope_forward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [cos, sin, mut qkv] = floats(device, lengths);
    let (table, qkv) = (table(&cos, &sin), B::whole_mut(&mut qkv));
    let rope = RopeArgs { shape: &SHAPE, table, qkv };
    let args =
        QueryNormRopeForward { rope, routing: &mut room(device, lengths[3])?, all_reduce: None };
    device.query_norm_rope_forward::<f32>(ROUTER, args)
}

/// The gradient that reaches the router through `delta`.
fn gradient<'a, B: Backend>(
    routing: &'a Routing<B>,
    delta: &'a B::Buffer<f32>,
) -> RouterGradient<'a, B> {
    RouterGradient { routing, delta: Some(B::whole(delta)), balance_weight: 1.0, ranks: None }
}

fn query_norm_backward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [qkv, mut d_qkv, _, delta] = floats(device, lengths);
    device.query_norm_backward::<f32>(QueryNormBackward {
        shape: &SHAPE,
        qkv: B::whole(&qkv),
        d_qkv: B::whole_mut(&mut d_qkv),
        gradient: gradient(&routing(device, lengths[2]), &delta),
    })
}

fn query_norm_rope_backward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [cos, sin, qkv, mut d_qkv, _, delta] = floats(device, lengths);
    let table = table(&cos, &sin);
    device.query_norm_rope_backward::<f32>(QueryNormRopeBackward {
        qkv: B::whole(&qkv),
        rope: RopeArgs { shape: &SHAPE, table, qkv: B::whole_mut(&mut d_qkv) },
        gradient: gradient(&routing(device, lengths[4]), &delta),
    })
}

fn balance_loss<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let mut out = zeros::<B, f64>(device, lengths[0]);
    device.balance_loss(&routing(device, TOKENS), 1.0, B::whole_mut(&mut out))
}

fn selected<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    device.download(routing(device, TOKENS).selected(), &mut vec![0; lengths[0]])
}

fn gates<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    device.download(routing(device, TOKENS).gates(), &mut vec![0.0; lengths[0]])
}

/// Keys and values in rows of queries, keys and values.
fn key_values<'a, B: Backend>(
    keys: &'a B::Buffer<f32>,
    values: &'a B::Buffer<f32>,
) -> KeyValues<'a, B, f32> {
    KeyValues::Contiguous { keys: B::whole(keys), values: B::whole(values), row_stride: ROW }
}

/// Causal attention of selected heads within documents.
fn attention_args<'a, B: Backend>(
    document_start: View<'a, B, u32>,
    selection: Selection<'a, B>,
) -> AttentionArgs<'a, B> {
    let (document_start, selection) = (Some(document_start), Some(selection));
    AttentionArgs { document_start, selection, ..AttentionArgs::causal(ATTENTION) }
}

fn attention_forward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let document_start = zeros::<B, u32>(device, lengths[3]);
    let routed = zeros::<B, u8>(device, lengths[4]);
    let [queries, keys, values, _, _, weights, mut out, mut sums] = floats(device, lengths);
    let (routed, weights) = (B::whole(&routed), Some(B::whole(&weights)));
    let selection = Selection { shared_heads: ROUTER.shared.len(), routed, weights };
    device.attention_forward(AttentionForward {
        args: attention_args(B::whole(&document_start), selection),
        queries: B::whole(&queries),
        key_values: key_values(&keys, &values),
        out: B::whole_mut(&mut out),
        log_sum_exp: B::whole_mut(&mut sums),
    })
}

/// Every token computes all heads, and their outputs are scaled.
fn attention_forward_weighted<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let routed = zeros::<B, u8>(device, lengths[0]);
    let weights = zeros::<B, f32>(device, lengths[1]);
    let [qkv, mut out, mut sums] =
        floats(device, &[TOKENS * ROW, TOKENS * QUERIES, TOKENS * SHAPE.heads]);
    let (routed, weights) = (B::whole(&routed), Some(B::whole(&weights)));
    let selection = Some(Selection { shared_heads: SHAPE.heads, routed, weights });
    device.attention_forward(AttentionForward {
        args: AttentionArgs { selection, ..AttentionArgs::causal(ATTENTION) },
        queries: B::whole(&qkv),
        key_values: key_values(&qkv, &qkv),
        out: B::whole_mut(&mut out),
        log_sum_exp: B::whole_mut(&mut sums),
    })
}

fn attention_forward_by_block_table<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [queries, keys, values, _, mut out, mut sums] = floats(device, lengths);
    let mut block_table = zeros::<B, u32>(device, lengths[3]);
    // The last block in use is the second of two.
    device.upload(&vec![1; lengths[3]], B::whole_mut(&mut block_table))?;
    let key_values = KeyValues::Paged {
        keys: B::whole(&keys),
        values: B::whole(&values),
        block_table: B::whole(&block_table),
        block_length: 2,
    };
    device.attention_forward::<f32>(AttentionForward {
        args: AttentionArgs::causal(ATTENTION),
        queries: B::whole(&queries),
        key_values,
        out: B::whole_mut(&mut out),
        log_sum_exp: B::whole_mut(&mut sums),
    })
}

fn attention_backward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let document_start = zeros::<B, u32>(device, lengths[1]);
    let routed = zeros::<B, u8>(device, lengths[2]);
    let [qkv, _, _, weights, out, sums, d_out, mut d_qkv, mut delta] = floats(device, lengths);
    let (routed, weights) = (B::whole(&routed), Some(B::whole(&weights)));
    let selection = Selection { shared_heads: ROUTER.shared.len(), routed, weights };
    device.attention_backward::<f32>(AttentionBackward {
        args: attention_args(B::whole(&document_start), selection),
        qkv: B::whole(&qkv),
        out: B::whole(&out),
        log_sum_exp: B::whole(&sums),
        d_out: B::whole(&d_out),
        d_qkv: B::whole_mut(&mut d_qkv),
        delta: Some(B::whole_mut(&mut delta)),
    })
}

fn key_value_append<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [qkv, mut keys, mut values] = floats(device, lengths);
    device.key_value_append::<f32>(KeyValueAppend {
        shape: &SHAPE,
        first_position: 1,
        qkv: B::whole(&qkv),
        keys: B::whole_mut(&mut keys),
        values: B::whole_mut(&mut values),
    })
}

fn swiglu_forward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [gate_up, mut out] = floats(device, lengths);
    device.swiglu_forward::<f32>(WIDTH, B::whole(&gate_up), B::whole_mut(&mut out))
}

fn swiglu_backward<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [mut gate_up, mut out] = floats(device, lengths);
    device.swiglu_backward::<f32>(WIDTH, B::whole_mut(&mut gate_up), B::whole_mut(&mut out))
}

fn cross_entropy<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let targets = zeros::<B, u32>(device, lengths[2]);
    let mut loss = zeros::<B, f64>(device, lengths[4]);
    let [x, weight, _, mut scratch, _, mut d_x, mut d_weight] = floats(device, lengths);
    let gradients = HeadGradients {
        scale: 1.0,
        d_x: B::whole_mut(&mut d_x),
        d_weight: B::whole_mut(&mut d_weight),
        accumulation: Accumulation::Overwrite,
    };
    device.cross_entropy::<f32, f32>(CrossEntropyArgs {
        shape: HEAD,
        x: B::whole(&x),
        weight: B::whole(&weight),
        targets: B::whole(&targets),
        scratch: B::whole_mut(&mut scratch),
        loss: B::whole_mut(&mut loss),
        gradients: Some(gradients),
        ranks: None,
    })
}

fn add<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [x, y, mut out] = floats(device, lengths);
    device.add::<f32>(B::whole(&x), B::whole(&y), B::whole_mut(&mut out))
}

fn squared_norms<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [x, y] = floats(device, lengths);
    let mut out = zeros::<B, f64>(device, lengths[2]);
    device.squared_norms::<f32>(&[B::whole(&x), B::whole(&y)], B::whole_mut(&mut out))
}

fn adamw<B: Backend>(device: &B, lengths: &[usize]) -> Result<()> {
    let [gradients, _, _, mut first, mut second] = floats(device, lengths);
    let mut weights = zeros::<B, bf16>(device, lengths[1]);
    let mut remainder = zeros::<B, i16>(device, lengths[2]);
    device.adamw::<bf16, f32, f32>(AdamWUpdate {
        step: &STEP,
        gradients: B::whole(&gradients),
        weights: B::whole_mut(&mut weights),
        remainder: Some(B::whole_mut(&mut remainder)),
        first_moment: B::whole_mut(&mut first),
        second_moment: B::whole_mut(&mut second),
    })
}
