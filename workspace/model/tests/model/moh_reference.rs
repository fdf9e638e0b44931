//! A Mixture-of-Head model against section 2 of docs/design.md in f64, whose gradients candle's
//! autograd takes: losses, selections, gates' gradients and all others, with the same heads in
//! every layer and with other ones.

use moh_kernels::Cpu;
use moh_model::parameters::FlatBuffers;
use moh_model::{
    Activations, Architecture, HeadCounts, Model, ModelConfig, MohConfig, PassShape, Recompute,
    RouterKind, SharedHeadSets, StepSums,
};
use moh_testkit::models::{SCALE, SHAPE, config, model, upload};
use moh_testkit::reference::{Reference, configured, micro_batch};

fn is_the_reference(architecture: Architecture, moh: MohConfig, recompute: Recompute) {
    let config = config(10, false, Some(moh));
    let config = ModelConfig { architecture, num_hidden_layers: 4, ..config };
    let mut model = model::<Cpu, f32>(Cpu, config.clone());
    let shape = PassShape { recompute, document_mask: false, ..SHAPE };
    let mut activations = Activations::new(&model, shape).unwrap();
    upload(&Cpu, &mut activations, 0);
    let mut gradients = FlatBuffers::<Cpu, f32>::zeros(&Cpu, model.layout()).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    model.forward_backward(&mut activations, &mut gradients, SCALE, &mut sums).unwrap();

    let reference = Reference::of(&model, configured);
    let (ids, targets) = micro_batch();
    let expected = reference.forward(&ids, &targets, 2).unwrap();
    if recompute != Recompute::Block {
        assert_eq!(model.routed_mask(&activations).unwrap(), expected.masks);
    }
    reference.check(&model, &gradients, sums.take(&Cpu).unwrap(), &expected);
}

#[test]
fn passes_are_those_of_the_formulas() {
    let counts = |counts: [usize; 4]| HeadCounts::from_iter(counts);
    for (shared, top_k) in [
        ([3; 4], [2; 4]),
        // Dense, few shared heads, most of them routed and chosen, routed heads of which none is
        // chosen.
        ([8, 1, 2, 5], [0, 4, 6, 0]),
    ] {
        let router = RouterKind::QueryNorm;
        let (shared_heads, routed_top_k) = (counts(shared).into(), counts(top_k));
        let moh = MohConfig { router, shared_heads, routed_top_k };
        for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
            for architecture in Architecture::ALL {
                is_the_reference(architecture, moh.clone(), recompute);
            }
        }
    }
}

#[test]
fn shared_heads_are_any_set() {
    let sets = [vec![7, 2, 5], vec![1], vec![], (1..6).collect()];
    let shared_heads = SharedHeadSets::from_ids(&sets).unwrap();
    let routed_top_k = HeadCounts::Each(vec![2, 4, 3, 1]);
    let moh = MohConfig { router: RouterKind::QueryNorm, shared_heads, routed_top_k };
    for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
        for architecture in Architecture::ALL {
            is_the_reference(architecture, moh.clone(), recompute);
        }
    }
}

/// Routers of whole groups, of heads within groups and of shared heads alone; the model has 8 heads in
/// groups of 4.
#[test]
fn other_routers_are_those_of_the_formulas() {
    let sets =
        |sets: [&[usize]; 4]| SharedHeadSets::from_ids(&sets.map(<[usize]>::to_vec)).unwrap();
    let all: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7];
    for (router, shared_heads, top_k) in [
        (RouterKind::Group, sets([&all[..4], &all[4..], &[], &[]]), [4, 0, 4, 8]),
        (RouterKind::WithinGroup, sets([&[], &[0, 6], all, &[1, 2, 4, 7]]), [4, 4, 0, 2]),
        (RouterKind::Static, sets([&[0, 1], &[7, 2, 5], &[6], &[0, 1, 2, 3, 4, 5, 6]]), [0; 4]),
    ] {
        let moh = MohConfig { router, shared_heads, routed_top_k: HeadCounts::from_iter(top_k) };
        for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
            for architecture in Architecture::ALL {
                is_the_reference(architecture, moh.clone(), recompute);
            }
        }
    }
}

/// Routers with matrices, which read the block's input.
#[test]
fn learned_routers_are_those_of_the_formulas() {
    let sets = [vec![7, 2, 5], vec![1, 0], vec![3], (0..8).collect()];
    let shared_heads = SharedHeadSets::from_ids(&sets).unwrap();
    for router in [RouterKind::Linear, RouterKind::OneStage, RouterKind::TwoStage] {
        let routed_top_k = HeadCounts::Each(vec![2, 4, 7, 0]);
        let moh = MohConfig { router, shared_heads: shared_heads.clone(), routed_top_k };
        for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
            for architecture in Architecture::ALL {
                is_the_reference(architecture, moh.clone(), recompute);
            }
        }
    }
}

/// The heads of a router with matrices may change. A model that lacks the matrices, or has others, is refused.
#[test]
fn another_attention_has_the_matrices_of_the_model() {
    let moh = |router, shared: usize| MohConfig {
        router,
        shared_heads: shared.into(),
        routed_top_k: 2.into(),
    };
    let mut two_stage =
        model::<Cpu, f32>(Cpu, config(10, false, Some(moh(RouterKind::TwoStage, 3))));
    two_stage.set_moh(Some(moh(RouterKind::TwoStage, 5))).unwrap();
    let mut dense = model::<Cpu, f32>(Cpu, config(10, false, None));
    for (model, to, expected) in [
        (
            &mut dense,
            Some(moh(RouterKind::Linear, 3)),
            "the model was created without model.layers.0.self_attn.router.weight, which its router needs",
        ),
        (
            &mut two_stage,
            Some(moh(RouterKind::QueryNorm, 3)),
            "model.layers.0.self_attn.router.weight is in the model, and not used",
        ),
    ] {
        let message = model.set_moh(to).unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    }
    let message = two_stage.set_moh(Some(moh(RouterKind::OneStage, 3))).unwrap_err().to_string();
    let expected = "model.layers.0.self_attn.router.stages.weight is in the model, and not used";
    assert!(message.starts_with(expected), "{message}");
    assert!(two_stage.set_moh(None).is_err());
    assert_eq!(two_stage.config().moh, Some(moh(RouterKind::TwoStage, 5)));
    // What a model lacks is named layer by layer.
    let added = |model: &Model<Cpu, f32>, to| model.config().added_tensors(Some(&to)).unwrap();
    let names = added(&dense, moh(RouterKind::TwoStage, 3));
    assert_eq!(names.len(), 2 * dense.config().num_hidden_layers);
    assert_eq!(names[1], "model.layers.0.self_attn.router.stages.weight");
    assert!(added(&two_stage, moh(RouterKind::TwoStage, 3)).is_empty());
    let of_one = MohConfig {
        shared_heads: HeadCounts::Each(vec![8, 3]).into(),
        ..moh(RouterKind::Linear, 3)
    };
    let of_one = MohConfig { routed_top_k: HeadCounts::Each(vec![0, 2]), ..of_one };
    assert_eq!(added(&dense, of_one), ["model.layers.1.self_attn.router.weight"]);
}
