//! The query-norm router with any set of shared heads: against the reference, and against a
//! model with the heads in another order, the shared set first.

use super::{
    Inputs, Prepared, Routed, agrees, apart_is_together, equal_norms_pass_nothing, is_refused,
    route, route_with, routers, routing, same_bits,
};
use crate::reference::{
    F32_TOLERANCE, Random, assert_close, cases, download, first_shared, selection_and_gates,
    shared, tolerance, upload, wide,
};
use half::bf16;
use moh_kernels::router::query_norm::{QueryNormRouter, Selects};
use moh_kernels::router::{Routing, RoutingShape, SharedHeads};
use moh_kernels::{Backend, Cpu, Element, Heads, Memory, QkvShape};
use proptest::prelude::*;

impl<T: Element> Inputs<T> {
    /// Returns the inputs with query head `order[i]` at place i.
    fn in_order(&self, order: &[usize]) -> Self {
        let Inputs { shape, qkv, d_qkv, delta, balance, tables } = self.clone();
        let delta = delta.map(|delta| columns_in_order(&delta, shape.heads, order));
        let [qkv, d_qkv] = [qkv, d_qkv].map(|rows| in_order(&shape, &rows, order));
        Inputs { shape, qkv, d_qkv, delta, balance, tables }
    }
}

/// Returns the rows of queries, keys and values with query head `order[i]` at place i.
fn in_order<T: Copy>(shape: &QkvShape, rows: &[T], order: &[usize]) -> Vec<T> {
    let of_row = |row: &[T]| {
        let queries = order.iter().map(|head| &row[head * shape.head_dim..][..shape.head_dim]);
        [queries.collect::<Vec<_>>().concat(), row[shape.heads * shape.head_dim..].to_vec()]
    };
    rows.chunks_exact(shape.row()).flat_map(of_row).flatten().collect()
}

fn columns_in_order<S: Copy>(table: &[S], row: usize, order: &[usize]) -> Vec<S> {
    table.chunks_exact(row).flat_map(|row| order.iter().map(|&column| row[column])).collect()
}

/// Returns the routed heads' part of the tables, in their order; asserts the contents of the shared heads'
/// columns.
pub(super) fn of_routed<T>(
    found: &Routed<T>,
    router: &QueryNormRouter,
    heads: usize,
) -> (Vec<u8>, Vec<f32>) {
    let (mut mask, mut gates) = (Vec::new(), Vec::new());
    let columns = router.shared.leading()..heads;
    for (at, (&mark, &gate)) in found.mask.iter().zip(&found.gates).enumerate() {
        if router.shared.contains(columns.start + at % columns.len()) {
            assert_eq!((mark, gate), (1, 0.0), "a shared head");
        } else {
            mask.push(mark);
            gates.push(gate);
        }
    }
    (mask, gates)
}

/// Checks that a model with the shared heads moved to the front routes in the same way: the same heads, gates and
/// gradients. On a CPU, which sums in the order of the routed heads, the bits are the same.
fn order_is_irrelevant<B: Backend, T: Element>(
    device: &B,
    shape: QkvShape,
    router: QueryNormRouter,
    seed: u64,
) {
    let QueryNormRouter { shared, top_k, .. } = router;
    let routed = (0..shape.heads).filter(|&head| !shared.contains(head));
    let order: Vec<usize> = shared.heads().chain(routed).collect();
    let first = first_shared(shared.len(), top_k);
    let inputs = Inputs::<T>::new(shape, seed);
    let found = route(device, &inputs, router);
    let expected = route(device, &inputs.in_order(&order), first);

    let (mask, gates) = of_routed(&found, &router, shape.heads);
    assert_eq!(mask, expected.mask, "another selection");
    assert!(in_order(&shape, &found.rotated, &order) == expected.rotated, "other queries");
    let d_qkv = in_order(&shape, &found.d_qkv, &order);
    if device.name() == Cpu.name() {
        assert!(same_bits(&gates, &expected.gates), "other gates");
        assert_eq!(found.balance_loss, expected.balance_loss);
        assert!(d_qkv == expected.d_qkv, "another gradient");
    }
    assert_close("gates", &gates, &wide(&expected.gates), F32_TOLERANCE);
    let loss = [found.balance_loss as f32];
    assert_close("balance loss", &loss, &[expected.balance_loss], F32_TOLERANCE);
    assert_close("d_qkv", &d_qkv, &wide(&expected.d_qkv), tolerance::<T>());
}

/// Asserts that two results of a router have the same bits.
fn is_the_same<T: Element>(a: &Routed<T>, b: &Routed<T>) {
    assert_eq!((&a.mask, a.balance_loss), (&b.mask, b.balance_loss));
    assert!(same_bits(&a.gates, &b.gates) && same_bits(&a.rotated, &b.rotated));
    assert!(same_bits(&a.d_qkv, &b.d_qkv));
}

#[test]
fn sets_of_shared_heads_agree_over_more_than_one_task() {
    let shape = QkvShape { batch: 2, length: 75, heads: 12, kv_heads: 4, head_dim: 16 };
    let sets = [(&[0, 1, 4, 5, 9][..], 3), (&[11], 4), (&[0, 2, 4, 6, 8, 10], 6), (&[1, 2, 3], 0)];
    for (set, top_k) in sets {
        let router = shared(set.iter().copied(), top_k);
        for seed in [1, 2] {
            on_each_device!(device, T => agrees::<_, T>(device, shape, router, seed));
        }
        on_each_device!(device, T => order_is_irrelevant::<_, T>(device, shape, router, 3));
    }
}

/// Shared heads in every word of the set, and columns after the last word.
#[test]
fn shared_heads_far_after_the_first_ones_agree() {
    let shape = QkvShape { batch: 3, length: 3, heads: 300, kv_heads: 2, head_dim: 8 };
    let far = shared([0, 1, 33, 64, 65, 66, 129, 130, 193, 194, 257], 40);
    let every_other = shared((0..256).step_by(2), 100);
    for router in [far, every_other] {
        on_each_device!(device => agrees::<_, f32>(device, shape, router, 5));
        on_each_device!(device => order_is_irrelevant::<_, f32>(device, shape, router, 5));
        on_each_device!(device => apart_is_together::<_, bf16>(device, shape, router, 5));
        on_each_device!(device => equal_norms_pass_nothing(device, shape, router, 5));
    }
}

/// A query that is not finite in a shared head does not change other heads.
#[test]
fn a_shared_head_is_not_measured() {
    let shape = QkvShape { batch: 1, length: 3, heads: 6, kv_heads: 2, head_dim: 4 };
    let router = shared([0, 3], 2);
    let inputs = Inputs::<f32>::unrotated(shape, 6);
    let (pairs, start) = (shape.tokens() * shape.heads, 3 * shape.head_dim);
    on_each_device!(device => {
        let finite = route(device, &inputs, router);
        let mut infinite = inputs.clone();
        for row in infinite.qkv.chunks_exact_mut(shape.row()) {
            row[start..start + shape.head_dim].fill(f32::INFINITY);
        }
        for pair in (3..pairs).step_by(shape.heads) {
            infinite.delta.as_mut().unwrap()[pair] = f32::NAN;
        }
        let found = route(device, &infinite, router);
        assert_eq!((found.mask, found.gates), (finite.mask, finite.gates));
        assert_eq!(found.balance_loss, finite.balance_loss);
        let rows = finite.d_qkv.chunks_exact(shape.row());
        let rows = found.d_qkv.chunks_exact(shape.row()).zip(rows);
        for (found, expected) in rows {
            assert_eq!(found[..start], expected[..start]);
            assert_eq!(found[start + shape.head_dim..], expected[start + shape.head_dim..]);
        }
    });
}

#[test]
fn sets_that_cannot_work_are_refused() {
    let shape = QkvShape { batch: 1, length: 1, heads: 4, kv_heads: 1, head_dim: 2 };
    for (set, top_k, expected) in [
        (&[4][..], 0, "1 shared heads, up to head 4, of 4 heads"),
        (&[0, 1, 2, 3, 4], 0, "5 shared heads, up to head 4, of 4 heads"),
        (&[0, 1, 2, 3, 9], 0, "5 shared heads, up to head 9, of 4 heads"),
        (&[0, 1, 2], 0, "one routed head has no standard deviation"),
        (&[0, 1, 2], 1, "one routed head has no standard deviation"),
        (&[1, 2, 3], 0, "one routed head has no standard deviation"),
        (&[0, 2, 3], 1, "one routed head has no standard deviation"),
        (&[], 5, "top 5 of 4 routed heads"),
        (&[0, 1], 3, "top 3 of 2 routed heads"),
        (&[3], 4, "top 4 of 3 routed heads"),
        (&[1, 3], 3, "top 3 of 2 routed heads"),
    ] {
        let router = shared(set.iter().copied(), top_k);
        is_refused(shape, router, expected);
        let refused = routing(&Cpu, &shape, first_shared(0, 1)).begin(1, router.shared);
        assert_eq!(refused.is_err(), router.shared.heads().any(|head| head > 3));
    }
}

#[test]
fn a_routing_counts_the_columns_and_routed_heads_of_its_set() {
    let shape = shared([0, 1, 4], 1).routing_shape(3, Heads::all(8)).unwrap();
    assert_eq!((shape.columns, shape.saved_per_token), (6, 7));
    let mut routing = Routing::new(&Cpu, shape).unwrap();
    assert_eq!((routing.columns(), routing.shared()), (6, SharedHeads::first(2)));
    let sets: [(&[usize], usize, usize); 4] =
        [(&[0, 1, 4], 6, 5), (&[0, 1, 2, 4, 6], 5, 3), (&[0, 1], 6, 6), (&[0, 1, 7, 6], 6, 4)];
    for (set, columns, routed) in sets {
        let set = SharedHeads::from_heads(set.iter().copied()).unwrap();
        routing.begin(2, set).unwrap();
        assert_eq!((routing.columns(), routing.routed(), routing.shared()), (columns, routed, set));
        assert_eq!((routing.selected().len(), routing.gates().len()), (2 * columns, 2 * columns));
        let selection = routing.selection();
        assert_eq!((selection.shared_heads, selection.routed.len()), (set.leading(), 2 * columns));
    }
    let set = SharedHeads::from_heads([0, 2, 3, 4, 5]).unwrap();
    let message = routing.begin(2, set).unwrap_err().to_string();
    assert!(message.contains("room for 6 columns, not 7"), "{message}");
    assert!(routing.begin(4, SharedHeads::first(2)).is_err());
}

/// Without a router every token selects only the shared heads, with gates of 0.
#[test]
fn every_token_is_routed_to_the_shared_heads() {
    let sets: [&[usize]; 4] = [&[0, 1, 4], &[], &[5], &[0, 1, 2, 3, 4, 5]];
    for (set, ranks) in sets.into_iter().flat_map(|set| [(set, 1), (set, 2)]) {
        let heads = Heads { count: 6, group_size: 3, rank: ranks - 1, ranks };
        let set = SharedHeads::from_heads(set.iter().copied()).unwrap();
        let columns = 6 - set.leading();
        let (tokens, saved_per_token, weighted, logits) = (9, 0, false, 0);
        let shape = RoutingShape { tokens, heads, columns, saved_per_token, weighted, logits };
        on_each_device!(device => check(device, shape, set));
    }

    fn check<B: Backend>(device: &B, shape: RoutingShape, set: SharedHeads) {
        let (heads, columns) = (shape.heads, shape.columns);
        let mut routing = Routing::new(device, shape).unwrap();
        device.route_to_shared(7, set, &mut routing).unwrap();
        let (mask, gates) = selection_and_gates(device, &routing);
        let expected = (set.leading()..6).map(|head| u8::from(set.contains(head)));
        assert_eq!(mask, expected.collect::<Vec<_>>().repeat(7));
        assert!(gates.len() == 7 * columns && gates.iter().all(|&gate| gate == 0.0));
        let local = routing.selection();
        let leading = heads.local_below(set.leading());
        let mut marks = vec![9u8; 7 * (heads.local() - leading)];
        device.download(local.routed, &mut marks).unwrap();
        let expected =
            (leading..heads.local()).map(|local| u8::from(set.contains(heads.index(local))));
        assert_eq!(marks, expected.collect::<Vec<_>>().repeat(7));
        let mut loss = upload(device, &[0f64]);
        device.balance_loss(&routing, 1.0, B::whole_mut(&mut loss)).unwrap();
        assert_eq!(download::<B, f64>(device, &loss), [0.0]);
        assert!(device.route_to_shared(10, set, &mut routing).is_err());
    }
}

/// One routing for layers with different shared heads, as in a model with buffers for only one layer, and for fewer
/// tokens.
#[test]
fn a_routing_serves_layers_of_other_sets_and_fewer_tokens() {
    let shape = QkvShape { batch: 1, length: 9, heads: 6, kv_heads: 2, head_dim: 4 };
    let inputs = Inputs::<f32>::new(shape, 9);
    on_each_device!(device => {
        for (first, others, more) in [
            (first_shared(1, 2), [(3, 2, 5), (1, 2, 9), (6, 0, 7), (2, 1, 9)].map(
                |(count, top_k, length)| (first_shared(count, top_k), length),
            ), first_shared(0, 2)),
            (shared([0, 3], 2), [
                (shared([0, 3], 2), 9),
                (first_shared(3, 2), 9),
                (shared([0, 1, 4], 1), 9),
                (first_shared(6, 0), 9),
            ], shared([3], 2)),
        ] {
            let mut room = routing(device, &shape, first);
            for (router, length) in others {
                let inputs = Inputs::<f32>::new(QkvShape { length, ..shape }, 9);
                let found = route_with(device, &inputs, router, &mut room);
                is_the_same(&found, &route(device, &inputs, router));
            }
            assert!(Prepared::new(device, &inputs, more).route(true, &mut room).is_err());
        }
    });
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn a_set_routes_like_the_first_heads_of_a_model_in_its_order(
        (shape, router) in routers(),
        seed: u64,
    ) {
        prop_assume!(router.selects == Selects::Heads);
        on_each_device!(device, T => order_is_irrelevant::<_, T>(device, shape, router, seed));
    }

    #[test]
    fn the_first_heads_in_any_order_are_the_first_heads(
        (shape, router) in routers(),
        seed: u64,
    ) {
        let count = router.shared.len();
        let order = Random(seed).permutation(count);
        let set = shared(order.into_iter().map(|head| head as usize), router.top_k);
        prop_assert_eq!(set, first_shared(count, router.top_k));
        prop_assume!(router.selects == Selects::Heads);
        let inputs = Inputs::<f32>::new(shape, seed);
        on_each_device!(device => is_the_same(
            &route(device, &inputs, set),
            &route(device, &inputs, first_shared(count, router.top_k)),
        ));
    }
}
