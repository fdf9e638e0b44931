//! Throughput of every operator, forward and backward: `cargo bench -p moh-kernels`, or with
//! `-- attention` after it for some of them. One item is one floating-point operation (so Gitem/s
//! is GFLOP/s); where an operator moves numbers rather than computes, bytes are counted.
//!
//! Shapes: 2048 tokens of width 512, MLP 1408, 8 query and 4 key/value heads of 64; attention also
//! eight sequences of 256 tokens with heads of 8, and one of 512 tokens with 32 query and 8 key/value
//! heads of 128.

// A bench stops where an operator refuses its arguments.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use half::bf16;
use moh_kernels::adamw::AdamW;
use moh_kernels::attention::{AttentionShape, KeyValues, Visibility};
use moh_kernels::cross_entropy::{HeadGradients, HeadShape};
use moh_kernels::rope::{QkvShape, RopeTable};
use moh_kernels::router::{QueryNormRouter, RouterGradient};
use moh_kernels::{Backend, Cpu, Element};

const TOKENS: usize = 2048;
const WIDTH: usize = 512;
const MLP: usize = 1408;
const VOCABULARY: usize = 8192;
const SMALL: QkvShape = QkvShape { batch: 4, length: 512, heads: 8, kv_heads: 4, head_dim: 64 };
const TINY: QkvShape = QkvShape { batch: 8, length: 256, heads: 8, kv_heads: 4, head_dim: 8 };
const LARGE: QkvShape = QkvShape { batch: 1, length: 512, heads: 32, kv_heads: 8, head_dim: 128 };

fn main() {
    divan::Divan::default().max_time(Duration::from_millis(400)).config_with_args().main();
}

/// Numbers between -1 and 1, cheap and without a pattern that matters.
fn numbers<T: Element>(len: usize) -> Vec<T> {
    (0..len as u32)
        .map(|i| T::from_f32((i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0))
        .collect()
}

fn bytes<T>(numbers: usize) -> BytesCount {
    BytesCount::new(numbers * size_of::<T>())
}

fn ids(end: usize) -> Vec<u32> {
    (0..TOKENS as u32).map(|i| i.wrapping_mul(2_654_435_761) % end as u32).collect()
}

#[divan::bench(types = [f32, bf16])]
fn embedding_forward<T: Element>(bencher: Bencher) {
    let (ids, table) = (ids(VOCABULARY), numbers::<T>(VOCABULARY * WIDTH));
    let mut out = numbers::<T>(TOKENS * WIDTH);
    bencher
        .counter(bytes::<T>(2 * TOKENS * WIDTH))
        .bench_local(|| Cpu.embedding_forward(WIDTH, &ids, &table, &mut out).unwrap());
}

#[divan::bench(types = [f32, bf16])]
fn embedding_backward<T: Element>(bencher: Bencher) {
    let (ids, d_out) = (ids(VOCABULARY), numbers::<T>(TOKENS * WIDTH));
    let mut d_table = numbers::<f32>(VOCABULARY * WIDTH);
    bencher
        .counter(bytes::<T>(2 * TOKENS * WIDTH))
        .bench_local(|| Cpu.embedding_backward(WIDTH, &ids, &d_out, &mut d_table).unwrap());
}

#[divan::bench(types = [f32, bf16])]
fn rms_norm_forward<T: Element>(bencher: Bencher) {
    let (x, weight) = (numbers::<T>(TOKENS * WIDTH), numbers::<T>(WIDTH));
    let (mut y, mut inv_rms) = (x.clone(), numbers::<f32>(TOKENS));
    bencher
        .counter(bytes::<T>(2 * TOKENS * WIDTH))
        .bench_local(|| Cpu.rms_norm_forward(1e-5, &x, &weight, &mut y, &mut inv_rms).unwrap());
}

#[divan::bench(types = [f32, bf16])]
fn rms_norm_backward<T: Element>(bencher: Bencher) {
    let (x, weight) = (numbers::<T>(TOKENS * WIDTH), numbers::<T>(WIDTH));
    let (mut d_x, mut d_weight) = (vec![T::zeroed(); x.len()], vec![0f32; WIDTH]);
    let inv_rms = numbers::<f32>(TOKENS);
    bencher.counter(bytes::<T>(4 * TOKENS * WIDTH)).bench_local(|| {
        Cpu.rms_norm_backward(&x, &weight, &inv_rms, &x, &mut d_x, &mut d_weight).unwrap()
    });
}

/// Inputs and outputs of linear layers: the gate and up projections, the down projection, and a
/// gate and up projection of the smallest models.
const LAYERS: [[usize; 2]; 3] = [[WIDTH, 2 * MLP], [MLP, WIDTH], [64, 344]];

/// A layer on [`TOKENS`] tokens, or fewer.
struct Linear<T> {
    x: Vec<T>,
    weight: Vec<T>,
    y: Vec<T>,
}

impl<T: Element> Linear<T> {
    fn new(tokens: usize, [inputs, outputs]: [usize; 2]) -> Self {
        let (x, weight) = (numbers(tokens * inputs), numbers(outputs * inputs));
        Linear { x, weight, y: numbers(tokens * outputs) }
    }

    fn operations(&self, inputs: usize) -> ItemsCount {
        ItemsCount::new(2 * self.y.len() * inputs)
    }
}

#[divan::bench(types = [f32, bf16], args = LAYERS)]
fn linear_forward<T: Element>(bencher: Bencher, layer: [usize; 2]) {
    let mut linear = Linear::<T>::new(TOKENS, layer);
    let operations = linear.operations(layer[0]);
    let Linear { x, weight, y } = &mut linear;
    bencher
        .counter(operations)
        .bench_local(|| Cpu.linear_forward(layer[0], x, weight, None, y).unwrap());
}

#[divan::bench(types = [f32, bf16], args = LAYERS)]
fn linear_backward_input<T: Element>(bencher: Bencher, layer: [usize; 2]) {
    let mut linear = Linear::<T>::new(TOKENS, layer);
    let operations = linear.operations(layer[0]);
    let Linear { x, weight, y } = &mut linear;
    bencher
        .counter(operations)
        .bench_local(|| Cpu.linear_backward_input(layer[0], y, weight, x).unwrap());
}

#[divan::bench(types = [f32, bf16], args = LAYERS)]
fn linear_backward_weight<T: Element>(bencher: Bencher, layer: [usize; 2]) {
    let linear = Linear::<T>::new(TOKENS, layer);
    let mut d_weight = vec![0f32; linear.weight.len()];
    bencher.counter(linear.operations(layer[0])).bench_local(|| {
        Cpu.linear_backward_weight(layer[0], &linear.x, &linear.y, &mut d_weight).unwrap()
    });
}

/// As in generation; counts the weight's bytes. The vocabulary's projection does not fit a cache.
#[divan::bench(types = [f32, bf16], args = [[WIDTH, 2 * MLP], [2048, 32000]])]
fn linear_forward_one_token<T: Element>(bencher: Bencher, layer: [usize; 2]) {
    let mut linear = Linear::<T>::new(1, layer);
    let Linear { x, weight, y } = &mut linear;
    bencher
        .counter(bytes::<T>(weight.len()))
        .bench_local(|| Cpu.linear_forward(layer[0], x, weight, None, y).unwrap());
}

#[divan::bench(types = [f32, bf16])]
fn swiglu_forward<T: Element>(bencher: Bencher) {
    let (gate_up, mut out) = (numbers::<T>(TOKENS * 2 * MLP), numbers::<T>(TOKENS * MLP));
    bencher
        .counter(bytes::<T>(3 * TOKENS * MLP))
        .bench_local(|| Cpu.swiglu_forward(MLP, &gate_up, &mut out).unwrap());
}

#[divan::bench(types = [f32, bf16])]
fn swiglu_backward<T: Element>(bencher: Bencher) {
    let (gate_up, d_out) = (numbers::<T>(TOKENS * 2 * MLP), numbers::<T>(TOKENS * MLP));
    let mut d_gate_up = gate_up.clone();
    bencher
        .counter(bytes::<T>(5 * TOKENS * MLP))
        .bench_local(|| Cpu.swiglu_backward(MLP, &gate_up, &d_out, &mut d_gate_up).unwrap());
}

#[divan::bench(types = [f32, bf16], args = [false, true])]
fn cross_entropy<T: Element>(bencher: Bencher, with_gradients: bool) {
    let shape = HeadShape { tokens: TOKENS, width: WIDTH, vocab_size: VOCABULARY };
    let (x, weight) = (numbers::<T>(TOKENS * WIDTH), numbers::<T>(VOCABULARY * WIDTH));
    let (targets, mut loss) = (ids(VOCABULARY), [0f64]);
    let mut scratch = vec![0f32; Cpu.cross_entropy_scratch(&shape)];
    let (mut d_x, mut d_weight) = (x.clone(), vec![0f32; weight.len()]);
    let products = if with_gradients { 3 } else { 1 };
    bencher.counter(ItemsCount::new(products * 2 * TOKENS * WIDTH * VOCABULARY)).bench_local(
        || {
            let gradients = with_gradients.then(|| HeadGradients {
                scale: 1.0,
                d_x: &mut d_x[..],
                d_weight: &mut d_weight[..],
            });
            Cpu.cross_entropy(&shape, &x, &weight, &targets, &mut scratch, &mut loss, gradients)
                .unwrap()
        },
    );
}

#[divan::bench]
fn squared_norm(bencher: Bencher) {
    let (x, mut out) = (numbers::<f32>(VOCABULARY * WIDTH), [0f64]);
    bencher.counter(bytes::<f32>(x.len())).bench_local(|| Cpu.squared_norm(&x, &mut out).unwrap());
}

#[divan::bench(types = [f32, bf16])]
fn adamw<T: Element>(bencher: Bencher) {
    let step = AdamW {
        learning_rate: 1e-4,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        clip_norm: 1.0,
        step: 10,
    };
    let mut weights = numbers::<T>(VOCABULARY * WIDTH);
    let gradients = numbers::<f32>(weights.len());
    let (mut master, mut m, mut v) =
        (gradients.clone(), gradients.clone(), vec![1f32; weights.len()]);
    let moved = BytesCount::new(weights.len() * (7 * size_of::<f32>() + size_of::<T>()));
    bencher.counter(moved).bench_local(|| {
        let master = Some(&mut master[..]);
        Cpu.adamw(&step, &[1.0], &gradients, &mut weights, master, &mut m, &mut v).unwrap()
    });
}

/// An attention with everything around it: queries routed, forward pass done.
struct Attention<T> {
    shape: QkvShape,
    qkv: Vec<T>,
    routing: <Cpu as Backend>::Routing,
    table: (Vec<f32>, Vec<f32>),
    out: Vec<T>,
    log_sum_exp: Vec<f32>,
    /// Floating-point operations of the scores and of their product with the values.
    operations: usize,
}

/// Shares of the heads that are active, in percent.
const ACTIVE: [usize; 3] = [100, 75, 50];

impl<T: Element> Attention<T> {
    fn new(shape: QkvShape, active: usize) -> Self {
        let QkvShape { heads, head_dim, length, .. } = shape;
        let (shared_heads, active) = (heads / 4, heads * active / 100);
        let router = QueryNormRouter { shared_heads, top_k: active - shared_heads };
        let mut attention = Attention {
            shape,
            qkv: numbers(shape.tokens() * shape.row()),
            routing: Cpu.routing(shape.tokens(), heads, router).unwrap(),
            table: (vec![0.6; length * head_dim / 2], vec![0.8; length * head_dim / 2]),
            out: numbers(shape.tokens() * heads * head_dim),
            log_sum_exp: vec![0.0; shape.tokens() * heads],
            // Causal: half of all pairs of a query and a key.
            operations: 2 * shape.tokens() * length * active * head_dim,
        };
        attention.route();
        attention.forward();
        attention
    }

    fn route(&mut self) {
        let table = RopeTable { cos: &self.table.0[..], sin: &self.table.1[..] };
        let routing = Some(&mut self.routing);
        Cpu.rope_route_forward(&self.shape, table, 0, &mut self.qkv, routing).unwrap();
    }

    fn attention_shape(&self) -> AttentionShape {
        let QkvShape { batch, length, heads, kv_heads, head_dim } = self.shape;
        let (query_length, key_length, query_stride) = (length, length, self.shape.row());
        AttentionShape { batch, query_length, key_length, heads, kv_heads, head_dim, query_stride }
    }

    const SEEN: Visibility<'static, Cpu> =
        Visibility { causal: true, query_offset: 0, first_key: None };

    fn forward(&mut self) {
        let QkvShape { heads, kv_heads, head_dim, .. } = self.shape;
        let (first, row_stride) = (heads * head_dim, self.shape.row());
        let (keys, values) = (&self.qkv[first..], &self.qkv[first + kv_heads * head_dim..]);
        let key_values = KeyValues::Contiguous { keys, values, row_stride };
        let (shape, selection) = (self.attention_shape(), Some(&self.routing));
        let (out, sums) = (&mut self.out[..], &mut self.log_sum_exp[..]);
        let qkv = &self.qkv;
        Cpu.attention_forward(&shape, qkv, key_values, Self::SEEN, selection, None, out, sums)
            .unwrap();
    }

    fn bench_forward(bencher: Bencher, shape: QkvShape, active: usize) {
        let mut attention = Self::new(shape, active);
        let operations = ItemsCount::new(attention.operations);
        bencher.counter(operations).bench_local(|| attention.forward());
    }

    fn bench_backward(bencher: Bencher, shape: QkvShape, active: usize) {
        let attention = Self::new(shape, active);
        let Attention { qkv, out, log_sum_exp, routing, .. } = &attention;
        let d_out = numbers::<T>(out.len());
        let (mut d_qkv, mut delta) = (qkv.clone(), log_sum_exp.clone());
        let (shape, selection) = (attention.attention_shape(), Some(routing));
        // Scores again, dP, dq, dk and dv: five products for the forward pass's two.
        bencher.counter(ItemsCount::new(attention.operations * 5 / 2)).bench_local(|| {
            let (d_qkv, delta) = (&mut d_qkv[..], Some(&mut delta[..]));
            Cpu.attention_backward(
                &shape,
                qkv,
                Self::SEEN,
                selection,
                None,
                out,
                log_sum_exp,
                &d_out,
                d_qkv,
                delta,
            )
            .unwrap()
        });
    }
}

#[divan::bench(types = [f32, bf16], args = ACTIVE)]
fn attention_8_heads_of_64_forward<T: Element>(bencher: Bencher, active: usize) {
    Attention::<T>::bench_forward(bencher, SMALL, active);
}

#[divan::bench(types = [f32, bf16], args = ACTIVE)]
fn attention_8_heads_of_64_backward<T: Element>(bencher: Bencher, active: usize) {
    Attention::<T>::bench_backward(bencher, SMALL, active);
}

#[divan::bench(types = [f32, bf16], args = ACTIVE)]
fn attention_8_heads_of_8_forward<T: Element>(bencher: Bencher, active: usize) {
    Attention::<T>::bench_forward(bencher, TINY, active);
}

#[divan::bench(types = [f32, bf16], args = ACTIVE)]
fn attention_8_heads_of_8_backward<T: Element>(bencher: Bencher, active: usize) {
    Attention::<T>::bench_backward(bencher, TINY, active);
}

#[divan::bench(types = [f32, bf16], args = ACTIVE)]
fn attention_32_heads_of_128_forward<T: Element>(bencher: Bencher, active: usize) {
    Attention::<T>::bench_forward(bencher, LARGE, active);
}

#[divan::bench(types = [f32, bf16], args = ACTIVE)]
fn attention_32_heads_of_128_backward<T: Element>(bencher: Bencher, active: usize) {
    Attention::<T>::bench_backward(bencher, LARGE, active);
}

#[divan::bench(types = [f32, bf16])]
fn rope_route_forward<T: Element>(bencher: Bencher) {
    let mut attention = Attention::<T>::new(SMALL, 75);
    bencher.counter(bytes::<T>(2 * attention.qkv.len())).bench_local(|| attention.route());
}

#[divan::bench(types = [f32, bf16])]
fn rope_route_backward<T: Element>(bencher: Bencher) {
    let Attention { shape, qkv, routing, table, log_sum_exp: delta, .. } =
        Attention::<T>::new(SMALL, 75);
    let mut d_qkv = qkv.clone();
    let table = RopeTable { cos: &table.0[..], sin: &table.1[..] };
    bencher.counter(bytes::<T>(3 * qkv.len())).bench_local(|| {
        let gradient =
            RouterGradient { routing: &routing, delta: Some(&delta[..]), balance_weight: 0.01 };
        Cpu.rope_route_backward(&shape, table, 0, &qkv, &mut d_qkv, Some(gradient)).unwrap()
    });
}

#[divan::bench]
fn balance_loss(bencher: Bencher) {
    let (attention, mut out) = (Attention::<f32>::new(SMALL, 75), [0f64]);
    bencher
        .counter(ItemsCount::new(TOKENS))
        .bench_local(|| Cpu.balance_loss(&attention.routing, 1.0, &mut out).unwrap());
}

#[divan::bench(types = [f32, bf16])]
fn key_value_append<T: Element>(bencher: Bencher) {
    let shape = QkvShape { batch: 1, length: TOKENS, ..SMALL };
    let qkv = numbers::<T>(TOKENS * shape.row());
    let width = shape.kv_heads * shape.head_dim;
    let (mut keys, mut values) = (numbers::<T>(TOKENS * width), numbers::<T>(TOKENS * width));
    bencher
        .counter(bytes::<T>(4 * TOKENS * width))
        .bench_local(|| Cpu.key_value_append(&shape, 0, &qkv, &mut keys, &mut values).unwrap());
}
