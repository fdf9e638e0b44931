//! An attention on any device against its reference: of a training step, and over a cache.

use moh_kernels::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues, Selection,
};
use moh_kernels::ranks::{AllReduce, Heads};
use moh_kernels::rope::{QkvShape, RopeArgs};
use moh_kernels::router::query_norm::{QueryNormBackward, QueryNormForward, QueryNormRouter};
use moh_kernels::router::{RouterGradient, RouterRanks, Routing, RoutingShape};
use moh_kernels::{Backend, Element};

use super::operators::{self, Packed, SCORE_FACTOR};
use super::{
    F32_TOLERANCE, Random, all_heads, assert_close, columns, download, first_shared, flat, garbage,
    gradient, no_rotation, place, rope_tables, selection_and_gates, table, tensor, tolerance,
    upload, var,
};

/// An attention of a training step.
#[derive(Debug, Clone)]
pub struct Case {
    pub shape: QkvShape,
    pub router: Option<QueryNormRouter>,
    pub weighted: bool,
    pub causal: bool,
    pub document_start: Option<Vec<u32>>,
    /// The heads of the layer; `shape` has the local heads.
    pub heads: Heads,
    /// Whether RoPE is included, and the gradient of the unrotated queries through the router.
    pub whole: bool,
}

impl Case {
    pub fn dense(shape: QkvShape) -> Self {
        let (weighted, causal, whole, heads) = (false, true, false, all_heads(&shape));
        Case { shape, router: None, weighted, causal, document_start: None, heads, whole }
    }

    pub fn routed(shape: QkvShape, shared_heads: usize, top_k: usize) -> Self {
        Case { router: Some(first_shared(shared_heads, top_k)), ..Case::dense(shape) }
    }

    pub fn attention_shape(&self) -> AttentionShape {
        AttentionShape::of_qkv(&self.shape, self.shape.length)
    }

    fn tables(&self) -> (Vec<f32>, Vec<f32>) {
        let tables = if self.whole { rope_tables } else { no_rotation };
        tables(self.shape.length, self.shape.head_dim)
    }
}

/// Returns the starts of the documents of every sequence, in the form of `document_start`.
pub fn documents(shape: &QkvShape, random: &mut Random, mean_length: usize) -> Vec<u32> {
    let mut document_start = Vec::new();
    for _ in 0..shape.batch {
        let mut start = 0;
        for position in 0..shape.length {
            if random.below(mean_length) == 0 {
                start = position as u32;
            }
            document_start.push(start);
        }
    }
    document_start
}

pub struct Inputs<T> {
    pub qkv: Vec<T>,
    pub d_out: Vec<T>,
    pub weights: Vec<f32>,
}

impl<T: Element> Inputs<T> {
    pub fn new(case: &Case, seed: u64) -> Self {
        let (shape, mut random) = (case.shape, Random(seed));
        Inputs {
            qkv: random.elements(shape.tokens() * shape.row()),
            d_out: random.elements(shape.tokens() * shape.heads * shape.head_dim),
            weights: random.elements(shape.tokens() * shape.heads),
        }
    }
}

pub struct Results<T> {
    pub out: Vec<T>,
    pub log_sum_exp: Vec<f32>,
    pub delta: Vec<f32>,
    pub d_qkv: Vec<T>,
    /// Results of a router: the selection, the gates and the balance loss.
    pub mask: Vec<u8>,
    pub gates: Vec<f32>,
    pub balance_loss: f64,
}

/// Weight of the balance loss if a case is a whole attention; exact in f32.
const BALANCE: f32 = 0.5;

/// A case on a device, with routed and rotated queries.
pub struct Prepared<'a, B: Backend, T: Element> {
    device: &'a B,
    case: &'a Case,
    all_reduce: Option<AllReduce<'a, B>>,
    given: Given<B, T>,
    out: B::Buffer<T>,
    log_sum_exp: B::Buffer<f32>,
    delta: B::Buffer<f32>,
    d_qkv: B::Buffer<T>,
}

/// The inputs of attention on a device.
struct Given<B: Backend, T: Element> {
    angles: [B::Buffer<f32>; 2],
    qkv: B::Buffer<T>,
    document_start: Option<B::Buffer<u32>>,
    selected: Selected<B>,
    d_out: B::Buffer<T>,
}

enum Selected<B: Backend> {
    /// All heads, with unscaled outputs.
    All,
    /// All heads, with scaled outputs but without routed heads.
    Weighted {
        routed: B::Buffer<u8>,
        weights: B::Buffer<f32>,
    },
    Routed(QueryNormRouter, Routing<B>),
}

impl<B: Backend> Selected<B> {
    fn new(device: &B, case: &Case, weights: &[f32]) -> Self {
        match case.router {
            Some(router) => {
                let shape = router.routing_shape(case.shape.tokens(), case.heads).unwrap();
                let shape = RoutingShape { weighted: case.weighted, ..shape };
                Selected::Routed(router, Routing::new(device, shape).unwrap())
            }
            None if case.weighted => {
                Selected::Weighted { routed: upload(device, &[]), weights: upload(device, weights) }
            }
            None => Selected::All,
        }
    }

    fn selection(&self, heads: usize) -> Option<Selection<'_, B>> {
        match self {
            Selected::All => None,
            Selected::Weighted { routed, weights } => Some(Selection {
                shared_heads: heads,
                routed: B::whole(routed),
                weights: Some(B::whole(weights)),
            }),
            Selected::Routed(_, routing) => Some(routing.selection()),
        }
    }
}

impl<B: Backend, T: Element> Given<B, T> {
    fn new(
        device: &B,
        case: &Case,
        inputs: &Inputs<T>,
        all_reduce: Option<AllReduce<'_, B>>,
    ) -> Self {
        let (cos, sin) = case.tables();
        let mut given = Given {
            angles: [upload(device, &cos), upload(device, &sin)],
            qkv: upload(device, &inputs.qkv),
            document_start: case.document_start.as_ref().map(|starts| upload(device, starts)),
            selected: Selected::new(device, case, &inputs.weights),
            d_out: upload(device, &inputs.d_out),
        };
        // Rotates queries and keys, and selects heads if there is a router.
        let Given { angles: [cos, sin], qkv, selected, .. } = &mut given;
        let (shape, table, qkv) = (&case.shape, table(cos, sin), B::whole_mut(qkv));
        match selected {
            Selected::Routed(router, routing) => {
                let (router, rope) = (*router, Some(table));
                let args = QueryNormForward { router, shape, qkv, rope, routing, all_reduce };
                device.query_norm_forward::<T>(args).unwrap();
                if case.weighted {
                    device.upload(&inputs.weights, routing.weights_mut()).unwrap();
                }
            }
            _ => device.rope_forward::<T>(RopeArgs { shape, table, qkv }).unwrap(),
        }
        given
    }

    fn args(&self, case: &Case) -> AttentionArgs<'_, B> {
        AttentionArgs {
            shape: case.attention_shape(),
            causal: case.causal,
            query_offset: 0,
            document_start: self.document_start.as_ref().map(|starts| B::whole(starts)),
            selection: self.selected.selection(case.shape.heads),
            score_factor: SCORE_FACTOR,
        }
    }
}

impl<'a, B: Backend, T: Element> Prepared<'a, B, T> {
    pub fn new(
        device: &'a B,
        case: &'a Case,
        inputs: &Inputs<T>,
        all_reduce: Option<AllReduce<'a, B>>,
    ) -> Self {
        let pairs = case.shape.tokens() * case.shape.heads;
        Prepared {
            device,
            case,
            all_reduce,
            given: Given::new(device, case, inputs, all_reduce),
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
        let forward = AttentionForward {
            args: given.args(self.case),
            queries: B::whole(&given.qkv),
            key_values,
            out: B::whole_mut(&mut self.out),
            log_sum_exp: B::whole_mut(&mut self.log_sum_exp),
        };
        self.device.attention_forward(forward).unwrap();
    }

    /// Runs the backward pass, after [`Prepared::forward`].
    pub fn backward(&mut self) {
        let given = &self.given;
        let backward = AttentionBackward {
            args: given.args(self.case),
            qkv: B::whole(&given.qkv),
            out: B::whole(&self.out),
            log_sum_exp: B::whole(&self.log_sum_exp),
            d_out: B::whole(&given.d_out),
            d_qkv: B::whole_mut(&mut self.d_qkv),
            delta: Some(B::whole_mut(&mut self.delta)),
        };
        self.device.attention_backward(backward).unwrap();
    }

    /// Propagates the gradient through RoPE and the router, once.
    fn route_backward(&mut self) {
        let [cos, sin] = &self.given.angles;
        let deltas = vec![7f64; self.case.heads.count * self.case.shape.tokens()];
        let mut deltas = upload(self.device, &deltas);
        let (table, d_qkv) = (table(cos, sin), B::whole_mut(&mut self.d_qkv));
        let shape = &self.case.shape;
        let Selected::Routed(router, routing) = &self.given.selected else {
            let args = RopeArgs { shape, table, qkv: d_qkv };
            return self.device.rope_backward::<T>(args).unwrap();
        };
        let len = self.case.shape.tokens() * routing.columns();
        let deltas = B::view_mut(&mut deltas, 0..len);
        let ranks = self.all_reduce.map(|all_reduce| RouterRanks { table: deltas, all_reduce });
        let delta = Some(B::whole(&self.delta));
        let gradient = RouterGradient { routing, delta, balance_weight: BALANCE, ranks };
        let (router, qkv, rope) = (*router, B::whole(&self.given.qkv), Some(table));
        let args = QueryNormBackward { router, shape, qkv, d_qkv, rope, gradient };
        self.device.query_norm_backward::<T>(args).unwrap();
    }

    pub fn results(&self) -> Results<T> {
        let device = self.device;
        let (mut mask, mut gates, mut loss) = (Vec::new(), Vec::new(), upload(device, &[0f64]));
        if let Selected::Routed(_, routing) = &self.given.selected {
            (mask, gates) = selection_and_gates(device, routing);
            device.balance_loss(routing, 1.0, B::whole_mut(&mut loss)).unwrap();
        }
        Results {
            out: download::<B, T>(device, &self.out),
            log_sum_exp: download::<B, f32>(device, &self.log_sum_exp),
            delta: download::<B, f32>(device, &self.delta),
            d_qkv: download::<B, T>(device, &self.d_qkv),
            mask,
            gates,
            balance_loss: download::<B, f64>(device, &loss)[0],
        }
    }
}

pub fn run<B: Backend, T: Element>(device: &B, case: &Case, inputs: &Inputs<T>) -> Results<T> {
    run_of_rank(device, case, inputs, None)
}

/// Runs a case with heads that are divided among ranks.
pub fn run_of_rank<B: Backend, T: Element>(
    device: &B,
    case: &Case,
    inputs: &Inputs<T>,
    all_reduce: Option<AllReduce<'_, B>>,
) -> Results<T> {
    let mut prepared = Prepared::new(device, case, inputs, all_reduce);
    prepared.forward();
    prepared.backward();
    if case.whole {
        prepared.route_backward();
    }
    prepared.results()
}

struct Expected {
    out: Vec<f64>,
    log_sum_exp: Vec<f64>,
    delta: Vec<f64>,
    d_qkv: Vec<f64>,
    /// 1 for each selected (token, head), otherwise 0.
    mask: Vec<f64>,
}

fn expected<T: Element>(case: &Case, inputs: &Inputs<T>) -> Expected {
    let shape = case.shape;
    let QkvShape { batch, length, heads, head_dim, .. } = shape;
    let packed = Packed::new(&shape);
    let qkv = var(&inputs.qkv, packed.dims());
    let (cos, sin) = case.tables();
    let rotated = packed.rotate(&qkv, &packed.table(&cos, &sin, 0)).unwrap();
    let [q, k, v] = packed.split(&rotated).unwrap();
    let document_start = case.document_start.as_deref();
    let seen =
        operators::visibility((batch, length, length), case.causal, 0, document_start).unwrap();
    let (heads_out, log_sum_exp) = operators::attention(&q, &k, &v, &seen).unwrap();

    let rows = (shape.tokens(), heads);
    let ones = vec![1f32; shape.tokens() * heads];
    let weights = var(if case.weighted { &inputs.weights } else { &ones }, rows);
    let (mut mask, mut balance) = (tensor(&ones, rows), tensor(&[0f32], ()));
    let mut through = mask.clone();
    if let Some(router) = case.router {
        let group = shape.heads / shape.kv_heads;
        let queries = packed.queries(&qkv).unwrap();
        mask = operators::selection(&queries, router, group).unwrap();
        through = mask.clone();
        if case.whole {
            let gates = operators::gates(&queries, router, group).unwrap();
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
    let log_sum_exp = (log_sum_exp.reshape(rows).unwrap() * &mask).unwrap();
    Expected {
        out: flat(&out),
        log_sum_exp: flat(&log_sum_exp),
        delta: gradient(&gradients, &weights),
        d_qkv: gradient(&gradients, &qkv),
        mask: flat(&mask),
    }
}

/// Asserts that the results of (token, head) pairs that are not selected are exactly zero.
fn assert_skipped<T: Element>(case: &Case, actual: &Results<T>, mask: &[f64]) {
    let QkvShape { heads, head_dim, .. } = case.shape;
    let d_q = columns(&actual.d_qkv, case.shape.row(), 0..heads * head_dim);
    let is_zero = |elements: &[T]| elements.iter().all(|x| x.to_f32() == 0.0);
    for pair in (0..mask.len()).filter(|&pair| mask[pair] == 0.0) {
        let row = pair * head_dim..(pair + 1) * head_dim;
        assert!(is_zero(&actual.out[row.clone()]), "out of pair {pair}");
        assert_eq!((actual.delta[pair], actual.log_sum_exp[pair]), (0.0, 0.0), "pair {pair}");
        // The router's gradient of a query does not depend on its selection.
        assert!(case.whole || is_zero(&d_q[row]), "d_q of pair {pair}");
    }
}

pub fn agrees<B: Backend, T: Element>(device: &B, case: &Case, seed: u64) {
    agrees_on(device, case, &Inputs::<T>::new(case, seed));
}

/// Compares like [`agrees`], with the caller's inputs.
pub fn agrees_on<B: Backend, T: Element>(device: &B, case: &Case, inputs: &Inputs<T>) {
    let actual = run(device, case, inputs);
    let Expected { out, log_sum_exp, delta, d_qkv, mask } = expected(case, inputs);
    assert_skipped(case, &actual, &mask);
    // The scores of a whole attention are computed from rotated queries and keys, which are rounded
    // to `T`; in other cases only results are rounded.
    let (stored, internal) = if case.whole {
        (2.0 * tolerance::<T>(), 2.0 * tolerance::<T>())
    } else {
        (tolerance::<T>(), F32_TOLERANCE)
    };
    assert_close("out", &actual.out, &out, stored);
    assert_close("log_sum_exp", &actual.log_sum_exp, &log_sum_exp, internal);
    // A device may compute delta from the rounded output.
    assert_close("delta", &actual.delta, &delta, stored);
    let QkvShape { heads, kv_heads, head_dim, .. } = case.shape;
    let row = case.shape.row();
    let (k, v) = (heads * head_dim, (heads + kv_heads) * head_dim);
    for (what, part) in [("d_q", 0..k), ("d_k", k..v), ("d_v", v..row)] {
        let expected = columns(&d_qkv, row, part.clone());
        assert_close(what, &columns(&actual.d_qkv, row, part), &expected, stored);
    }
}

/// Computes new queries against cached keys and values, contiguous or in blocks of `block_length`. Asserts
/// that the output and the log-sum-exp agree with the reference, and returns them.
pub fn cached<B: Backend, T: Element>(
    device: &B,
    shape: &AttentionShape,
    query_offset: usize,
    block_length: Option<usize>,
    seed: u64,
) -> (Vec<T>, Vec<f32>) {
    let &AttentionShape { batch, query_length, key_length, heads, kv_heads, head_dim, .. } = shape;
    let (mut random, width) = (Random(seed), kv_heads * head_dim);
    let queries: Vec<T> = random.elements(shape.tokens() * shape.query_stride);
    let keys: Vec<T> = random.elements(batch * key_length * width);
    let values: Vec<T> = random.elements(keys.len());
    let query_buffer = upload(device, &queries);
    let mut out = garbage::<B, T>(device, shape.tokens() * heads * head_dim);
    let mut log_sum_exp = garbage::<B, f32>(device, shape.tokens() * heads);
    // Sequences are stored in blocks in a shuffled order, with one unused block.
    let blocks = block_length.map_or(0, |length| key_length.div_ceil(length));
    let table: Vec<u32> = random.permutation(batch * blocks + 1)[1..].to_vec();
    let placed = |rows: &[T]| {
        let Some(length) = block_length else { return upload(device, rows) };
        let mut out = vec![T::from_f32(f32::NAN); (table.len() + 1) * length * width];
        for (at, row) in rows.chunks_exact(width).enumerate() {
            let (sequence, position) = (at / key_length, at % key_length);
            let block = table[sequence * blocks + position / length] as usize;
            place(&mut out, row, block * length + position % length, length, head_dim);
        }
        upload(device, &out)
    };
    let buffers = (placed(&keys), placed(&values), upload(device, &table));
    let (key_view, value_view) = (B::whole(&buffers.0), B::whole(&buffers.1));
    let key_values = match block_length {
        None => KeyValues::Contiguous { keys: key_view, values: value_view, row_stride: width },
        Some(block_length) => KeyValues::Paged {
            keys: key_view,
            values: value_view,
            block_table: B::whole(&buffers.2),
            block_length,
        },
    };
    let forward = AttentionForward {
        args: AttentionArgs {
            query_offset,
            score_factor: SCORE_FACTOR,
            ..AttentionArgs::causal(*shape)
        },
        queries: B::whole(&query_buffer),
        key_values,
        out: B::whole_mut(&mut out),
        log_sum_exp: B::whole_mut(&mut log_sum_exp),
    };
    device.attention_forward(forward).unwrap();
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
