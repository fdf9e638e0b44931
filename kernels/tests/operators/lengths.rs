//! Every operator rejects buffers of lengths that do not fit its shape, with an error and without a
//! panic, and accepts buffers of valid lengths.

mod operators;

use crate::reference::{cases, first_shared, shared, table};
use moh_kernels::attention::{
    AttentionArgs, AttentionForward, AttentionShape, KeyValues, Selection,
};
use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::router::query_norm::{QueryNormBackward, QueryNormRouter};
use moh_kernels::router::{RouterGradient, Routing, RoutingShape};
use moh_kernels::{Backend, Heads, QkvShape};
use operators::{OPERATORS, call, fits, route, routing, zeros};
use proptest::prelude::*;

const SHAPE: QkvShape = QkvShape { batch: 1, length: 3, heads: 4, kv_heads: 2, head_dim: 2 };
const TOKENS: usize = 3;
const WIDTH: usize = 5;
/// A row of queries, keys and values; of queries; of keys.
const ROW: usize = 16;
const QUERIES: usize = 8;
const KEYS: usize = 4;
const ROUTER: QueryNormRouter = first_shared(1, 2);
const HEAD: HeadShape = HeadShape::whole(TOKENS, WIDTH, 7);
const ATTENTION: AttentionShape = AttentionShape {
    batch: 1,
    query_length: TOKENS,
    key_length: TOKENS,
    heads: 4,
    kv_heads: 2,
    head_dim: 2,
    query_stride: ROW,
};

fn right<B: Backend>(device: &B, operator: &str) -> Vec<usize> {
    fits(device, operator).iter().map(|fit| fit.right).collect()
}

#[test]
fn the_lengths_of_the_table_are_right() {
    for operator in OPERATORS {
        on_each_device!(device => {
            assert_eq!(call(device, operator, &right(device, operator)), Ok(()), "{operator}");
        });
    }
}

#[test]
fn each_buffer_that_is_empty_short_or_long_is_refused() {
    for operator in OPERATORS {
        on_each_device!(device => refuses_wrong_lengths(device, operator));
    }
}

fn refuses_wrong_lengths<B: Backend>(device: &B, operator: &str) {
    let right = right(device, operator);
    for (at, fit) in fits(device, operator).into_iter().enumerate() {
        for wrong in [0, right[at].saturating_sub(1), right[at] + 1, 2 * right[at]] {
            let mut lengths = right.clone();
            lengths[at] = wrong;
            let done = call(device, operator, &lengths);
            assert_eq!(done.is_ok(), fit.admits(wrong), "{operator}: {lengths:?}, {done:?}");
        }
    }
}

#[test]
fn a_routing_of_other_heads_is_refused() {
    for heads in [2, 6] {
        on_each_device!(device => refuses_heads(device, heads));
    }
}

/// Checks the error of a routing of [`SHAPE`] with `heads` heads.
fn refuses_heads<B: Backend>(device: &B, heads: usize) {
    let shape = &QkvShape { heads, ..SHAPE };
    let len = TOKENS * shape.row();
    let mut routing = routing(device, TOKENS);
    for rotates in [false, true] {
        assert!(!routes_back(device, ROUTER, shape, len, rotates, &routing));
    }

    let attention = AttentionShape { heads, query_stride: shape.row(), ..ATTENTION };
    let (selection, qkv) = (Some(routing.selection()), zeros::<B, f32>(device, len));
    let mut out = zeros::<B, f32>(device, TOKENS * heads * SHAPE.head_dim);
    let mut sums = zeros(device, TOKENS * heads);
    let forward = AttentionForward {
        args: AttentionArgs { selection, ..AttentionArgs::causal(attention) },
        queries: B::whole(&qkv),
        key_values: KeyValues::Contiguous {
            keys: B::whole(&qkv),
            values: B::whole(&qkv),
            row_stride: shape.row(),
        },
        out: B::whole_mut(&mut out),
        log_sum_exp: B::whole_mut(&mut sums),
    };
    assert!(device.attention_forward(forward).is_err());

    for rotates in [false, true] {
        assert!(route(device, ROUTER, shape, len, rotates, &mut routing).is_err());
    }
}

/// Returns whether the backward pass accepts `len` elements of queries, keys and values.
fn routes_back<B: Backend>(
    device: &B,
    router: QueryNormRouter,
    shape: &QkvShape,
    len: usize,
    rotates: bool,
    routing: &Routing<B>,
) -> bool {
    let (angles, qkv) = (zeros(device, TOKENS), zeros::<B, f32>(device, len));
    let mut d_qkv = zeros::<B, f32>(device, TOKENS * shape.row());
    let rope = rotates.then(|| table(&angles, &angles));
    let gradient = RouterGradient { routing, delta: None, balance_weight: 1.0, ranks: None };
    let (qkv, d_qkv) = (B::whole::<f32>(&qkv), B::whole_mut(&mut d_qkv));
    let args = QueryNormBackward { router, shape, qkv, d_qkv, rope, gradient };
    device.query_norm_backward(args).is_ok()
}

#[test]
fn more_shared_heads_than_heads_are_refused() {
    fn refuses<B: Backend>(device: &B) {
        let qkv = zeros::<B, f32>(device, TOKENS * ROW);
        let (routed, mut out) = (zeros(device, 0), zeros(device, TOKENS * QUERIES));
        let mut sums = zeros(device, TOKENS * SHAPE.heads);
        let (qkv, routed) = (B::whole::<f32>(&qkv), B::whole(&routed));
        let selection = Some(Selection { shared_heads: SHAPE.heads + 1, routed, weights: None });
        let forward = AttentionForward {
            args: AttentionArgs { selection, ..AttentionArgs::causal(ATTENTION) },
            queries: qkv,
            key_values: KeyValues::Contiguous { keys: qkv, values: qkv, row_stride: ROW },
            out: B::whole_mut(&mut out),
            log_sum_exp: B::whole_mut(&mut sums),
        };
        assert!(device.attention_forward(forward).is_err());
    }
    on_each_device!(device => refuses(device));
}

#[test]
fn lengths_and_heads_are_checked_where_all_heads_are_shared() {
    on_each_device!(device => refuses_of_shared_heads(device));
}

fn refuses_of_shared_heads<B: Backend>(device: &B) {
    let router = first_shared(SHAPE.heads, 0);
    let shape = router.routing_shape(TOKENS, Heads::all(SHAPE.heads)).unwrap();
    let mut routing = Routing::new(device, shape).unwrap();
    let other = &QkvShape { heads: 2, ..SHAPE };
    let right = TOKENS * ROW;
    for (router, shape, len, fits) in [
        (router, &SHAPE, right - 1, false),
        (router, other, TOKENS * other.row(), false),
        (QueryNormRouter { top_k: 1, ..router }, &SHAPE, right, false),
        (router, &SHAPE, right, true),
    ] {
        for rotates in [true, false] {
            assert_eq!(route(device, router, shape, len, rotates, &mut routing).is_ok(), fits);
        }
    }
    for (shape, len, fits) in
        [(&SHAPE, right - 1, false), (other, TOKENS * other.row(), false), (&SHAPE, right, true)]
    {
        for rotates in [true, false] {
            assert_eq!(routes_back(device, router, shape, len, rotates, &routing), fits);
        }
    }
}

/// Heads 0 and 2 of four are shared: three columns, two routed heads.
#[test]
fn the_lengths_of_a_set_of_shared_heads_are_those_of_its_columns() {
    fn check<B: Backend>(device: &B) {
        let router = shared([0, 2], 1);
        let right = router.routing_shape(TOKENS, Heads::all(SHAPE.heads)).unwrap();
        for (columns, saved_per_token, fits) in
            [(3, 4, true), (4, 4, true), (2, 4, false), (3, 3, false)]
        {
            let rooms = RoutingShape { columns, saved_per_token, ..right };
            let mut routing = Routing::new(device, rooms).unwrap();
            let routed = route(device, router, &SHAPE, TOKENS * ROW, false, &mut routing);
            assert_eq!(routed.is_ok(), fits);
            for len in [2 * TOKENS, 3 * TOKENS, 4 * TOKENS].into_iter().filter(|_| fits) {
                let gates = device.download(routing.gates(), &mut vec![0.0; len]);
                let selected = device.download(routing.selected(), &mut vec![0; len]);
                assert_eq!((gates.is_ok(), selected.is_ok()), (len == 9, len == 9));
            }
        }
        assert!(Routing::new(device, RoutingShape { columns: 5, ..right }).is_err());
    }
    on_each_device!(device => check(device));
}

proptest! {
    #![proptest_config(cases(64))]
    #[test]
    fn no_lengths_make_an_operator_panic(
        choice: prop::sample::Index,
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0usize..90), 1..4),
    ) {
        let operator = choice.get(OPERATORS);
        on_each_device!(device => {
            let mut lengths = right(device, operator);
            for (at, len) in &changes {
                let at = at.index(lengths.len());
                lengths[at] = *len;
            }
            // Several changed lengths may fit each other. The test only checks that the call returns.
            let _ = call(device, operator, &lengths);
        });
    }
}
