//! Groups of tensors that train at their own rates, or are frozen, on every layout of ranks.

use moh_model::layout::Segment;
use moh_model::tensors::TensorGroup;

use super::*;
use crate::GroupFactors;

/// Gradients of every size are clipped by the same factor, 1.
const UNCLIPPED: f64 = 1e30;

/// Returns the bits of a rank's own tensors, weights and moments, by group.
fn bits(rank: &mut Rank, group: TensorGroup) -> Vec<u32> {
    rank.stepper.wait_for_weights(&mut rank.model).unwrap();
    let mut bits = Vec::new();
    let of_group = |segment: &Segment| TensorGroup::of(&segment.name) == group;
    for (flat, segment) in rank.model.layout().segments().filter(|(_, it)| of_group(it)) {
        let range = segment.range.clone();
        let weights = rank.model.weights().read_range(&Cpu, flat, range.clone()).unwrap();
        bits.extend(weights.iter().map(|value| value.to_bits()));
        let moments = &rank.optimizer.first_moment;
        let local = moh_model::parameters::overlap(&range, &moments.local_range(flat));
        if !local.is_empty() {
            let moments = moments.read_range(&Cpu, flat, local).unwrap();
            bits.extend(moments.iter().map(|value| value.to_bits()));
        }
    }
    bits
}

/// Returns a rank after a step at `rate`, with this factor for attention; and its gradient norm.
fn trained(world: &World, ranks: Ranks, attention: f64, rate: f64) -> (Rank, f64) {
    let mut rank = Rank::new(world, ElementType::F32, ranks);
    rank.stepper.config.optimizer.clip_norm = UNCLIPPED;
    let groups = GroupFactors { attention, ..GroupFactors::default() };
    rank.stepper.config.optimizer.groups = groups;
    rank.stepper.gradients.freeze(rank.model.layout(), |segment| groups.freezes(segment));
    let update = Update { number: 1, learning_rate: rate, limits: Limits::FINITE };
    let result = rank.take(read_tokens, 0, update);
    (rank, result.grad_norm)
}

#[test]
fn groups_have_rates_of_their_own_and_frozen_ones_stay() {
    let (attention, rest) = (TensorGroup::Attention, TensorGroup::Rest);
    for (data, tensor, pipeline) in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)] {
        let ranks = Ranks { data, tensor, pipeline, tied: true, reduce: ElementType::F32 };
        ranks.run(|world| {
            let before = bits(&mut Rank::new(world, ElementType::F32, ranks), attention);
            let (mut whole, norm) = trained(world, ranks, 1.0, 1e-2);
            let (mut slow, _) = trained(world, ranks, 1.0, 5e-3);
            let (mut half, of_all) = trained(world, ranks, 0.5, 1e-2);
            let (mut frozen, of_rest) = trained(world, ranks, 0.0, 1e-2);
            assert!(bits(&mut half, attention) == bits(&mut slow, attention), "{ranks:?}");
            assert!(bits(&mut half, rest) == bits(&mut whole, rest), "{ranks:?}");
            assert!(bits(&mut whole, attention) != before, "{ranks:?}");
            assert!(bits(&mut frozen, attention) == before, "{ranks:?}");
            assert!(bits(&mut frozen, rest) == bits(&mut whole, rest), "{ranks:?}");
            assert_eq!(norm, of_all);
            assert!(of_rest < norm, "{of_rest} of {norm}: frozen gradients count");
        });
    }
}

#[test]
fn the_norm_of_gradients_is_that_of_the_groups_that_train() {
    let ranks = Ranks { data: 1, tensor: 1, pipeline: 1, tied: false, reduce: ElementType::F32 };
    ranks.run(|world| {
        let (rank, found) = trained(world, ranks, 0.0, 1e-2);
        let norms = rank.stepper.gradient_norms(&rank.model).unwrap();
        let trains = norms.iter().filter(|it| TensorGroup::of(&it.name) != TensorGroup::Attention);
        let expected = trains.map(|it| it.norm.powi(2)).sum::<f64>().sqrt();
        assert!((found / expected - 1.0).abs() < 1e-12, "{found}, not {expected}");
    });
}

/// The elements of frozen gradients are as they were allocated.
#[test]
fn frozen_matrices_have_no_products_in_the_backward_pass() {
    let ranks = Ranks { data: 1, tensor: 1, pipeline: 1, tied: true, reduce: ElementType::F32 };
    ranks.run(|world| {
        for (factor, expected) in [(0.0, true), (0.5, false)] {
            let (rank, _) = trained(world, ranks, factor, 1e-2);
            let gradients = &rank.stepper.gradients;
            for (flat, segment) in rank.model.layout().segments() {
                let values = gradients.read(&Cpu, flat, segment).unwrap();
                let is_attention = TensorGroup::of(&segment.name) == TensorGroup::Attention;
                let is_zero = values.iter().all(|&value| value == 0.0);
                assert_eq!(is_zero, is_attention && expected, "{}", segment.name);
            }
        }
    });
}
