//! The routers by norms of queries against their reference, in one pass with RoPE and in separate passes:
//! selection, gates, balance loss, and the gradient that they add to the queries, checked by autograd
//! and by central differences.

mod groups;
mod shared_sets;

use crate::reference::operators::{self, Packed};
use crate::reference::{
    F32_TOLERANCE, Random, all_heads, assert_close, assert_sums_close, cases, columns, download,
    first_shared, flat, gradient, no_rotation, rms, rope_tables, routers_of_sets,
    selection_and_gates, table, tensor, tolerance, upload, var, wide,
};
use candle_core::Tensor;
use half::bf16;
use moh_kernels::rope::{QkvShape, RopeArgs};
use moh_kernels::router::query_norm::{
    QueryNormBackward, QueryNormForward, QueryNormRouter, Selects,
};
use moh_kernels::router::{RouterGradient, Routing};
use moh_kernels::{Backend, Cpu, Element, Memory, Result};
use proptest::prelude::*;

/// Weight of the balance loss in the total, exact in f32.
const BALANCE: f32 = 0.5;

struct Routed<T> {
    mask: Vec<u8>,
    gates: Vec<f32>,
    rotated: Vec<T>,
    balance_loss: f64,
    d_qkv: Vec<T>,
}

#[derive(Clone)]
struct Inputs<T> {
    shape: QkvShape,
    qkv: Vec<T>,
    d_qkv: Vec<T>,
    delta: Option<Vec<f32>>,
    balance: f32,
    tables: (Vec<f32>, Vec<f32>),
}

impl<T: Element> Inputs<T> {
    fn new(shape: QkvShape, seed: u64) -> Self {
        let mut random = Random(seed);
        Inputs {
            shape,
            qkv: random.elements(shape.tokens() * shape.row()),
            d_qkv: random.elements(shape.tokens() * shape.row()),
            delta: Some(random.elements(shape.tokens() * shape.heads)),
            balance: BALANCE,
            tables: rope_tables(shape.length, shape.head_dim),
        }
    }

    /// Creates inputs with the identity rotation.
    fn unrotated(shape: QkvShape, seed: u64) -> Self {
        let tables = no_rotation(shape.length, shape.head_dim);
        Inputs { tables, ..Self::new(shape, seed) }
    }
}

struct Prepared<'a, B: Backend, T: Element> {
    device: &'a B,
    inputs: &'a Inputs<T>,
    router: QueryNormRouter,
    angles: [B::Buffer<f32>; 2],
    qkv: B::Buffer<T>,
    d_qkv: B::Buffer<T>,
    delta: Option<B::Buffer<f32>>,
}

impl<'a, B: Backend, T: Element> Prepared<'a, B, T> {
    fn new(device: &'a B, inputs: &'a Inputs<T>, router: QueryNormRouter) -> Self {
        Prepared {
            device,
            inputs,
            router,
            angles: [upload(device, &inputs.tables.0), upload(device, &inputs.tables.1)],
            qkv: upload(device, &inputs.qkv),
            d_qkv: upload(device, &inputs.d_qkv),
            delta: inputs.delta.as_ref().map(|delta| upload(device, delta)),
        }
    }

    /// Routes and, with a table, rotates in one pass.
    fn route(&mut self, rotates: bool, routing: &mut Routing<B>) -> Result<()> {
        let &mut Prepared { device, inputs: Inputs { shape, .. }, router, .. } = self;
        let ([cos, sin], qkv) = (&self.angles, B::whole_mut(&mut self.qkv));
        let (rope, all_reduce) = (rotates.then(|| table(cos, sin)), None);
        let args = QueryNormForward { router, shape, qkv, rope, routing, all_reduce };
        device.query_norm_forward::<T>(args)
    }

    fn rotate(&mut self) {
        let Prepared { device, inputs, angles: [cos, sin], qkv, .. } = self;
        let (table, qkv) = (table(cos, sin), B::whole_mut(qkv));
        device.rope_forward::<T>(RopeArgs { shape: &inputs.shape, table, qkv }).unwrap();
    }

    /// Computes the gradients of [`Prepared::route`].
    fn backward(&mut self, rotates: bool, routing: &Routing<B>) -> Result<()> {
        let &mut Prepared { device, inputs: Inputs { shape, balance, .. }, router, .. } = self;
        let ([cos, sin], d_qkv) = (&self.angles, B::whole_mut(&mut self.d_qkv));
        let (qkv, rope) = (B::whole(&self.qkv), rotates.then(|| table(cos, sin)));
        let delta = self.delta.as_ref().map(|delta| B::whole(delta));
        let gradient = RouterGradient { routing, delta, balance_weight: *balance, ranks: None };
        let args = QueryNormBackward { router, shape, qkv, d_qkv, rope, gradient };
        device.query_norm_backward::<T>(args)
    }

    /// Computes the gradients of [`Prepared::rotate`].
    fn rotate_back(&mut self) {
        let Prepared { device, inputs, angles: [cos, sin], d_qkv, .. } = self;
        let (table, qkv) = (table(cos, sin), B::whole_mut(d_qkv));
        device.rope_backward::<T>(RopeArgs { shape: &inputs.shape, table, qkv }).unwrap();
    }

    fn results(&self, routing: &Routing<B>) -> Routed<T> {
        let device = self.device;
        let (mask, gates) = selection_and_gates(device, routing);
        let mut loss = upload(device, &[1.0f64]);
        device.balance_loss(routing, 2.0, B::whole_mut(&mut loss)).unwrap();
        Routed {
            mask,
            gates,
            rotated: download::<B, T>(device, &self.qkv),
            balance_loss: (download::<B, f64>(device, &loss)[0] - 1.0) / 2.0,
            d_qkv: download::<B, T>(device, &self.d_qkv),
        }
    }
}

/// Returns a routing with room for one token more than the shape has.
fn routing<M: Memory>(memory: &M, shape: &QkvShape, router: QueryNormRouter) -> Routing<M> {
    let (tokens, heads) = (shape.tokens() + 1, all_heads(shape));
    Routing::new(memory, router.routing_shape(tokens, heads).unwrap()).unwrap()
}

fn route<B: Backend, T: Element>(
    device: &B,
    inputs: &Inputs<T>,
    router: QueryNormRouter,
) -> Routed<T> {
    route_with(device, inputs, router, &mut routing(device, &inputs.shape, router))
}

fn route_with<B: Backend, T: Element>(
    device: &B,
    inputs: &Inputs<T>,
    router: QueryNormRouter,
    routing: &mut Routing<B>,
) -> Routed<T> {
    let mut prepared = Prepared::new(device, inputs, router);
    prepared.route(true, routing).unwrap();
    prepared.backward(true, routing).unwrap();
    prepared.results(routing)
}

fn agrees<B: Backend, T: Element>(device: &B, shape: QkvShape, router: QueryNormRouter, seed: u64) {
    let mut inputs = Inputs::<T>::new(shape, seed);
    // The router's gradient alone, or added to an incoming gradient.
    if seed.is_multiple_of(2) {
        inputs.d_qkv.fill(T::zeroed());
    }
    let actual = route(device, &inputs, router);
    let Inputs { qkv, d_qkv, delta, tables, .. } = &inputs;
    let delta = delta.as_ref().unwrap();

    let packed = Packed::new(&shape);
    let (QueryNormRouter { shared, top_k, .. }, group) = (router, shape.heads / shape.kv_heads);
    let qkv = var(qkv, packed.dims());
    let rotated = packed.rotate(&qkv, &packed.table(&tables.0, &tables.1, 0)).unwrap();
    let queries = packed.queries(&qkv).unwrap();
    let mask = operators::selection(&queries, router, group).unwrap();
    let gates = operators::gates(&queries, router, group).unwrap();
    let balance_loss = operators::balance_loss(&mask, &gates).unwrap();
    let arriving = (rotated * tensor(d_qkv, packed.dims())).unwrap().sum_all().unwrap();
    let gradient_through = |gates| {
        let weights = operators::straight_through(&mask, gates).unwrap();
        let attended = (weights * tensor(delta, mask.dims())).unwrap().sum_all().unwrap();
        let balance_loss = operators::balance_loss(&mask, gates).unwrap();
        let balanced = (balance_loss * f64::from(BALANCE)).unwrap();
        let total = ((attended + &arriving).unwrap() + balanced).unwrap();
        gradient(&total.backward().unwrap(), &qkv)
    };
    let expected = gradient_through(&gates);
    let constants = operators::gates_over_constants(&queries, router, group).unwrap();
    let terms = gradient_through(&constants);

    let with_column = |table| columns(&flat(table), shape.heads, shared.leading()..shape.heads);
    let expected_mask = with_column(&mask);
    assert!(actual.mask.iter().map(|&mark| f64::from(mark)).eq(expected_mask), "another selection");
    assert_close("gates", &actual.gates, &with_column(&gates), F32_TOLERANCE);
    let error = actual.balance_loss / balance_loss.to_scalar::<f64>().unwrap() - 1.0;
    assert!(top_k == 0 || error.abs() < F32_TOLERANCE, "the balance loss is off by {error:e}");
    assert_sums_close("d_qkv", &actual.d_qkv, &expected, rms(&terms), tolerance::<T>());
}

#[test]
fn selection_gates_losses_and_gradients_agree_over_more_than_one_task() {
    let shape = QkvShape { batch: 2, length: 75, heads: 12, kv_heads: 4, head_dim: 16 };
    for (shared_heads, top_k) in [(4, 5), (0, 3), (2, 10), (4, 0), (10, 1)] {
        let router = first_shared(shared_heads, top_k);
        for seed in [1, 2] {
            on_each_device!(device, T => agrees::<_, T>(device, shape, router, seed));
        }
    }
}

/// More routed heads than a warp has threads, heads of several parts per thread, and sequences and
/// micro-batches with an odd number of tokens.
#[test]
fn many_heads_and_wide_heads_agree() {
    let many = QkvShape { batch: 3, length: 5, heads: 80, kv_heads: 8, head_dim: 16 };
    let wide = QkvShape { batch: 5, length: 1, heads: 6, kv_heads: 2, head_dim: 128 };
    let shapes = [(many, 5, 30), (many, 0, 33), (many, 48, 32), (wide, 2, 2)];
    let others = [48, 528].map(|head_dim| (QkvShape { head_dim, ..wide }, 1, 3));
    for (shape, shared_heads, top_k) in shapes.into_iter().chain(others) {
        let router = first_shared(shared_heads, top_k);
        for seed in [1, 2] {
            on_each_device!(device, T => agrees::<_, T>(device, shape, router, seed));
        }
        on_each_device!(device, T => apart_is_together::<_, T>(device, shape, router, 3));
    }
}

#[test]
fn equal_norms_of_many_heads_select_the_lower_ones() {
    let shape = QkvShape { batch: 1, length: 5, heads: 80, kv_heads: 8, head_dim: 16 };
    for (shared_heads, top_k) in [(3, 40), (40, 7), (48, 0)] {
        let router = first_shared(shared_heads, top_k);
        on_each_device!(device => equal_norms_pass_nothing(device, shape, router, 5));
    }
}

#[test]
fn backward_agrees_with_central_differences() {
    let shape = QkvShape { batch: 1, length: 3, heads: 5, kv_heads: 5, head_dim: 4 };
    agrees_with_differences(shape, first_shared(1, 2));
}

/// Compares the gradient of the queries with differences of the loss.
fn agrees_with_differences(shape: QkvShape, router: QueryNormRouter) {
    const NUDGE: f64 = 1e-5;
    /// The differences' own error: NUDGE^2 and rounding over NUDGE, about 1e-10, below f32's.
    const TOLERANCE: f64 = F32_TOLERANCE;
    let group = shape.heads / shape.kv_heads;
    let mut inputs = Inputs::<f32>::unrotated(shape, 8);
    inputs.d_qkv.fill(0.0);
    let (qkv, delta) = (&inputs.qkv, inputs.delta.as_ref().unwrap());

    // The gradient treats the selection, computed before the nudge, as a constant.
    let packed = Packed::new(&shape);
    let queries = packed.queries(&tensor(qkv, packed.dims())).unwrap();
    let mask = operators::selection(&queries, router, group).unwrap();
    let loss = |qkv: Vec<f64>| {
        let qkv = Tensor::from_vec(qkv, packed.dims(), &candle_core::Device::Cpu).unwrap();
        let gates = operators::gates(&packed.queries(&qkv).unwrap(), router, group).unwrap();
        let balance = operators::balance_loss(&mask, &gates).unwrap().to_scalar::<f64>().unwrap();
        let (gates, mask, delta) = (flat(&gates), flat(&mask), wide(delta));
        let weighed: f64 =
            gates.iter().zip(mask).zip(delta).map(|((gate, m), d)| gate * m * d).sum();
        weighed + f64::from(BALANCE) * balance
    };
    let nudged = |at: usize, by: f64| {
        let mut qkv = wide(qkv);
        qkv[at] += by;
        loss(qkv)
    };
    let expected: Vec<f64> =
        (0..qkv.len()).map(|at| (nudged(at, NUDGE) - nudged(at, -NUDGE)) / (2.0 * NUDGE)).collect();
    on_each_device!(device => {
        assert_close("differences", &route(device, &inputs, router).d_qkv, &expected, TOLERANCE)
    });
}

/// Checks that equal norms select the lower heads, and add no gradient.
fn equal_norms_pass_nothing<B: Backend>(
    device: &B,
    shape: QkvShape,
    router: QueryNormRouter,
    seed: u64,
) {
    let (mut inputs, mut random) = (Inputs::<f32>::unrotated(shape, seed), Random(seed));
    // All heads of a token have the same elements, in different orders.
    for row in inputs.qkv.chunks_exact_mut(shape.row()) {
        let first = row[..shape.head_dim].to_vec();
        for head in row[..shape.heads * shape.head_dim].chunks_exact_mut(shape.head_dim) {
            for (slot, from) in head.iter_mut().zip(random.permutation(shape.head_dim)) {
                *slot = first[from as usize];
            }
        }
    }
    let actual = route(device, &inputs, router);
    let columns = router.shared.leading()..shape.heads;
    let (shared, routed): (Vec<usize>, Vec<usize>) =
        columns.clone().partition(|&head| router.shared.contains(head));
    for token in 0..shape.tokens() {
        let at = |head: usize| token * columns.len() + head - columns.start;
        for &head in &shared {
            assert_eq!((actual.mask[at(head)], actual.gates[at(head)]), (1, 0.0));
        }
        for (rank, &head) in routed.iter().enumerate() {
            assert_eq!(actual.mask[at(head)], u8::from(rank < router.top_k));
            assert!((actual.gates[at(head)] - 1.0 / routed.len() as f32).abs() < 1e-7);
        }
    }
    assert!(actual.d_qkv == inputs.d_qkv, "a gradient of the router");
}

#[test]
fn a_query_of_norm_zero_gets_no_gradient_of_the_router() {
    let shape = QkvShape { batch: 1, length: 1, heads: 3, kv_heads: 1, head_dim: 2 };
    let router = first_shared(0, 2);
    let inputs = Inputs {
        qkv: vec![0f32, 0.0, 1.0, 0.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0],
        d_qkv: vec![0.0; 10],
        delta: Some(vec![1.0, 2.0, 3.0]),
        balance: 0.0,
        ..Inputs::unrotated(shape, 1)
    };
    let routed = route(&Cpu, &inputs, router);
    assert_eq!(routed.mask, [0, 1, 1]);
    assert_eq!(routed.d_qkv[..2], [0.0; 2]);
    assert!(routed.d_qkv.iter().all(|x| x.is_finite()) && routed.d_qkv[2] != 0.0);
}

/// Checks that a router that does not fit the heads of a layer is rejected, with a routing that has room for any
/// router.
fn is_refused(shape: QkvShape, router: QueryNormRouter, expected: &str) {
    let message = router.routing_shape(1, all_heads(&shape)).unwrap_err().to_string();
    assert!(message.contains(expected), "{message}");
    let inputs = Inputs::<f32>::new(shape, 1);
    on_each_device!(device => {
        let mut room = routing(device, &shape, first_shared(0, 1));
        let mut prepared = Prepared::new(device, &inputs, router);
        for rotates in [false, true] {
            let message = prepared.route(rotates, &mut room).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    });
}

#[test]
fn all_heads_shared_is_dense() {
    let shape = QkvShape { batch: 1, length: 2, heads: 2, kv_heads: 1, head_dim: 2 };
    let inputs = Inputs::<f32>::unrotated(shape, 1);
    on_each_device!(device => {
        let routed = route(device, &inputs, first_shared(2, 0));
        assert_eq!((routed.balance_loss, &routed.d_qkv), (0.0, &inputs.d_qkv));
        assert!(routed.mask.is_empty() && routed.gates.is_empty());
    });
}

/// Compares separate passes of the router and of RoPE over the queries with one combined pass.
fn apart_is_together<B: Backend, T: Element>(
    device: &B,
    shape: QkvShape,
    router: QueryNormRouter,
    seed: u64,
) {
    let inputs = Inputs::<T>::new(shape, seed);
    let together = route(device, &inputs, router);

    let mut routing = routing(device, &shape, router);
    let [mut prepared, mut unrotated] = [(); 2].map(|()| Prepared::new(device, &inputs, router));
    prepared.route(false, &mut routing).unwrap();
    prepared.rotate();
    prepared.backward(false, &routing).unwrap();
    prepared.rotate_back();
    let apart = prepared.results(&routing);
    assert_eq!(apart.mask, together.mask);
    assert!(same_bits(&apart.gates, &together.gates), "other gates");
    assert!(same_bits(&apart.rotated, &together.rotated), "other queries and keys");
    assert_eq!(apart.balance_loss, together.balance_loss);
    if device.name() == Cpu.name() {
        assert!(same_bits(&apart.d_qkv, &together.d_qkv), "another gradient");
    }
    // A GPU rounds once in one pass, and twice in two passes. Both results may be off.
    let both = 2.0 * tolerance::<T>();
    assert_close("d_qkv", &apart.d_qkv, &wide(&together.d_qkv), both);

    // The router's gradient of queries before RoPE is the same.
    unrotated.rotate_back();
    unrotated.backward(false, &routing).unwrap();
    let before = download::<B, T>(device, &unrotated.d_qkv);
    assert_close("d_qkv before RoPE", &before, &wide(&together.d_qkv), both);
}

fn same_bits<T: Element>(a: &[T], b: &[T]) -> bool {
    bytemuck::cast_slice::<T, u8>(a) == bytemuck::cast_slice::<T, u8>(b)
}

/// Returns random shapes of at least two heads, each with a router of the first heads, of any set of heads, or of
/// groups.
fn routers() -> impl Strategy<Value = (QkvShape, QueryNormRouter)> {
    let heads = (1usize..=3, 1usize..=6).prop_filter("two heads to route", |(g, n)| g * n > 1);
    let sets = (1usize..3, 1usize..70, heads, 1usize..=128).prop_flat_map(
        |(batch, length, (kv_heads, group), half)| {
            let heads = kv_heads * group;
            let shape = QkvShape { batch, length, heads, kv_heads, head_dim: 2 * half };
            (Just(shape), routers_of_sets(heads))
        },
    );
    prop_oneof![2 => sets, 1 => groups::group_routers()]
}

proptest! {
    #![proptest_config(cases(144))]

    #[test]
    fn any_router_agrees((shape, router) in routers(), seed: u64) {
        prop_assume!(router.shared.len() < shape.heads);
        on_each_device!(device => agrees::<_, f32>(device, shape, router, seed));
    }

    #[test]
    fn a_router_apart_from_rope_is_both_in_one_pass((shape, router) in routers(), seed: u64) {
        on_each_device!(device, T => apart_is_together::<_, T>(device, shape, router, seed));
    }
}

proptest! {
    #![proptest_config(cases(96))]

    #[test]
    fn gates_sum_to_one_and_every_token_selects_k_heads(
        (shape, router) in routers(),
        seed: u64,
    ) {
        let (delta, balance) = (None, 0.0);
        let inputs = Inputs { delta, balance, ..Inputs::<bf16>::unrotated(shape, seed) };
        let routed = shape.heads - router.shared.len();
        prop_assume!(routed > 0);
        on_each_device!(device => {
            let actual = route(device, &inputs, router);
            let (mask, gates) = shared_sets::of_routed(&actual, &router, shape.heads);
            for (gates, mask) in gates.chunks(routed).zip(mask.chunks(routed)) {
                let sum: f64 = wide(gates).iter().sum();
                prop_assert!((sum - 1.0).abs() < 1e-6, "gates sum to {sum}");
                prop_assert_eq!(mask.iter().map(|&m| usize::from(m)).sum::<usize>(), router.top_k);
            }
            // Without delta and balance weight no gradient is added.
            prop_assert!(actual.d_qkv == inputs.d_qkv);
        });
    }

    #[test]
    fn equal_norms_select_the_lower_heads_and_pass_no_gradient(
        (shape, router) in routers(),
        seed: u64,
    ) {
        prop_assume!(router.selects == Selects::Heads);
        on_each_device!(device => equal_norms_pass_nothing(device, shape, router, seed));
    }
}
