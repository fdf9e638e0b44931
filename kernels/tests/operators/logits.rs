//! Routers by logits against their reference: selection, gates, weights, balance loss, and the
//! gradients of the logits, checked by autograd and by central differences.

use crate::reference::operators;
use crate::reference::{
    Another, F32_TOLERANCE, Random, assert_close, cases, columns, download, flat, gradient,
    selection_and_gates, tensor, tolerance, upload, var, wide,
};
use crate::tensor_parallel::{local_columns, on_ranks};
use candle_core::{Device, Tensor};
use moh_kernels::ranks::{AllReduce, Heads};
use moh_kernels::router::logits::{
    HeadWeights, LogitRouter, Logits, LogitsBackward, LogitsForward,
};
use moh_kernels::router::{RouterGradient, RouterRanks, Routing, RoutingShape, SharedHeads};
use moh_kernels::{Backend, Cpu, Element, Result};
use proptest::prelude::*;

/// Weight of the balance loss in the total, exact in f32.
const BALANCE: f32 = 0.5;

/// A micro-batch of a layer. All of its heads are local, or only the heads of one rank.
#[derive(Clone, Copy)]
struct Case<'a, T> {
    heads: Heads,
    router: LogitRouter,
    tokens: usize,
    logits: &'a [T],
    delta: Option<&'a [f32]>,
}

/// The results of a device on one micro-batch.
#[derive(PartialEq)]
struct Found<T> {
    mask: Vec<u8>,
    gates: Vec<f32>,
    weights: Vec<f32>,
    balance_loss: f64,
    d_logits: Vec<T>,
}

const WEIGHTS: [HeadWeights; 3] = [HeadWeights::One, HeadWeights::OneStage, HeadWeights::TwoStage];

fn router(shared: &[usize], top_k: usize, weights: HeadWeights) -> LogitRouter {
    LogitRouter { shared: SharedHeads::from_heads(shared.iter().copied()).unwrap(), top_k, weights }
}

fn routing<B: Backend, T>(device: &B, case: &Case<'_, T>) -> Routing<B> {
    // The shape has room for one token more than the case.
    let shape = case.router.routing_shape(case.tokens + 1, case.heads).unwrap();
    Routing::new(device, shape).unwrap()
}

fn forward<B: Backend, T: Element>(
    device: &B,
    case: &Case<'_, T>,
    routing: &mut Routing<B>,
    all_reduce: Option<AllReduce<'_, B>>,
) -> Result<()> {
    let logits = upload(device, case.logits);
    let (router, logits, tokens) = (case.router, B::whole::<T>(&logits), case.tokens);
    device.logits_forward(LogitsForward { router, logits, tokens, routing, all_reduce })
}

fn route<B: Backend, T: Element>(
    device: &B,
    case: &Case<'_, T>,
    all_reduce: Option<AllReduce<'_, B>>,
) -> Found<T> {
    let mut routing = routing(device, case);
    forward(device, case, &mut routing, all_reduce).unwrap();
    let local = case.tokens * case.heads.local();
    let mut weights = vec![9f32; if routing.is_weighted() { local } else { 0 }];
    if let Some(found) = routing.selection().weights {
        device.download(found, &mut weights).unwrap();
    }
    let delta = case.delta.map(|delta| upload(device, delta));
    let mut d_logits = upload(device, &vec![T::from_f32(7.0); case.logits.len()]);
    let exchanged = if case.router.weighs() {
        case.heads.count
    } else {
        case.heads.count - case.router.shared.leading()
    };
    let mut table = upload(device, &vec![7f64; case.tokens * exchanged]);
    let gradient = RouterGradient {
        routing: &routing,
        delta: delta.as_ref().map(|delta| B::whole(delta)),
        balance_weight: BALANCE,
        ranks: all_reduce
            .map(|all_reduce| RouterRanks { table: B::whole_mut(&mut table), all_reduce }),
    };
    let (router, tokens, d) = (case.router, 0..case.tokens, B::whole_mut::<T>(&mut d_logits));
    device.logits_backward(LogitsBackward { router, tokens, d_logits: d, gradient }).unwrap();
    let (mask, gates) = selection_and_gates(device, &routing);
    let mut loss = upload(device, &[1.0f64]);
    device.balance_loss(&routing, 2.0, B::whole_mut(&mut loss)).unwrap();
    Found {
        mask,
        gates,
        weights,
        balance_loss: (download::<B, f64>(device, &loss)[0] - 1.0) / 2.0,
        d_logits: download::<B, T>(device, &d_logits),
    }
}

/// Returns the results of the reference: selection, gates and weights of each head, the balance loss, and the
/// total loss.
fn reference(
    logits: &Tensor,
    router: LogitRouter,
    heads: usize,
    mask: &Tensor,
    delta: &Tensor,
) -> [Tensor; 4] {
    let gates = operators::logit_gates(logits, router, heads).unwrap();
    let weights = match router.weighs() {
        true => operators::logit_weights(logits, router, mask).unwrap(),
        false => operators::straight_through(mask, &gates).unwrap(),
    };
    let balance_loss = operators::balance_loss(mask, &gates).unwrap();
    let total = (&weights * delta).unwrap().sum_all().unwrap();
    let total = (total + (&balance_loss * f64::from(BALANCE)).unwrap()).unwrap();
    [gates, weights, balance_loss, total]
}

fn agrees<B: Backend, T: Element>(
    device: &B,
    [tokens, heads]: [usize; 2],
    router: LogitRouter,
    seed: u64,
) {
    let (mut random, width) = (Random(seed), router.logits(heads));
    let logits: Vec<T> = random.elements(tokens * width);
    let delta: Vec<f32> = random.elements(tokens * heads);
    let heads_of = Heads::all(heads);
    let given = Some(&delta[..]);
    let case = Case { heads: heads_of, router, tokens, logits: &logits, delta: given };
    let found = route(device, &case, None);
    let logits = var(&logits, (tokens, width));
    let mask = operators::logit_selection(&logits, router, heads).unwrap();
    let delta = tensor(&delta, (tokens, heads));
    let [gates, weights, balance_loss, total] = reference(&logits, router, heads, &mask, &delta);
    let expected = gradient(&total.backward().unwrap(), &logits);

    let with_column = |table| columns(&flat(table), heads, router.shared.leading()..heads);
    let marks = found.mask.iter().map(|&mark| f64::from(mark));
    assert!(marks.eq(with_column(&mask)), "another selection");
    assert_close("gates", &found.gates, &with_column(&gates), F32_TOLERANCE);
    if router.weighs() {
        assert_close("weights", &found.weights, &flat(&weights), F32_TOLERANCE);
    }
    let error = found.balance_loss - balance_loss.to_scalar::<f64>().unwrap();
    assert!(error.abs() < F32_TOLERANCE, "the balance loss is off by {error:e}");
    assert_close("d_logits", &found.d_logits, &expected, tolerance::<T>());
}

/// Sets of shared heads and numbers of selected heads, for twelve heads.
const SETS: [(&[usize], usize); 6] = [
    (&[0, 1, 2, 3], 5),
    (&[], 3),
    (&[0, 5, 11], 9),
    (&[4], 1),
    (&[1, 2, 3], 8),
    (&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1),
];

#[test]
fn selection_gates_weights_and_gradients_agree() {
    for (set, top_k) in SETS {
        for weights in WEIGHTS {
            let router = router(set, top_k, weights);
            for seed in [1, 2] {
                on_each_device!(device, T => agrees::<_, T>(device, [150, 12], router, seed));
            }
        }
    }
    // More heads than a warp has threads, and shared heads in every word of the set.
    for weights in WEIGHTS {
        let far = router(&[0, 1, 33, 64, 65, 66, 129, 130, 193, 194, 257], 40, weights);
        on_each_device!(device => agrees::<_, f32>(device, [9, 300], far, 5));
    }
}

#[test]
fn gradients_agree_with_central_differences() {
    const NUDGE: f64 = 1e-5;
    let (tokens, heads) = (3, 6);
    for (set, weights) in [
        (&[0, 3][..], HeadWeights::TwoStage),
        (&[0, 3], HeadWeights::OneStage),
        (&[0, 3], HeadWeights::One),
        (&[], HeadWeights::TwoStage),
        (&[2], HeadWeights::TwoStage),
    ] {
        let router = router(set, 2, weights);
        let (mut random, width) = (Random(8), router.logits(heads));
        let logits: Vec<f32> = random.elements(tokens * width);
        let delta: Vec<f32> = random.elements(tokens * heads);
        // The gradient treats the selection, computed before the nudge, as a constant. The value
        // of a straight-through weight does not change, so its gradient is the gradient of the gates.
        let first = tensor(&logits, (tokens, width));
        let mask = operators::logit_selection(&first, router, heads).unwrap();
        let delta_of = tensor(&delta, (tokens, heads));
        let loss = |at: usize, by: f64| {
            let mut logits = wide(&logits);
            logits[at] += by;
            let logits = Tensor::from_vec(logits, (tokens, width), &Device::Cpu).unwrap();
            let [gates, _, balance, total] = reference(&logits, router, heads, &mask, &delta_of);
            let number = |tensor: Tensor| tensor.to_scalar::<f64>().unwrap();
            if router.weighs() {
                return number(total);
            }
            let through = ((gates * &mask).unwrap() * &delta_of).unwrap().sum_all().unwrap();
            number(through) + f64::from(BALANCE) * number(balance)
        };
        let slope = |at| (loss(at, NUDGE) - loss(at, -NUDGE)) / (2.0 * NUDGE);
        let expected: Vec<f64> = (0..logits.len()).map(slope).collect();
        let (given, heads) = (Some(&delta[..]), Heads::all(heads));
        let case = Case { heads, router, tokens, logits: &logits, delta: given };
        on_each_device!(device => {
            let found = route(device, &case, None).d_logits;
            assert_close("differences", &found, &expected, F32_TOLERANCE);
        });
    }
}

/// With equal logits every active head has weight 1, and ties select the lower heads.
#[test]
fn equal_logits_give_weights_of_one_to_the_lower_heads() {
    for (set, expected) in [
        (&[0, 1][..], [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
        (&[2, 6], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]),
        (&[], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
    ] {
        let router = router(set, 3, HeadWeights::TwoStage);
        let logits = vec![0f32; 5 * router.logits(8)];
        let case = Case { heads: Heads::all(8), router, tokens: 5, logits: &logits, delta: None };
        on_each_device!(device => {
            let found = route(device, &case, None);
            assert_eq!(found.weights, expected.repeat(5));
        });
    }
}

#[test]
fn gradients_of_some_tokens_are_rows_of_all() {
    let (router, tokens, heads) = (router(&[0, 3], 2, HeadWeights::TwoStage), 70, Heads::all(6));
    let width = router.logits(heads.count);
    let logits: Vec<f32> = Random(3).elements(tokens * width);
    let delta: Vec<f32> = Random(4).elements(tokens * heads.count);
    let case = Case { heads, router, tokens, logits: &logits, delta: Some(&delta) };
    on_each_device!(device => check(device, &case, width));

    fn check<B: Backend>(device: &B, case: &Case<'_, f32>, width: usize) {
        let all = route(device, case, None).d_logits;
        let mut routed = routing(device, case);
        forward(device, case, &mut routed, None).unwrap();
        let delta = upload(device, case.delta.unwrap());
        let mut some = upload(device, &vec![7f32; 13 * width]);
        let (routing, delta, ranks) = (&routed, Some(B::whole(&delta)), None);
        let gradient = RouterGradient { routing, delta, balance_weight: BALANCE, ranks };
        let (router, tokens, d_logits) = (case.router, 40..53, B::whole_mut(&mut some));
        let args = LogitsBackward { router, tokens, d_logits, gradient };
        device.logits_backward::<f32>(args).unwrap();
        assert!(download::<B, f32>(device, &some) == all[40 * width..53 * width]);
    }
}

fn ranks_agree<B: Backend + Another, T: Element>(
    device: &B,
    all: Heads,
    router: LogitRouter,
    seed: u64,
) {
    const TOKENS: usize = 37;
    let mut random = Random(seed);
    let (width, ranks) = (router.logits(all.count), all.ranks);
    let logits: Vec<T> = random.elements(TOKENS * width);
    let delta: Vec<f32> = random.elements(TOKENS * all.count);
    let heads = Heads { rank: 0, ranks: 1, ..all };
    let case = Case { heads, router, tokens: TOKENS, logits: &logits, delta: Some(&delta) };
    let whole = route(device, &case, None);
    let local = |rank| Heads { rank, ..all };
    let of_rank = |table: &[f32], rank| -> Vec<f32> {
        table.chunks(all.count).flat_map(|row| local_columns(row, local(rank), 1)).collect()
    };
    let found = on_ranks(device, ranks, |device, rank, all_reduce| {
        // Each rank rounds its product for the heads of other ranks differently.
        let own = local_columns(&(0..all.count).collect::<Vec<_>>(), local(rank), 1);
        let logits = logits.iter().enumerate().map(|(at, &logit)| {
            let head = at % width;
            let exact = own.contains(&head) || (rank == 0 && head >= all.count);
            if exact { logit } else { T::from_f32(logit.to_f32() + 0.5) }
        });
        let logits: Vec<T> = logits.collect();
        let delta = of_rank(&delta, rank);
        let heads = local(rank);
        let case = Case { heads, router, tokens: TOKENS, logits: &logits, delta: Some(&delta) };
        route(device, &case, Some(all_reduce))
    });
    for (rank, found) in found.into_iter().enumerate() {
        let weights = of_rank(&whole.weights, rank);
        let same = |is: bool, what: &str| assert!(is, "rank {rank} of {ranks}: another {what}");
        same(found.mask == whole.mask, "selection");
        same(found.gates == whole.gates, "gate");
        same(found.weights == weights, "weight");
        same(found.balance_loss == whole.balance_loss, "balance loss");
        same(found.d_logits == whole.d_logits, "gradient");
    }
}

#[test]
fn ranks_select_the_same_heads_as_one_and_their_gradients_have_the_same_bits() {
    for (set, top_k) in SETS {
        for (weights, ranks) in [
            (HeadWeights::One, 2),
            (HeadWeights::OneStage, 2),
            (HeadWeights::TwoStage, 2),
            (HeadWeights::TwoStage, 4),
        ] {
            let (router, heads) = (router(set, top_k, weights), Heads { ranks, ..GROUPS });
            on_each_device!(device, T => ranks_agree::<_, T>(device, heads, router, 1));
        }
    }
}

/// Twelve heads in groups of three.
const GROUPS: Heads = Heads { count: 12, group_size: 3, rank: 0, ranks: 1 };

#[test]
fn routers_that_cannot_work_are_refused() {
    for (router, expected) in [
        (router(&[0, 12], 1, HeadWeights::One), "2 shared heads, up to head 12, of 12 heads"),
        (router(&[0], 12, HeadWeights::One), "top 12 of 11 routed heads"),
        (
            router(&[0], 0, HeadWeights::OneStage),
            "weights are those of selected heads: select at least one",
        ),
    ] {
        let message = router.routing_shape(1, GROUPS).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let routed = router(&[0, 1], 2, HeadWeights::One);
    let two_stage = LogitRouter { weights: HeadWeights::TwoStage, ..routed };
    let logits = [0f32; 14];
    let case = Case { heads: GROUPS, router: two_stage, tokens: 1, logits: &logits, delta: None };
    let shape = two_stage.routing_shape(1, GROUPS).unwrap();
    for (shape, expected) in [
        (RoutingShape { weighted: false, ..shape }, "the routing has no room for weights"),
        (
            RoutingShape { saved_per_token: 13, ..shape },
            "the routing saves 13 elements, expected 14",
        ),
    ] {
        let mut routing = Routing::new(&Cpu, shape).unwrap();
        let message = forward(&Cpu, &case, &mut routing, None).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let mut routing = Routing::new(&Cpu, shape).unwrap();
    forward(&Cpu, &case, &mut routing, None).unwrap();
    let backward = |router, tokens, d_logits: &mut [f32]| {
        let (routing, delta, ranks) = (&routing, None, None);
        let gradient = RouterGradient { routing, delta, balance_weight: 1.0, ranks };
        let args = LogitsBackward::<Cpu, f32> { router, tokens, d_logits, gradient };
        Cpu.logits_backward(args).unwrap_err().to_string()
    };
    let other = LogitRouter { shared: SharedHeads::first(3), ..two_stage };
    let message = backward(other, 0..1, &mut [0.0; 14]);
    assert!(message.contains("made with other shared heads"), "{message}");
    let message = backward(two_stage, 0..2, &mut [0.0; 28]);
    assert!(message.contains("tokens 0..2 of 1"), "{message}");
    let divided = Heads { ranks: 2, ..GROUPS };
    let mut routing = Routing::new(&Cpu, two_stage.routing_shape(1, divided).unwrap()).unwrap();
    let case = Case { heads: divided, ..case };
    let message = forward(&Cpu, &case, &mut routing, None).unwrap_err().to_string();
    assert!(message.contains("divided among 2 ranks"), "{message}");
}

/// Returns the heads in groups, a router of some of the heads, and ranks that divide the groups.
fn routers() -> impl Strategy<Value = (Heads, LogitRouter)> {
    let sizes = (1usize..4, 1usize..4, 1usize..6, prop::sample::select(&WEIGHTS));
    sizes.prop_flat_map(|(ranks, groups, group_size, weights)| {
        let count = ranks * groups * group_size;
        let marks = prop::collection::vec(any::<bool>(), count);
        (marks, any::<prop::sample::Index>()).prop_map(move |(mut marks, top_k)| {
            // At least one routed head; routers with weights select at least one.
            marks[count - 1] = false;
            let shared: Vec<usize> = (0..count).filter(|&head| marks[head]).collect();
            let routed = count - shared.len();
            let router = router(&shared, 1 + top_k.index(routed), weights);
            (Heads { count, group_size, rank: 0, ranks }, router)
        })
    })
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn any_router_agrees((heads, router) in routers(), tokens in 1usize..70, seed: u64) {
        on_each_device!(device => agrees::<_, f32>(device, [tokens, heads.count], router, seed));
    }

    #[test]
    fn any_division_routes_alike((heads, router) in routers(), seed: u64) {
        prop_assume!(heads.ranks > 1);
        on_each_device!(device => ranks_agree::<_, f32>(device, heads, router, seed));
    }

    #[test]
    fn weights_of_a_token_sum_to_its_active_heads((heads, router) in routers(), seed: u64) {
        let weights = HeadWeights::TwoStage;
        let router = LogitRouter { weights, ..router };
        let logits: Vec<f32> = Random(seed).elements(9 * router.logits(heads.count));
        let heads = Heads { ranks: 1, ..heads };
        let case = Case { heads, router, tokens: 9, logits: &logits, delta: None };
        on_each_device!(device => {
            let found = route(device, &case, None);
            for weights in found.weights.chunks(heads.count) {
                let positive = weights.iter().filter(|&&weight| weight > 0.0).count();
                prop_assert_eq!(positive, router.shared.len() + router.top_k);
                // Shared heads sum to S a and selected heads to k b, where a + b is 2.
                let sum: f64 = wide(weights).iter().sum();
                let (shared, top_k) = (router.shared.len() as f64, router.top_k as f64);
                let most = if shared == 0.0 { top_k } else { 2.0 * shared.max(top_k) };
                prop_assert!(sum <= most * 1.00001 && sum > 0.0);
            }
        });
    }
}
