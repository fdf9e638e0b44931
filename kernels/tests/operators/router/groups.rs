//! The router that selects whole key/value groups.

use super::{
    Inputs, Prepared, agrees, agrees_with_differences, apart_is_together, is_refused, route,
    routing,
};
use crate::reference::{all_heads, cases, first_shared, shared};
use half::bf16;
use moh_kernels::router::query_norm::{QueryNormRouter, Selects};
use moh_kernels::{Backend, Cpu, Heads, QkvShape};
use proptest::prelude::*;

/// Returns the router that selects whole groups, with these groups shared.
fn whole_groups(
    shape: &QkvShape,
    shared_groups: impl IntoIterator<Item = usize>,
    selected_groups: usize,
) -> QueryNormRouter {
    let size = shape.heads / shape.kv_heads;
    let heads = shared_groups.into_iter().flat_map(|group| group * size..(group + 1) * size);
    let router = shared(heads.collect::<Vec<_>>(), selected_groups * size);
    QueryNormRouter { selects: Selects::Groups, ..router }
}

/// Compares in one pass and in two passes, in both types.
fn agree<B: Backend>(device: &B, shape: QkvShape, router: QueryNormRouter) {
    for seed in [1, 2] {
        agrees::<_, f32>(device, shape, router, seed);
        agrees::<_, bf16>(device, shape, router, seed);
    }
    apart_is_together::<_, f32>(device, shape, router, 3);
    apart_is_together::<_, bf16>(device, shape, router, 3);
}

#[test]
fn whole_groups_agree_over_more_than_one_task() {
    let shape = QkvShape { batch: 2, length: 75, heads: 12, kv_heads: 4, head_dim: 16 };
    for (groups, top_k) in [(&[0][..], 2), (&[], 1), (&[2], 1), (&[0, 3], 0), (&[0, 1, 2], 1)] {
        let router = whole_groups(&shape, groups.iter().copied(), top_k);
        on_each_device!(device => agree(device, shape, router));
    }
    let many = QkvShape { batch: 3, length: 5, heads: 80, kv_heads: 40, head_dim: 8 };
    on_each_device!(device => agree(device, many, whole_groups(&many, [0, 1, 7, 39], 20)));
    let alone = QkvShape { batch: 1, length: 7, heads: 5, kv_heads: 5, head_dim: 6 };
    on_each_device!(device => agree(device, alone, whole_groups(&alone, [1], 2)));
}

#[test]
fn gradients_agree_with_central_differences() {
    let shape = QkvShape { batch: 1, length: 3, heads: 6, kv_heads: 3, head_dim: 4 };
    agrees_with_differences(shape, whole_groups(&shape, [1], 1));
}

/// Equal queries select the lower groups, with uniform gates. Groups are scored without a deviation, so their gates
/// have a gradient.
#[test]
fn equal_queries_select_the_lower_groups() {
    let shape = QkvShape { batch: 1, length: 5, heads: 12, kv_heads: 4, head_dim: 8 };
    let mut inputs = Inputs::<f32>::unrotated(shape, 7);
    inputs.qkv.fill(0.5);
    let router = whole_groups(&shape, [], 1);
    let lowest = [[1u8; 3], [0; 3], [0; 3], [0; 3]].concat();
    on_each_device!(device => {
        let found = route(device, &inputs, router);
        for (mask, gates) in found.mask.chunks(12).zip(found.gates.chunks(12)) {
            assert_eq!(mask, lowest);
            assert!(gates.iter().all(|gate| (gate - 1.0 / 12.0).abs() < 1e-7));
        }
        assert!(found.d_qkv != inputs.d_qkv);
    });
}

/// A token's only routed group is always selected if k covers it, with equal gates.
#[test]
fn one_routed_group_is_selected_by_every_token() {
    let shape = QkvShape { batch: 1, length: 4, heads: 6, kv_heads: 3, head_dim: 4 };
    let inputs = Inputs::<f32>::new(shape, 5);
    for top_k in [0, 1] {
        let router = whole_groups(&shape, [0, 1], top_k);
        on_each_device!(device => {
            let found = route(device, &inputs, router);
            assert_eq!(found.mask, [top_k as u8; 8]);
            assert_eq!(found.gates, [0.5; 8]);
        });
    }
}

#[test]
fn groups_that_cannot_be_routed_are_refused() {
    let shape = QkvShape { batch: 1, length: 1, heads: 6, kv_heads: 3, head_dim: 2 };
    let groups = |router| QueryNormRouter { selects: Selects::Groups, ..router };
    for (router, expected) in [
        (groups(first_shared(1, 2)), "the shared heads are no groups of 2"),
        (groups(shared([0, 2], 2)), "the shared heads are no groups of 2"),
        (groups(first_shared(2, 1)), "top 1 is no multiple of the 2 heads of a group"),
        (groups(first_shared(2, 6)), "top 6 of 4 routed heads"),
    ] {
        is_refused(shape, router, expected);
    }
}

#[test]
fn a_routing_of_other_groups_or_shared_heads_is_refused() {
    let shape = QkvShape { batch: 1, length: 1, heads: 6, kv_heads: 3, head_dim: 2 };
    let router = whole_groups(&shape, [0], 1);
    let inputs = Inputs::<f32>::new(shape, 1);
    let mut prepared = Prepared::new(&Cpu, &inputs, router);
    let of_pairs = Heads { group_size: 1, ..all_heads(&shape) };
    let rooms = router.routing_shape(1, of_pairs).unwrap();
    let mut other = moh_kernels::router::Routing::new(&Cpu, rooms).unwrap();
    let message = prepared.route(false, &mut other).unwrap_err().to_string();
    assert!(message.contains("made for groups of 1 heads, not 2"), "{message}");
    let mut routed = routing(&Cpu, &shape, router);
    prepared.route(false, &mut routed).unwrap();
    let mut changed = Prepared::new(&Cpu, &inputs, whole_groups(&shape, [1], 1));
    let message = changed.backward(false, &routed).unwrap_err().to_string();
    assert!(message.contains("made with other shared heads"), "{message}");
}

/// Returns random shapes with a router of whole groups.
pub(super) fn group_routers() -> impl Strategy<Value = (QkvShape, QueryNormRouter)> {
    let sizes = (1usize..3, 1usize..40, 1usize..=4, 1usize..=5, 1usize..=32);
    (sizes, any::<[u8; 5]>()).prop_map(|((batch, length, kv_heads, size, half), choice)| {
        let heads = kv_heads * size;
        let shape = QkvShape { batch, length, heads, kv_heads, head_dim: 2 * half };
        let groups: Vec<usize> = (0..kv_heads).filter(|&group| choice[group] % 3 == 0).collect();
        let routed = kv_heads - groups.len();
        let top_k = usize::from(choice[4]) % (routed + 1);
        (shape, whole_groups(&shape, groups, top_k))
    })
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn every_token_selects_whole_groups(
        (shape, router) in group_routers(),
        seed: u64,
    ) {
        prop_assume!(router.shared.len() < shape.heads);
        let inputs = Inputs::<bf16>::new(shape, seed);
        let (size, leading) = (shape.heads / shape.kv_heads, router.shared.leading());
        let columns = shape.heads - leading;
        on_each_device!(device => {
            let found = route(device, &inputs, router);
            for mask in found.mask.chunks(columns) {
                let is_active = |head: &usize| *head < leading || mask[head - leading] == 1;
                let of_group = |group| (group * size..(group + 1) * size).filter(is_active).count();
                let counts: Vec<usize> = (0..shape.kv_heads).map(of_group).collect();
                let active = router.shared.len() + router.top_k;
                prop_assert_eq!(counts.iter().sum::<usize>(), active);
                prop_assert!(counts.iter().all(|&count| count == 0 || count == size));
            }
        });
    }
}
