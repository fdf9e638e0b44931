//! A Mixture-of-Head model against section 2 of docs/design.md in f64, with gradients by candle's autograd: losses,
//! selections, gates' gradients and all other gradients. Layers have the same heads or different heads.

use moh_kernels::{Cpu, ElementType};
use moh_model::{
    Architecture, HeadCounts, Model, ModelConfig, MohConfig, PassShape, Recompute, RouterKind,
    SharedHeadSets,
};
use moh_testkit::models::{MOH, RECOMPUTE, SHAPE, config, model, moh, pass};
use moh_testkit::reference::{Reference, micro_batch};

fn is_the_reference(moh: MohConfig) {
    let config = ModelConfig { num_hidden_layers: 4, ..config(10, false, Some(moh)) };
    let (ids, targets) = micro_batch();
    for architecture in Architecture::ALL {
        let mut model =
            model(Cpu, ElementType::F32, ModelConfig { architecture, ..config.clone() });
        let reference = Reference::of(&model);
        let expected = reference.forward(&ids, &targets, 2).unwrap();
        for recompute in RECOMPUTE {
            let shape = PassShape { recompute, document_mask: false, ..SHAPE };
            let (activations, gradients, sums) = pass(&mut model, shape);
            if recompute != Recompute::Block {
                assert_eq!(model.routed_mask(&activations).unwrap(), expected.masks);
            }
            reference.check(&model, &gradients, sums, &expected);
        }
    }
}

#[test]
fn passes_are_those_of_the_formulas() {
    is_the_reference(MOH);
    // Dense; few shared heads; all routed heads are selected; no routed head is selected.
    is_the_reference(moh(RouterKind::QueryNorm, &[8, 1, 2, 5], &[0, 4, 6, 0]));
}

#[test]
fn shared_heads_are_any_set() {
    let sets = [vec![7, 2, 5], vec![1], vec![], (1..6).collect()];
    let shared_heads = SharedHeadSets::from_ids(&sets).unwrap();
    let routed_top_k = HeadCounts::Each(vec![2, 4, 3, 1]);
    let moh = MohConfig { router: RouterKind::QueryNorm, shared_heads, routed_top_k };
    is_the_reference(moh);
}

/// Routers of whole groups and of only shared heads; the model has 8 heads in groups of 4.
#[test]
fn other_routers_are_those_of_the_formulas() {
    let sets =
        |sets: [&[usize]; 4]| SharedHeadSets::from_ids(&sets.map(<[usize]>::to_vec)).unwrap();
    let all: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7];
    for (router, shared_heads, top_k) in [
        (RouterKind::Group, sets([&all[..4], &all[4..], &[], &[]]), [4, 0, 4, 8]),
        (RouterKind::Static, sets([&[0, 1], &[7, 2, 5], &[6], &[0, 1, 2, 3, 4, 5, 6]]), [0; 4]),
    ] {
        let moh = MohConfig { router, shared_heads, routed_top_k: HeadCounts::from_iter(top_k) };
        is_the_reference(moh);
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
        is_the_reference(moh);
    }
}

/// The heads of a router with matrices may change. A model that lacks the matrices, or has others, is refused.
#[test]
fn another_attention_has_the_matrices_of_the_model() {
    let moh = |router, shared| moh(router, &[shared], &[2]);
    let mut two_stage =
        model(Cpu, ElementType::F32, config(10, false, Some(moh(RouterKind::TwoStage, 3))));
    two_stage.set_moh(Some(moh(RouterKind::TwoStage, 5))).unwrap();
    let mut dense = model(Cpu, ElementType::F32, config(10, false, None));
    let missing = "the model was created without model.layers.0.self_attn.router.weight, which its router needs";
    let [unused, stages] = ["", ".stages"].map(|part| {
        format!("model.layers.0.self_attn.router{part}.weight is in the model, and not used")
    });
    for (model, to, expected) in [
        (&mut dense, RouterKind::Linear, missing),
        (&mut two_stage, RouterKind::QueryNorm, &unused),
    ] {
        let message = model.set_moh(Some(moh(to, 3))).unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    }
    let message = two_stage.set_moh(Some(moh(RouterKind::OneStage, 3))).unwrap_err().to_string();
    assert!(message.starts_with(&stages), "{message}");
    assert!(two_stage.set_moh(None).is_err());
    assert_eq!(two_stage.config().moh, Some(moh(RouterKind::TwoStage, 5)));
    // The tensors that a model lacks are named layer by layer.
    let added = |model: &Model<Cpu>, to| model.config().added_tensors(Some(&to)).unwrap();
    let names = added(&dense, moh(RouterKind::TwoStage, 3));
    assert_eq!(names.len(), 2 * dense.config().num_hidden_layers);
    assert_eq!(names[1], "model.layers.0.self_attn.router.stages.weight");
    assert!(added(&two_stage, moh(RouterKind::TwoStage, 3)).is_empty());
    let of_one = moh_testkit::models::moh(RouterKind::Linear, &[8, 3], &[0, 2]);
    assert_eq!(added(&dense, of_one), ["model.layers.1.self_attn.router.weight"]);
}
