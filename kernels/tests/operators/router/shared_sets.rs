//! The query-norm router with shared heads that are any set: against the reference, and against a
//! model whose heads are in another order, with the set first.

use super::{
    BALANCE, Case, Prepared, Routed, agrees, apart_is_together, equal_norms_pass_nothing, route,
    route_with, routing, same_bits,
};
use crate::reference::{
    F32_TOLERANCE, Random, assert_close, cases, first_shared, no_rotation, rope_tables,
    routers_of_sets, selection_and_gates, shared, tolerance, upload, wide,
};
use half::bf16;
use moh_kernels::ranks::Heads;
use moh_kernels::rope::QkvShape;
use moh_kernels::router::query_norm::QueryNormRouter;
use moh_kernels::router::{Routers, Routing, RoutingShape, SharedHeads};
use moh_kernels::{Backend, Cpu, Element, Memory};
use proptest::prelude::*;

/// Random inputs of a micro-batch.
pub(super) struct Inputs<T> {
    shape: QkvShape,
    pub qkv: Vec<T>,
    pub d_qkv: Vec<T>,
    delta: Vec<f32>,
    pub tables: (Vec<f32>, Vec<f32>),
}

impl<T: Element> Inputs<T> {
    pub fn new(shape: QkvShape, seed: u64) -> Self {
        let mut random = Random(seed);
        Inputs {
            shape,
            qkv: random.elements(shape.tokens() * shape.row()),
            d_qkv: random.elements(shape.tokens() * shape.row()),
            delta: random.elements(shape.tokens() * shape.heads),
            tables: rope_tables(shape.length, shape.head_dim),
        }
    }

    pub fn case(&self, router: QueryNormRouter) -> Case<'_, T> {
        let Inputs { shape, qkv, d_qkv, delta, tables } = self;
        let (shape, delta) = (*shape, Some(&delta[..]));
        Case { shape, router, qkv, d_qkv, delta, balance: BALANCE, tables }
    }

    /// The same with query head `order[i]` at place i.
    fn in_order(&self, order: &[usize]) -> Self {
        Inputs {
            shape: self.shape,
            qkv: in_order(&self.shape, &self.qkv, order),
            d_qkv: in_order(&self.shape, &self.d_qkv, order),
            delta: columns_in_order(&self.delta, self.shape.heads, order),
            tables: self.tables.clone(),
        }
    }
}

/// Rows of queries, keys and values with query head `order[i]` at place i.
fn in_order<T: Copy>(shape: &QkvShape, rows: &[T], order: &[usize]) -> Vec<T> {
    let of_row = |row: &[T]| {
        let queries = order.iter().map(|head| &row[head * shape.head_dim..][..shape.head_dim]);
        [queries.collect::<Vec<_>>().concat(), row[shape.heads * shape.head_dim..].to_vec()]
    };
    rows.chunks_exact(shape.row()).flat_map(of_row).flatten().collect()
}

/// The columns `order` of a table.
fn columns_in_order<S: Copy>(table: &[S], row: usize, order: &[usize]) -> Vec<S> {
    table.chunks_exact(row).flat_map(|row| order.iter().map(|&column| row[column])).collect()
}

/// The part of the tables that is of routed heads, in their order; asserts what is in the columns of
/// shared heads.
fn of_routed<T>(found: &Routed<T>, router: &QueryNormRouter, heads: usize) -> (Vec<u8>, Vec<f32>) {
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

/// A model with the shared heads moved to the front routes alike: the same heads, gates and
/// gradients, to the bit on a CPU, which sums in the order of the routed heads.
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
    let found = route(device, &inputs.case(router));
    let moved = inputs.in_order(&order);
    let expected = route(device, &moved.case(first));

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

/// Results with a router, to the bit.
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
            on_each_device!(device => agrees::<_, f32>(device, shape, router, seed));
            on_each_device!(device => agrees::<_, bf16>(device, shape, router, seed));
        }
        on_each_device!(device => order_is_irrelevant::<_, f32>(device, shape, router, 3));
        on_each_device!(device => order_is_irrelevant::<_, bf16>(device, shape, router, 4));
    }
}

/// Shared heads in every word of the set, and columns after the last one.
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

/// A query that is not finite in a shared head changes nothing for the others.
#[test]
fn a_shared_head_is_not_measured() {
    let shape = QkvShape { batch: 1, length: 3, heads: 6, kv_heads: 2, head_dim: 4 };
    let router = shared([0, 3], 2);
    let mut inputs = Inputs::<f32>::new(shape, 6);
    let (pairs, start) = (shape.tokens() * shape.heads, 3 * shape.head_dim);
    on_each_device!(device => {
        let finite = route(device, &inputs.case(router));
        let mut infinite = Inputs { tables: no_rotation(3, 4), ..Inputs::<f32>::new(shape, 6) };
        inputs.tables = infinite.tables.clone();
        for row in infinite.qkv.chunks_exact_mut(shape.row()) {
            row[start..start + shape.head_dim].fill(f32::INFINITY);
        }
        for pair in (3..pairs).step_by(shape.heads) {
            infinite.delta[pair] = f32::NAN;
        }
        let found = route(device, &infinite.case(router));
        assert_eq!((found.mask, found.gates), (finite.mask, finite.gates));
        assert_eq!(found.balance_loss, finite.balance_loss);
        let expected = route(device, &inputs.case(router)).d_qkv;
        let rows = found.d_qkv.chunks_exact(shape.row()).zip(expected.chunks_exact(shape.row()));
        for (found, expected) in rows {
            assert_eq!(found[..start], expected[..start]);
            assert_eq!(found[start + shape.head_dim..], expected[start + shape.head_dim..]);
        }
    });
}

#[test]
fn sets_that_cannot_work_are_refused() {
    for (set, top_k, expected) in [
        (&[4][..], 0, "1 shared heads, up to head 4, of 4 heads"),
        (&[0, 1, 2, 3, 9], 0, "5 shared heads, up to head 9, of 4 heads"),
        (&[1, 2, 3], 0, "one routed head has no standard deviation"),
        (&[0, 2, 3], 1, "one routed head has no standard deviation"),
        (&[3], 4, "top 4 of 3 routed heads"),
        (&[1, 3], 3, "top 3 of 2 routed heads"),
    ] {
        let router = shared(set.iter().copied(), top_k);
        let message = router.routing_shape(1, Heads::all(4)).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        on_each_device!(device => refuses(device, router, expected));
    }

    /// With room for any router of four heads.
    fn refuses<B: Backend>(device: &B, router: QueryNormRouter, expected: &str) {
        let shape = QkvShape { batch: 1, length: 1, heads: 4, kv_heads: 1, head_dim: 2 };
        let inputs = Inputs::<f32>::new(shape, 1);
        let mut room = routing(device, &inputs.case(first_shared(0, 1)));
        let mut prepared = Prepared::new(device, inputs.case(router));
        for refused in [prepared.forward_alone(&mut room), prepared.forward(&mut room)] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let refused = room.begin(1, router.shared);
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

/// Without a router every token selects the shared heads alone, with gates of 0.
#[test]
fn every_token_is_routed_to_the_shared_heads() {
    let sets: [&[usize]; 4] = [&[0, 1, 4], &[], &[5], &[0, 1, 2, 3, 4, 5]];
    for (set, ranks) in sets.into_iter().flat_map(|set| [(set, 1), (set, 2)]) {
        let heads = Heads { count: 6, group_size: 3, rank: ranks - 1, ranks };
        let set = SharedHeads::from_heads(set.iter().copied()).unwrap();
        let columns = 6 - set.leading();
        let (tokens, saved_per_token, weighted, logits) = (9, 0, false, 0);
        let shape = RoutingShape { tokens, heads, columns, saved_per_token, weighted, logits };
        on_each_device!(device => {
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
            let expected = (leading..heads.local())
                .map(|local| u8::from(set.contains(heads.index(local))));
            assert_eq!(marks, expected.collect::<Vec<_>>().repeat(7));
            let mut loss = upload(device, &[0f64]);
            device.balance_loss(&routing, 1.0, whole_mut(device, &mut loss)).unwrap();
            assert_eq!(download(device, &loss), [0.0]);
            assert!(device.route_to_shared(10, set, &mut routing).is_err());
        });
    }

    fn download<B: Backend>(device: &B, buffer: &B::Buffer<f64>) -> Vec<f64> {
        crate::reference::download::<B, f64>(device, buffer)
    }

    fn whole_mut<'a, B: Backend>(
        _: &B,
        buffer: &'a mut B::Buffer<f64>,
    ) -> moh_kernels::ViewMut<'a, B, f64> {
        B::whole_mut(buffer)
    }
}

/// One routing for layers whose shared heads are different sets.
#[test]
fn a_routing_serves_layers_of_other_sets() {
    let shape = QkvShape { batch: 1, length: 9, heads: 6, kv_heads: 2, head_dim: 4 };
    let inputs = Inputs::<f32>::new(shape, 9);
    on_each_device!(device => {
        let mut room = routing(device, &inputs.case(shared([0, 3], 2)));
        for router in
            [shared([0, 3], 2), first_shared(3, 2), shared([0, 1, 4], 1), first_shared(6, 0)]
        {
            let case = inputs.case(router);
            is_the_same(&route_with(device, &case, &mut room), &route(device, &case));
        }
        let mut more = Prepared::new(device, inputs.case(shared([3], 2)));
        assert!(more.forward(&mut room).is_err());
    });
}

/// Random shapes of at least two heads, each with a router of a set.
fn routed_sets() -> impl Strategy<Value = (QkvShape, QueryNormRouter)> {
    let heads = (1usize..=3, 1usize..=6).prop_filter("two heads to route", |(g, n)| g * n > 1);
    (1usize..3, 1usize..70, heads, 1usize..=64).prop_flat_map(
        |(batch, length, (kv_heads, group), half)| {
            let heads = kv_heads * group;
            let shape = QkvShape { batch, length, heads, kv_heads, head_dim: 2 * half };
            (Just(shape), routers_of_sets(heads))
        },
    )
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn any_set_agrees((shape, router) in routed_sets(), seed: u64) {
        prop_assume!(router.shared.len() < shape.heads);
        on_each_device!(device => agrees::<_, f32>(device, shape, router, seed));
    }

    #[test]
    fn a_set_routes_like_the_first_heads_of_a_model_in_its_order(
        (shape, router) in routed_sets(),
        seed: u64,
    ) {
        on_each_device!(device => order_is_irrelevant::<_, f32>(device, shape, router, seed));
        on_each_device!(device => order_is_irrelevant::<_, bf16>(device, shape, router, seed));
    }

    #[test]
    fn the_first_heads_in_any_order_are_the_first_heads(
        (shape, router) in routed_sets(),
        seed: u64,
    ) {
        let count = router.shared.len();
        let order = Random(seed).permutation(count);
        let set = shared(order.into_iter().map(|head| head as usize), router.top_k);
        prop_assert_eq!(set, first_shared(count, router.top_k));
        let inputs = Inputs::<f32>::new(shape, seed);
        on_each_device!(device => is_the_same(
            &route(device, &inputs.case(set)),
            &route(device, &inputs.case(first_shared(count, router.top_k))),
        ));
    }

    #[test]
    fn every_token_selects_the_shared_heads_and_k_others(
        (shape, router) in routed_sets(),
        seed: u64,
    ) {
        let inputs = Inputs::<bf16>::new(shape, seed);
        let routed = shape.heads - router.shared.len();
        on_each_device!(device => {
            let found = route(device, &inputs.case(router));
            let (mask, gates) = of_routed(&found, &router, shape.heads);
            for (mask, gates) in mask.chunks(routed.max(1)).zip(gates.chunks(routed.max(1))) {
                prop_assert_eq!(mask.iter().map(|&m| usize::from(m)).sum::<usize>(), router.top_k);
                prop_assert!((wide(gates).iter().sum::<f64>() - 1.0).abs() < 1e-6);
            }
        });
    }

    #[test]
    fn the_router_of_a_set_apart_from_rope_is_both_in_one_pass(
        (shape, router) in routed_sets(),
        seed: u64,
    ) {
        on_each_device!(device => apart_is_together::<_, f32>(device, shape, router, seed));
        on_each_device!(device => apart_is_together::<_, bf16>(device, shape, router, seed));
    }

    #[test]
    fn equal_norms_select_the_lower_routed_heads((shape, router) in routed_sets(), seed: u64) {
        on_each_device!(device => equal_norms_pass_nothing(device, shape, router, seed));
    }
}
