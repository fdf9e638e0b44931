//! An attention on any device against its reference: of a training step, and over a cache.

use moh_kernels::attention::{AttentionShape, KeyValues, Visibility};
use moh_kernels::ranks::Heads;
use moh_kernels::rope::{QkvShape, RopeTable};
use moh_kernels::router::{QueryNormRouter, RouterGradient};
use moh_kernels::{Backend, Element, View};

use super::operators::{self, Packed};
use super::{
    F32_TOLERANCE, Random, assert_close, columns, download, flat, garbage, gradient, no_rotation,
    rope_tables, tensor, tolerance, upload, var, view, view_mut,
};

/// An attention of a training step.
#[derive(Debug, Clone)]
pub struct Case {
    pub shape: QkvShape,
    pub router: Option<QueryNormRouter>,
    pub weighted: bool,
    pub causal: bool,
    pub first_key: Option<Vec<u32>>,
    /// With positions, and the gradient that goes through the router to the unrotated queries.
    pub whole: bool,
}

impl Case {
    pub fn dense(shape: QkvShape) -> Self {
        let (weighted, causal, whole) = (false, true, false);
        Case { shape, router: None, weighted, causal, first_key: None, whole }
    }

    pub fn routed(shape: QkvShape, shared_heads: usize, top_k: usize) -> Self {
        Case { router: Some(QueryNormRouter { shared_heads, top_k }), ..Case::dense(shape) }
    }

    pub fn attention_shape(&self) -> AttentionShape {
        let QkvShape { batch, length, heads, kv_heads, head_dim } = self.shape;
        AttentionShape {
            batch,
            query_length: length,
            key_length: length,
            heads,
            kv_heads,
            head_dim,
            query_stride: self.shape.row(),
        }
    }

    fn tables(&self) -> (Vec<f32>, Vec<f32>) {
        let tables = if self.whole { rope_tables } else { no_rotation };
        tables(self.shape.length, self.shape.head_dim)
    }
}

/// Starts of the documents of every sequence, in the form of `first_key`.
pub fn documents(shape: &QkvShape, random: &mut Random, mean_length: usize) -> Vec<u32> {
    let mut first_key = Vec::new();
    for _ in 0..shape.batch {
        let mut start = 0;
        for position in 0..shape.length {
            if random.below(mean_length) == 0 {
                start = position as u32;
            }
            first_key.push(start);
        }
    }
    first_key
}

/// Numbers that a case works on.
pub struct Inputs<T> {
    pub qkv: Vec<T>,
    pub d_out: Vec<T>,
    pub weights: Vec<f32>,
}

impl<T: Element> Inputs<T> {
    pub fn new(case: &Case, seed: u64) -> Self {
        let (shape, mut random) = (case.shape, Random(seed));
        Inputs {
            qkv: random.numbers(shape.tokens() * shape.row()),
            d_out: random.numbers(shape.tokens() * shape.heads * shape.head_dim),
            weights: random.numbers(shape.tokens() * shape.heads),
        }
    }
}

/// What a device made of them.
pub struct Results<T> {
    pub out: Vec<T>,
    pub log_sum_exp: Vec<f32>,
    pub delta: Vec<f32>,
    pub d_qkv: Vec<T>,
}

/// Weight of the balance loss where a case is a whole attention; exact in f32.
const BALANCE: f32 = 0.5;

/// A case on a device, whose queries are routed and rotated.
pub struct Prepared<'a, B: Backend, T: Element> {
    device: &'a B,
    case: &'a Case,
    given: Given<B, T>,
    out: B::Buffer<T>,
    log_sum_exp: B::Buffer<f32>,
    delta: B::Buffer<f32>,
    d_qkv: B::Buffer<T>,
}

/// What attention reads.
struct Given<B: Backend, T: Element> {
    causal: bool,
    angles: [B::Buffer<f32>; 2],
    qkv: B::Buffer<T>,
    routing: Option<B::Routing>,
    first_key: Option<B::Buffer<u32>>,
    weights: Option<B::Buffer<f32>>,
    d_out: B::Buffer<T>,
}

impl<B: Backend, T: Element> Given<B, T> {
    fn new(device: &B, case: &Case, inputs: &Inputs<T>) -> Self {
        let (cos, sin) = case.tables();
        let routing = case.router.map(|router| {
            device.routing(case.shape.tokens(), Heads::all(case.shape.heads), router).unwrap()
        });
        Given {
            causal: case.causal,
            angles: [upload(device, &cos), upload(device, &sin)],
            qkv: upload(device, &inputs.qkv),
            routing,
            first_key: case.first_key.as_ref().map(|first_key| upload(device, first_key)),
            weights: case.weighted.then(|| upload(device, &inputs.weights)),
            d_out: upload(device, &inputs.d_out),
        }
    }

    fn table(&self) -> RopeTable<'_, B> {
        let [cos, sin] = &self.angles;
        RopeTable { cos: view::<B, f32>(cos), sin: view::<B, f32>(sin) }
    }

    fn visibility(&self) -> Visibility<'_, B> {
        let first_key = self.first_key.as_ref().map(|first_key| view::<B, u32>(first_key));
        Visibility { causal: self.causal, query_offset: 0, first_key }
    }

    fn weights(&self) -> Option<View<'_, B, f32>> {
        self.weights.as_ref().map(|weights| view::<B, f32>(weights))
    }
}

impl<'a, B: Backend, T: Element> Prepared<'a, B, T> {
    pub fn new(device: &'a B, case: &'a Case, inputs: &Inputs<T>) -> Self {
        let (shape, mut given) = (case.shape, Given::new(device, case, inputs));
        let Given { angles: [cos, sin], qkv, routing, .. } = &mut given;
        let table = RopeTable { cos: view::<B, f32>(cos), sin: view::<B, f32>(sin) };
        let qkv = view_mut::<B, T>(qkv);
        device.rope_route_forward(&shape, table, 0, qkv, routing.as_mut(), None).unwrap();
        let pairs = shape.tokens() * shape.heads;
        Prepared {
            device,
            case,
            given,
            out: garbage::<B, T>(device, inputs.d_out.len()),
            log_sum_exp: garbage::<B, f32>(device, pairs),
            delta: garbage::<B, f32>(device, pairs),
            d_qkv: garbage::<B, T>(device, inputs.qkv.len()),
        }
    }

    pub fn forward(&mut self) {
        let (shape, given) = (self.case.shape, &self.given);
        let (first, width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let len = B::len(&given.qkv);
        let key_values = KeyValues::Contiguous {
            keys: B::view(&given.qkv, first..len),
            values: B::view(&given.qkv, first + width..len),
            row_stride: shape.row(),
        };
        self.device
            .attention_forward(
                &self.case.attention_shape(),
                view::<B, T>(&given.qkv),
                key_values,
                given.visibility(),
                given.routing.as_ref(),
                given.weights(),
                view_mut::<B, T>(&mut self.out),
                view_mut::<B, f32>(&mut self.log_sum_exp),
            )
            .unwrap();
    }

    /// After [`Prepared::forward`].
    pub fn backward(&mut self) {
        let given = &self.given;
        self.device
            .attention_backward(
                &self.case.attention_shape(),
                view::<B, T>(&given.qkv),
                given.visibility(),
                given.routing.as_ref(),
                given.weights(),
                view::<B, T>(&self.out),
                view::<B, f32>(&self.log_sum_exp),
                view::<B, T>(&given.d_out),
                view_mut::<B, T>(&mut self.d_qkv),
                Some(view_mut::<B, f32>(&mut self.delta)),
            )
            .unwrap();
    }

    /// Takes the gradient on through positions and router, once.
    fn route_backward(&mut self) {
        let given = &self.given;
        let router = given.routing.as_ref().map(|routing| RouterGradient {
            routing,
            delta: Some(view::<B, f32>(&self.delta)),
            balance_weight: BALANCE,
            ranks: None,
        });
        let (qkv, d_qkv) = (view::<B, T>(&given.qkv), view_mut::<B, T>(&mut self.d_qkv));
        let shape = self.case.shape;
        self.device.rope_route_backward(&shape, given.table(), 0, qkv, d_qkv, router).unwrap();
    }

    pub fn results(&self) -> Results<T> {
        Results {
            out: download::<B, T>(self.device, &self.out),
            log_sum_exp: download::<B, f32>(self.device, &self.log_sum_exp),
            delta: download::<B, f32>(self.device, &self.delta),
            d_qkv: download::<B, T>(self.device, &self.d_qkv),
        }
    }
}

pub fn run<B: Backend, T: Element>(device: &B, case: &Case, inputs: &Inputs<T>) -> Results<T> {
    let mut prepared = Prepared::new(device, case, inputs);
    prepared.forward();
    prepared.backward();
    if case.whole {
        prepared.route_backward();
    }
    prepared.results()
}

/// The same by the reference: output, log-sum-exp, delta, d_qkv.
fn expected<T: Element>(case: &Case, inputs: &Inputs<T>) -> [Vec<f64>; 4] {
    let shape = case.shape;
    let QkvShape { batch, length, heads, head_dim, .. } = shape;
    let packed = Packed::new(&shape);
    let qkv = var(&inputs.qkv, packed.dims());
    let (cos, sin) = case.tables();
    let rotated = packed.rotate(&qkv, &packed.table(&cos, &sin, 0)).unwrap();
    let [q, k, v] = packed.split(&rotated).unwrap();
    let first_key = case.first_key.as_deref();
    let seen = operators::visibility((batch, length, length), case.causal, 0, first_key).unwrap();
    let (heads_out, log_sum_exp) = operators::attention(&q, &k, &v, &seen).unwrap();

    let rows = (shape.tokens(), heads);
    let ones = vec![1f32; shape.tokens() * heads];
    let weights = var(if case.weighted { &inputs.weights } else { &ones }, rows);
    let (mut mask, mut balance) = (tensor(&ones, rows), tensor(&[0f32], ()));
    let mut through = mask.clone();
    if let Some(QueryNormRouter { shared_heads, top_k }) = case.router {
        let queries = packed.queries(&qkv).unwrap();
        mask = operators::selection(&queries, shared_heads, top_k).unwrap();
        through = mask.clone();
        if case.whole {
            let gates = operators::gates(&queries, shared_heads).unwrap();
            through = operators::straight_through(&mask, &gates).unwrap();
            balance = operators::balance_loss(&mask, &gates).unwrap();
        }
    }
    let factor = (weights.as_tensor() * through).unwrap();
    let out = heads_out.broadcast_mul(&factor.reshape((batch, length, heads, 1)).unwrap()).unwrap();
    let d_out = tensor(&inputs.d_out, (batch, length, heads, head_dim));
    let total = (&out * d_out).unwrap().sum_all().unwrap();
    let total = (total + (balance * f64::from(BALANCE)).unwrap()).unwrap();
    let gradients = total.backward().unwrap();
    let log_sum_exp = (log_sum_exp.reshape(rows).unwrap() * mask).unwrap();
    let delta = gradient(&gradients, &weights);
    [flat(&out), flat(&log_sum_exp), delta, gradient(&gradients, &qkv)]
}

pub fn agrees<B: Backend, T: Element>(device: &B, case: &Case, seed: u64) {
    agrees_on(device, case, &Inputs::<T>::new(case, seed));
}

/// As [`agrees`], on numbers of the caller's.
pub fn agrees_on<B: Backend, T: Element>(device: &B, case: &Case, inputs: &Inputs<T>) {
    let actual = run(device, case, inputs);
    let [out, log_sum_exp, delta, d_qkv] = expected(case, inputs);
    // The scores of a whole attention are formed from rotated queries and keys as they are stored;
    // otherwise only results are rounded to `T`.
    let (stored, internal) = if case.whole {
        (2.0 * tolerance::<T>(), 2.0 * tolerance::<T>())
    } else {
        (tolerance::<T>(), F32_TOLERANCE)
    };
    assert_close("out", &actual.out, &out, stored);
    assert_close("log_sum_exp", &actual.log_sum_exp, &log_sum_exp, internal);
    // A device may form it from the output as it is stored.
    assert_close("delta", &actual.delta, &delta, stored);
    let QkvShape { heads, kv_heads, head_dim, .. } = case.shape;
    let row = case.shape.row();
    let (k, v) = (heads * head_dim, (heads + kv_heads) * head_dim);
    for (what, part) in [("d_q", 0..k), ("d_k", k..v), ("d_v", v..row)] {
        let expected = columns(&d_qkv, row, part.clone());
        assert_close(what, &columns(&actual.d_qkv, row, part), &expected, stored);
    }
}

/// New queries against cached keys and values, contiguous or in blocks of `block_length`; asserts
/// that the output and the log-sum-exp, which it returns, agree with the reference.
pub fn cached<B: Backend, T: Element>(
    device: &B,
    shape: &AttentionShape,
    query_offset: usize,
    block_length: Option<usize>,
    seed: u64,
) -> (Vec<T>, Vec<f32>) {
    let &AttentionShape { batch, query_length, key_length, heads, kv_heads, head_dim, .. } = shape;
    let (mut random, width) = (Random(seed), kv_heads * head_dim);
    let queries: Vec<T> = random.numbers(shape.tokens() * shape.query_stride);
    let keys: Vec<T> = random.numbers(batch * key_length * width);
    let values: Vec<T> = random.numbers(keys.len());
    let query_buffer = upload(device, &queries);
    let mut out = garbage::<B, T>(device, shape.tokens() * heads * head_dim);
    let mut log_sum_exp = garbage::<B, f32>(device, shape.tokens() * heads);
    let mut forward = |key_values: KeyValues<'_, B, T>| {
        let visibility = Visibility { causal: true, query_offset, first_key: None };
        let queries = view::<B, T>(&query_buffer);
        let (out, sums) = (view_mut::<B, T>(&mut out), view_mut::<B, f32>(&mut log_sum_exp));
        device
            .attention_forward(shape, queries, key_values, visibility, None, None, out, sums)
            .unwrap();
    };
    if let Some(block_length) = block_length {
        // Sequences lie in blocks of a shuffled order, of which there is one more than is used.
        let blocks = key_length.div_ceil(block_length);
        let table: Vec<u32> = random.permutation(batch * blocks + 1)[1..].to_vec();
        let paged = |rows: &[T]| {
            let mut out = vec![T::from_f32(f32::NAN); (table.len() + 1) * block_length * width];
            for (at, row) in rows.chunks_exact(width).enumerate() {
                let (sequence, position) = (at / key_length, at % key_length);
                let block = table[sequence * blocks + position / block_length] as usize;
                let start = (block * block_length + position % block_length) * width;
                out[start..start + width].copy_from_slice(row);
            }
            upload(device, &out)
        };
        let (keys, values, block_table) = (paged(&keys), paged(&values), upload(device, &table));
        forward(KeyValues::Paged {
            keys: view::<B, T>(&keys),
            values: view::<B, T>(&values),
            block_table: view::<B, u32>(&block_table),
            block_length,
        });
    } else {
        let (keys, values) = (upload(device, &keys), upload(device, &values));
        forward(KeyValues::Contiguous {
            keys: view::<B, T>(&keys),
            values: view::<B, T>(&values),
            row_stride: width,
        });
    }
    let results = (download::<B, T>(device, &out), download::<B, f32>(device, &log_sum_exp));

    let queries = columns(&queries, shape.query_stride, 0..heads * head_dim);
    let q = tensor(&queries, (batch, query_length, heads, head_dim));
    let [k, v] = [&keys, &values].map(|rows| tensor(rows, (batch, key_length, kv_heads, head_dim)));
    let sizes = (batch, query_length, key_length);
    let seen = operators::visibility(sizes, true, query_offset, None).unwrap();
    let (out, log_sum_exp) = operators::attention(&q, &k, &v, &seen).unwrap();
    assert_close("out", &results.0, &flat(&out), tolerance::<T>());
    assert_close("log_sum_exp", &results.1, &flat(&log_sum_exp), F32_TOLERANCE);
    results
}
