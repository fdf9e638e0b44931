//! Every operator refuses buffers whose lengths do not fit its shape, with an error and without a
//! panic; and accepts those that do.

use crate::reference::{cases, view, view_mut};
use half::bf16;
use moh_kernels::adamw::AdamW;
use moh_kernels::attention::{AttentionShape, KeyValues, Visibility};
use moh_kernels::cross_entropy::{HeadGradients, HeadShape};
use moh_kernels::ranks::{Heads, VocabularyRows};
use moh_kernels::rope::{QkvShape, RopeTable};
use moh_kernels::router::{QueryNormRouter, RouterGradient};
use moh_kernels::{Accumulation, Backend, Result, Scalar};
use proptest::prelude::*;

/// Which lengths of a buffer fit, given the others.
#[derive(Debug, Clone, Copy)]
enum Fit {
    /// This one alone.
    Exactly(usize),
    /// This one and more.
    AtLeast(usize),
}

impl Fit {
    fn right(self) -> usize {
        match self {
            Fit::Exactly(len) | Fit::AtLeast(len) => len,
        }
    }

    fn admits(self, len: usize) -> bool {
        match self {
            Fit::Exactly(right) => len == right,
            Fit::AtLeast(right) => len >= right,
        }
    }
}

use Fit::{AtLeast, Exactly};

const SHAPE: QkvShape = QkvShape { batch: 1, length: 3, heads: 4, kv_heads: 2, head_dim: 2 };
const TOKENS: usize = 3;
const WIDTH: usize = 5;
/// A row of queries, keys and values; of queries; of keys.
const ROW: usize = 16;
const QUERIES: usize = 8;
const KEYS: usize = 4;
const ROUTER: QueryNormRouter = QueryNormRouter { shared_heads: 1, top_k: 2 };
const HEAD: HeadShape = HeadShape::whole(TOKENS, WIDTH, 7);
const STEP: AdamW = AdamW {
    learning_rate: 0.1,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    clip_norm: 1.0,
    step: 1,
};
const ATTENTION: AttentionShape = AttentionShape {
    batch: 1,
    query_length: TOKENS,
    key_length: TOKENS,
    heads: 4,
    kv_heads: 2,
    head_dim: 2,
    query_stride: ROW,
};

/// Every operator with the lengths of its buffers in the order of its arguments.
const OPERATORS: &[(&str, &[Fit])] = &[
    ("embedding_forward", &[Exactly(TOKENS), Exactly(7 * WIDTH), Exactly(TOKENS * WIDTH)]),
    ("embedding_backward", &[Exactly(TOKENS), Exactly(TOKENS * WIDTH), Exactly(7 * WIDTH)]),
    (
        "rms_norm_forward",
        &[Exactly(TOKENS * WIDTH), Exactly(WIDTH), Exactly(TOKENS * WIDTH), Exactly(TOKENS)],
    ),
    (
        "rms_norm_backward",
        &[
            Exactly(TOKENS * WIDTH),
            Exactly(WIDTH),
            Exactly(TOKENS),
            Exactly(TOKENS * WIDTH),
            Exactly(TOKENS * WIDTH),
            Exactly(WIDTH),
        ],
    ),
    (
        "linear_forward",
        &[Exactly(TOKENS * WIDTH), Exactly(2 * WIDTH), Exactly(TOKENS * 2), Exactly(TOKENS * 2)],
    ),
    ("linear_backward_input", &[Exactly(TOKENS * 2), Exactly(2 * WIDTH), Exactly(TOKENS * WIDTH)]),
    ("linear_backward_weight", &[Exactly(TOKENS * WIDTH), Exactly(TOKENS * 2), Exactly(2 * WIDTH)]),
    ("rope_route_forward", &[Exactly(4), Exactly(4), Exactly(TOKENS * ROW), AtLeast(TOKENS)]),
    (
        "rope_route_backward",
        &[
            Exactly(4),
            Exactly(4),
            Exactly(TOKENS * ROW),
            Exactly(TOKENS * ROW),
            Exactly(TOKENS),
            Exactly(TOKENS * 4),
        ],
    ),
    ("balance_loss", &[Exactly(1)]),
    ("routed_mask", &[Exactly(TOKENS * 3)]),
    ("gates", &[Exactly(TOKENS * 3)]),
    (
        "attention_forward",
        &[
            AtLeast((TOKENS - 1) * ROW + QUERIES),
            AtLeast((TOKENS - 1) * ROW + KEYS),
            AtLeast((TOKENS - 1) * ROW + KEYS),
            Exactly(TOKENS),
            Exactly(TOKENS),
            Exactly(TOKENS * 4),
            Exactly(TOKENS * QUERIES),
            Exactly(TOKENS * 4),
        ],
    ),
    (
        "attention_forward by block table",
        &[
            AtLeast((TOKENS - 1) * ROW + QUERIES),
            AtLeast(4 * KEYS),
            AtLeast(4 * KEYS),
            Exactly(2),
            Exactly(TOKENS * QUERIES),
            Exactly(TOKENS * 4),
        ],
    ),
    (
        "attention_backward",
        &[
            Exactly(TOKENS * ROW),
            Exactly(TOKENS),
            Exactly(TOKENS),
            Exactly(TOKENS * 4),
            Exactly(TOKENS * QUERIES),
            Exactly(TOKENS * 4),
            Exactly(TOKENS * QUERIES),
            Exactly(TOKENS * ROW),
            Exactly(TOKENS * 4),
        ],
    ),
    (
        "key_value_append",
        &[Exactly(TOKENS * ROW), AtLeast((TOKENS + 1) * KEYS), AtLeast((TOKENS + 1) * KEYS)],
    ),
    ("swiglu_forward", &[Exactly(TOKENS * 2 * WIDTH), Exactly(TOKENS * WIDTH)]),
    ("swiglu_backward", &[Exactly(TOKENS * 2 * WIDTH), Exactly(TOKENS * WIDTH)]),
    (
        "cross_entropy",
        &[
            Exactly(TOKENS * WIDTH),
            Exactly(7 * WIDTH),
            Exactly(TOKENS),
            AtLeast(TOKENS * 7),
            Exactly(1),
            Exactly(TOKENS * WIDTH),
            Exactly(7 * WIDTH),
        ],
    ),
    ("add", &[Exactly(WIDTH), Exactly(WIDTH), Exactly(WIDTH)]),
    ("squared_norms", &[AtLeast(0), AtLeast(0), Exactly(1)]),
    (
        "adamw",
        &[
            Exactly(1),
            Exactly(WIDTH),
            Exactly(WIDTH),
            Exactly(WIDTH),
            Exactly(WIDTH),
            Exactly(WIDTH),
        ],
    ),
];

/// A routing of `tokens` tokens, which is how long a selection is.
fn routing<B: Backend>(device: &B, tokens: usize) -> B::Routing {
    let shape = QkvShape { length: tokens, ..SHAPE };
    let (cos, sin) = (zeros::<B, f32>(device, tokens), zeros::<B, f32>(device, tokens));
    let table = RopeTable { cos: view::<B, f32>(&cos), sin: view::<B, f32>(&sin) };
    let mut qkv = zeros::<B, f32>(device, tokens * ROW);
    let mut routing = device.routing(tokens, Heads::all(SHAPE.heads), ROUTER).unwrap();
    let qkv = view_mut::<B, f32>(&mut qkv);
    device.rope_route_forward(&shape, table, 0, qkv, Some(&mut routing), None).unwrap();
    routing
}

fn zeros<B: Backend, S: Scalar>(device: &B, len: usize) -> B::Buffer<S> {
    device.allocate(len).unwrap()
}

/// Runs an operator on buffers of these lengths.
fn call<B: Backend>(device: &B, operator: &str, lengths: &[usize]) -> Result<()> {
    let floats = |at: usize| zeros::<B, f32>(device, lengths[at]);
    let words = |at: usize| zeros::<B, u32>(device, lengths[at]);
    macro_rules! read {
        ($buffer:expr) => {
            view::<B, f32>(&$buffer)
        };
    }
    macro_rules! write {
        ($buffer:expr) => {
            view_mut::<B, f32>(&mut $buffer)
        };
    }
    let rows = VocabularyRows::all(7);
    let mut f: Vec<B::Buffer<f32>> = (0..lengths.len()).map(floats).collect();
    // What an operator writes, taken out so that the others can be read.
    let mut take = |at: usize| std::mem::replace(&mut f[at], zeros(device, 0));
    let seen = Visibility { causal: true, query_offset: 0, first_key: None };
    match operator {
        "embedding_forward" => {
            let (ids, mut out) = (words(0), take(2));
            device.embedding_forward(WIDTH, rows, view::<B, u32>(&ids), read!(f[1]), write!(out))
        }
        "embedding_backward" => {
            let (ids, mut d_table) = (words(0), take(2));
            device.embedding_backward(
                WIDTH,
                rows,
                view::<B, u32>(&ids),
                read!(f[1]),
                write!(d_table),
            )
        }
        "rms_norm_forward" => {
            let (mut y, mut inv_rms) = (take(2), take(3));
            device.rms_norm_forward(1e-5, read!(f[0]), read!(f[1]), write!(y), write!(inv_rms))
        }
        "rms_norm_backward" => {
            let (mut d_x, mut d_weight) = (take(4), take(5));
            let (x, weight, inv_rms, d_y) = (read!(f[0]), read!(f[1]), read!(f[2]), read!(f[3]));
            device.rms_norm_backward(x, weight, inv_rms, d_y, write!(d_x), write!(d_weight))
        }
        "linear_forward" => {
            let mut y = take(3);
            let residual = Some(read!(f[2]));
            device.linear_forward(WIDTH, read!(f[0]), read!(f[1]), residual, write!(y))
        }
        "linear_backward_input" => {
            let mut d_x = take(2);
            device.linear_backward_input(WIDTH, read!(f[0]), read!(f[1]), write!(d_x))
        }
        "linear_backward_weight" => {
            let mut d_weight = take(2);
            let (x, d_y, into) = (read!(f[0]), read!(f[1]), write!(d_weight));
            device.linear_backward_weight(WIDTH, x, d_y, into, Accumulation::Overwrite)
        }
        "rope_route_forward" => {
            let (mut qkv, table) = (take(2), table::<B>(&f[0], &f[1]));
            let mut routing = device.routing(lengths[3], Heads::all(SHAPE.heads), ROUTER)?;
            device.rope_route_forward(&SHAPE, table, 0, write!(qkv), Some(&mut routing), None)
        }
        "rope_route_backward" => {
            let (mut d_qkv, table) = (take(3), table::<B>(&f[0], &f[1]));
            let (routing, delta) = (&routing(device, lengths[4]), Some(read!(f[5])));
            let gradient = RouterGradient { routing, delta, balance_weight: 1.0, ranks: None };
            device.rope_route_backward(&SHAPE, table, 0, read!(f[2]), write!(d_qkv), Some(gradient))
        }
        "balance_loss" => {
            let mut out = zeros::<B, f64>(device, lengths[0]);
            device.balance_loss(&routing(device, TOKENS), 1.0, view_mut::<B, f64>(&mut out))
        }
        "routed_mask" => device.routed_mask(&routing(device, TOKENS), &mut vec![0; lengths[0]]),
        "gates" => device.gates(&routing(device, TOKENS), &mut vec![0.0; lengths[0]]),
        "attention_forward" => {
            let (mut out, mut sums, first_key) = (take(6), take(7), words(3));
            let seen = Visibility { first_key: Some(view::<B, u32>(&first_key)), ..seen };
            let (keys, values) = (read!(f[1]), read!(f[2]));
            let key_values = KeyValues::Contiguous { keys, values, row_stride: ROW };
            device.attention_forward(
                &ATTENTION,
                read!(f[0]),
                key_values,
                seen,
                Some(&routing(device, lengths[4])),
                Some(read!(f[5])),
                write!(out),
                write!(sums),
            )
        }
        "attention_forward by block table" => {
            let (mut out, mut sums) = (take(4), take(5));
            let mut table = zeros::<B, u32>(device, lengths[3]);
            // The last block in use is the second of two.
            device.upload(&vec![1; lengths[3]], view_mut::<B, u32>(&mut table))?;
            let key_values = KeyValues::Paged {
                keys: read!(f[1]),
                values: read!(f[2]),
                block_table: view::<B, u32>(&table),
                block_length: 2,
            };
            let (out, sums) = (write!(out), write!(sums));
            device.attention_forward(
                &ATTENTION,
                read!(f[0]),
                key_values,
                seen,
                None,
                None,
                out,
                sums,
            )
        }
        "attention_backward" => {
            let (mut d_qkv, mut delta, first_key) = (take(7), take(8), words(1));
            device.attention_backward(
                &ATTENTION,
                read!(f[0]),
                Visibility { first_key: Some(view::<B, u32>(&first_key)), ..seen },
                Some(&routing(device, lengths[2])),
                Some(read!(f[3])),
                read!(f[4]),
                read!(f[5]),
                read!(f[6]),
                write!(d_qkv),
                Some(write!(delta)),
            )
        }
        "key_value_append" => {
            let (mut keys, mut values) = (take(1), take(2));
            device.key_value_append(&SHAPE, 1, read!(f[0]), write!(keys), write!(values))
        }
        "swiglu_forward" => {
            let mut out = take(1);
            device.swiglu_forward(WIDTH, read!(f[0]), write!(out))
        }
        "swiglu_backward" => {
            let (mut gate_up, mut out) = (take(0), take(1));
            device.swiglu_backward(WIDTH, write!(gate_up), write!(out))
        }
        "cross_entropy" => {
            let (targets, mut scratch, mut d_x, mut d_weight) =
                (words(2), take(3), take(5), take(6));
            let mut loss = zeros::<B, f64>(device, lengths[4]);
            let gradients = HeadGradients {
                scale: 1.0,
                d_x: write!(d_x),
                d_weight: write!(d_weight),
                accumulation: Accumulation::Overwrite,
            };
            device.cross_entropy(
                &HEAD,
                read!(f[0]),
                read!(f[1]),
                view::<B, u32>(&targets),
                write!(scratch),
                view_mut::<B, f64>(&mut loss),
                Some(gradients),
                None,
            )
        }
        "add" => {
            let mut out = take(2);
            device.add(read!(f[0]), read!(f[1]), write!(out))
        }
        "squared_norms" => {
            let mut out = zeros::<B, f64>(device, lengths[2]);
            let xs = [read!(f[0]), read!(f[1])];
            device.squared_norms(&xs, view_mut::<B, f64>(&mut out))
        }
        "adamw" => {
            let norm = zeros::<B, f64>(device, lengths[0]);
            let mut weights = zeros::<B, bf16>(device, lengths[2]);
            let mut remainder = zeros::<B, i16>(device, lengths[3]);
            let (mut m, mut v) = (take(4), take(5));
            let (norm, weights) = (view::<B, f64>(&norm), view_mut::<B, bf16>(&mut weights));
            let remainder = Some(view_mut::<B, i16>(&mut remainder));
            device.adamw(&STEP, norm, read!(f[1]), weights, remainder, write!(m), write!(v))
        }
        _ => unreachable!("{operator} is not in the table"),
    }
}

fn table<'a, B: Backend>(cos: &'a B::Buffer<f32>, sin: &'a B::Buffer<f32>) -> RopeTable<'a, B> {
    RopeTable { cos: view::<B, f32>(cos), sin: view::<B, f32>(sin) }
}

fn right(fits: &[Fit]) -> Vec<usize> {
    fits.iter().map(|fit| fit.right()).collect()
}

#[test]
fn the_lengths_of_the_table_are_right() {
    for (operator, fits) in OPERATORS {
        on_each_device!(device => assert_eq!(call(device, operator, &right(fits)), Ok(()), "{operator}"));
    }
}

#[test]
fn each_buffer_that_is_empty_short_or_long_is_refused() {
    for (operator, fits) in OPERATORS {
        for (at, fit) in fits.iter().enumerate() {
            for wrong in [0, fit.right().saturating_sub(1), fit.right() + 1, 2 * fit.right()] {
                let mut lengths = right(fits);
                lengths[at] = wrong;
                on_each_device!(device => {
                    let done = call(device, operator, &lengths);
                    assert_eq!(done.is_ok(), fit.admits(wrong), "{operator}: {lengths:?}, {done:?}");
                });
            }
        }
    }
}

#[test]
fn a_routing_of_other_heads_is_refused() {
    fn refuses<B: Backend>(device: &B, heads: usize) {
        let other = QkvShape { heads, ..SHAPE };
        let mut routing = routing(device, TOKENS);
        let tables = zeros::<B, f32>(device, TOKENS);
        let table = table::<B>(&tables, &tables);
        let qkv = zeros::<B, f32>(device, TOKENS * other.row());
        let (mut d_qkv, mut rotated) = (zeros(device, B::len(&qkv)), zeros(device, B::len(&qkv)));
        let gradient =
            RouterGradient { routing: &routing, delta: None, balance_weight: 1.0, ranks: None };
        let (qkv_view, d_view) = (view::<B, f32>(&qkv), view_mut::<B, f32>(&mut d_qkv));
        assert!(
            device.rope_route_backward(&other, table, 0, qkv_view, d_view, Some(gradient)).is_err()
        );
        let attention = AttentionShape { heads, query_stride: other.row(), ..ATTENTION };
        let key_values =
            KeyValues::Contiguous { keys: qkv_view, values: qkv_view, row_stride: other.row() };
        let seen = Visibility { causal: true, query_offset: 0, first_key: None };
        let mut out = zeros(device, TOKENS * heads * SHAPE.head_dim);
        let mut sums = zeros(device, TOKENS * heads);
        let (out, sums) = (view_mut::<B, f32>(&mut out), view_mut::<B, f32>(&mut sums));
        let selection = Some(&routing);
        let done = device
            .attention_forward(&attention, qkv_view, key_values, seen, selection, None, out, sums);
        assert!(done.is_err());
        let rotated = view_mut::<B, f32>(&mut rotated);
        assert!(
            device.rope_route_forward(&other, table, 0, rotated, Some(&mut routing), None).is_err()
        );
    }
    on_each_device!(device => refuses(device, 2));
    on_each_device!(device => refuses(device, 6));
}

proptest! {
    #![proptest_config(cases(64))]
    #[test]
    fn no_lengths_make_an_operator_panic(
        choice: prop::sample::Index,
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0usize..90), 1..4),
    ) {
        let &(operator, fits) = choice.get(OPERATORS);
        let mut lengths = right(fits);
        for (at, len) in changes {
            lengths[at.index(fits.len())] = len;
        }
        // Several changed lengths may fit each other; what matters is that an answer comes back.
        on_each_device!(device => { let _ = call(device, operator, &lengths); });
    }
}
