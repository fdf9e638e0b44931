//! Results have the same bits whatever the number of rayon's threads.

use crate::reference::{Random, cases, rope_tables, wide};
use half::bf16;
use moh_kernels::adamw::AdamW;
use moh_kernels::attention::{AttentionShape, KeyValues, Visibility};
use moh_kernels::cross_entropy::{HeadGradients, HeadShape};
use moh_kernels::ranks::{Heads, VocabularyRows};
use moh_kernels::rope::{QkvShape, RopeTable};
use moh_kernels::router::{QueryNormRouter, RouterGradient};
use moh_kernels::{Accumulation, Backend, Cpu, Element};
use proptest::prelude::*;

/// Runs `body` on pools of one, two and five threads and asserts equal results.
fn same_bits(body: impl Fn() -> Vec<f64> + Sync) {
    let [one, two, five] = [1, 2, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(&body)
    });
    let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&one) == bits(&two), "one and two threads differ");
    assert!(bits(&one) == bits(&five), "one and five threads differ");
}

/// All numbers of several buffers; f32 is exact in f64.
fn all(buffers: &[&[f32]]) -> Vec<f64> {
    buffers.iter().flat_map(|buffer| wide(buffer)).collect()
}

/// Attention and router, forward and backward.
fn attention<T: Element>(shape: QkvShape, router: QueryNormRouter, seed: u64) -> Vec<f64> {
    let QkvShape { batch, length, heads, kv_heads, head_dim } = shape;
    let (mut random, tokens) = (Random(seed), shape.tokens());
    let mut qkv: Vec<T> = random.numbers(tokens * shape.row());
    let d_out: Vec<T> = random.numbers(tokens * heads * head_dim);
    let (cos, sin) = rope_tables(length, head_dim);
    let table = RopeTable { cos: &cos[..], sin: &sin[..] };
    let mut routing = Cpu.routing(tokens, Heads::all(heads), router).unwrap();
    Cpu.rope_route_forward(&shape, table, 0, &mut qkv, Some(&mut routing), None).unwrap();
    let attention = AttentionShape {
        batch,
        query_length: length,
        key_length: length,
        heads,
        kv_heads,
        head_dim,
        query_stride: shape.row(),
    };
    let seen = Visibility { causal: true, query_offset: 0, first_key: None };
    let (keys, values) = (&qkv[heads * head_dim..], &qkv[(heads + kv_heads) * head_dim..]);
    let key_values = KeyValues::Contiguous { keys, values, row_stride: shape.row() };
    let (mut out, mut sums) = (d_out.clone(), vec![0f32; tokens * heads]);
    let selection = Some(&routing);
    Cpu.attention_forward(&attention, &qkv, key_values, seen, selection, None, &mut out, &mut sums)
        .unwrap();
    let (mut d_qkv, mut delta) = (qkv.clone(), sums.clone());
    Cpu.attention_backward(
        &attention,
        &qkv,
        seen,
        selection,
        None,
        &out,
        &sums,
        &d_out,
        &mut d_qkv,
        Some(&mut delta),
    )
    .unwrap();
    let gradient = RouterGradient {
        routing: &routing,
        delta: Some(&delta[..]),
        balance_weight: 0.5,
        ranks: None,
    };
    Cpu.rope_route_backward(&shape, table, 0, &qkv, &mut d_qkv, Some(gradient)).unwrap();
    let mut loss = [0f64];
    Cpu.balance_loss(&routing, 1.0, &mut loss).unwrap();
    let mut gates = vec![0f32; tokens * (heads - router.shared_heads)];
    Cpu.gates(&routing, &mut gates).unwrap();
    [wide(&out), wide(&d_qkv), all(&[&sums, &delta, &gates]), loss.to_vec()].concat()
}

/// The operators over rows of tokens, and the optimiser.
fn rows<T: Element>(tokens: usize, width: usize, outputs: usize, seed: u64) -> Vec<f64> {
    let mut random = Random(seed);
    let x: Vec<T> = random.numbers(tokens * width);
    let scale: Vec<T> = random.numbers(width);
    let weight: Vec<T> = random.numbers(outputs * width);
    let ids: Vec<u32> = (0..tokens).map(|_| random.below(outputs) as u32).collect();
    let (mut y, mut inv_rms) = (x.clone(), vec![0f32; tokens]);
    Cpu.rms_norm_forward(1e-5, &x, &scale, &mut y, &mut inv_rms).unwrap();
    let (mut d_x, mut d_scale) = (y.clone(), vec![0f32; width]);
    Cpu.rms_norm_backward(&x, &scale, &inv_rms, &y, &mut d_x, &mut d_scale).unwrap();

    let mut product = vec![T::zeroed(); tokens * outputs];
    Cpu.linear_forward(width, &y, &weight, None, &mut product).unwrap();
    let mut d_weight = vec![0f32; weight.len()];
    Cpu.linear_backward_weight(width, &y, &product, &mut d_weight, Accumulation::Add).unwrap();
    let mut d_y = y.clone();
    Cpu.linear_backward_input(width, &product, &weight, &mut d_y).unwrap();

    let gate_up: Vec<T> = x.iter().chain(&y).copied().collect();
    let (mut silu, mut d_gate_up) = (y.clone(), gate_up.clone());
    Cpu.swiglu_forward(width, &gate_up, &mut silu).unwrap();
    Cpu.swiglu_backward(width, &mut d_gate_up, &mut silu.clone()).unwrap();

    let head = HeadShape::whole(tokens, width, outputs);
    let mut scratch = vec![0f32; Cpu.cross_entropy_scratch(&head)];
    let (mut loss, mut d_hidden, mut norm) = ([0f64], y.clone(), [0f64]);
    let gradients = HeadGradients {
        scale: 0.1,
        d_x: &mut d_hidden[..],
        d_weight: &mut d_weight[..],
        accumulation: Accumulation::Add,
    };
    Cpu.cross_entropy(&head, &y, &weight, &ids, &mut scratch, &mut loss, Some(gradients), None)
        .unwrap();
    Cpu.embedding_backward(width, VocabularyRows::all(outputs), &ids, &d_x, &mut d_weight).unwrap();

    Cpu.squared_norms(&[&d_weight[..]], &mut norm).unwrap();
    let step = AdamW {
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        clip_norm: 1.0,
        step: 3,
    };
    let (mut updated, mut m) = (weight.clone(), vec![0f32; weight.len()]);
    let mut v = m.clone();
    Cpu.adamw(&step, &norm, &d_weight, &mut updated, None, &mut m, &mut v).unwrap();
    let stored = [&y, &d_x, &product, &d_y, &silu, &d_gate_up, &d_hidden, &updated];
    let stored = stored.iter().flat_map(|numbers| wide(numbers)).collect();
    [stored, all(&[&inv_rms, &d_scale, &d_weight, &m, &v]), vec![loss[0], norm[0]]].concat()
}

#[test]
fn large_shapes_have_the_same_bits_with_any_number_of_threads() {
    same_bits(|| rows::<f32>(1100, 64, 300, 1));
    same_bits(|| rows::<bf16>(1100, 64, 300, 1));
    // One token, a few, and as many as could leave a few over when they are divided.
    for (tokens, outputs) in [(1, 1500), (7, 1500), (50, 1500), (50, 100)] {
        same_bits(|| rows::<f32>(tokens, 300, outputs, 1));
        same_bits(|| rows::<bf16>(tokens, 300, outputs, 1));
    }
    let shape = QkvShape { batch: 2, length: 100, heads: 8, kv_heads: 4, head_dim: 64 };
    let router = QueryNormRouter { shared_heads: 2, top_k: 3 };
    same_bits(|| attention::<f32>(shape, router, 1));
    same_bits(|| attention::<bf16>(shape, router, 1));
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn rows_have_the_same_bits_with_any_number_of_threads(
        tokens in 1usize..150,
        width in 1usize..40,
        outputs in 1usize..90,
        seed: u64,
    ) {
        same_bits(|| rows::<f32>(tokens, width, outputs, seed));
    }

    #[test]
    fn attention_has_the_same_bits_with_one_and_two_threads(
        batch in 1usize..3,
        length in 1usize..80,
        kv_heads in 1usize..4,
        group in 2usize..4,
        half in 1usize..40,
        seed: u64,
    ) {
        let heads = kv_heads * group;
        let shape = QkvShape { batch, length, heads, kv_heads, head_dim: 2 * half };
        let router = QueryNormRouter { shared_heads: heads - 2, top_k: 1 };
        same_bits(|| attention::<f32>(shape, router, seed));
    }
}
