//! Gradients that a step begins with: those of the step before, marked as stale, are as good as
//! zeros.

use half::bf16;
use moh_kernels::{Cpu, Element};
use moh_model::parameters::FlatBuffers;
use moh_model::{
    Activations, AuxiliaryLosses, Error, HeadCounts, LossConfig, MohConfig, PassShape, Recompute,
    RouterKind, SharedHeadSets, StepSums,
};
use moh_testkit::models::{VOCABULARY, config, model};

const MOH: MohConfig = MohConfig {
    router: RouterKind::QueryNorm,
    shared_heads: SharedHeadSets::First(HeadCounts::All(3)),
    routed_top_k: HeadCounts::All(2),
};

/// The gradients of two micro-batches, from `before` in every element: added to it or, where it is
/// stale, overwriting it.
fn of_two_passes<T: Element, G: Element>(
    tied: bool,
    recompute: Recompute,
    before: f32,
    stale: bool,
) -> Vec<f32> {
    let mut model = model::<Cpu, T>(Cpu, config(16, tied, Some(MOH)));
    let (batch, length) = (2, 20);
    let shape = PassShape { batch, length, recompute, training: true, document_mask: false };
    let mut activations = Activations::new(&model, shape).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    let mut gradients = FlatBuffers::<Cpu, G>::zeros(&Cpu, model.layout()).unwrap();
    let fill = |_: &_, values: &mut [f32]| -> Result<(), Error> {
        values.fill(before);
        Ok(())
    };
    gradients.fill(&Cpu, model.layout(), fill).unwrap();
    if stale {
        gradients.mark_stale();
    }
    let scale = LossConfig {
        cross_entropy: 1.0 / 80.0,
        auxiliary: AuxiliaryLosses::all(0.1),
        straight_through: true,
    };
    for pass in 0..2 {
        let ids: Vec<u32> = (0..40).map(|i| (i * 37 + pass) % VOCABULARY).collect();
        let targets: Vec<u32> = ids.iter().map(|id| (id * 7 + 3) % VOCABULARY).collect();
        activations.upload(&Cpu, &ids, &targets, &[]).unwrap();
        model.forward_backward(&mut activations, &mut gradients, scale, &mut sums).unwrap();
    }
    let segments = model.layout().segments();
    segments.flat_map(|(flat, segment)| gradients.read(&Cpu, flat, segment).unwrap()).collect()
}

#[test]
fn stale_gradients_are_zeros_to_the_bit() {
    fn check<T: Element, G: Element>() {
        for tied in [false, true] {
            for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
                let expected = of_two_passes::<T, G>(tied, recompute, 0.0, false);
                let found = of_two_passes::<T, G>(tied, recompute, f32::NAN, true);
                // 0 and -0 are equal, as they are to the update.
                assert!(found == expected, "tied: {tied}, {recompute:?}");
                let added = of_two_passes::<T, G>(tied, recompute, 1.0, false);
                assert!(added != expected, "gradients that are not stale are added to");
            }
        }
    }
    check::<f32, f32>();
    check::<bf16, f32>();
    check::<bf16, bf16>();
}
