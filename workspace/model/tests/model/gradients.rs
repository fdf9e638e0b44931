//! Flat buffers of weights and gradients. Weights are loaded from a source to the device. A step starts with the
//! gradients of the step before, which count as zeros if they are marked as stale.

use half::bf16;
use moh_kernels::{Cpu, Element, ElementType};
use moh_model::layout::{ModelLayout, Segment};
use moh_model::parameters::FlatBuffers;
use moh_model::{Activations, Error, Model, ModelConfig, PassShape, Recompute, StepSums};
use moh_testkit::models::{MOH, RECOMPUTE, SCALE, SHAPE, config, model, upload};

/// Returns the gradients of two micro-batches, from `before` in every element. They are added to `before`, or overwrite
/// stale values.
fn of_two_passes<T: Element, G: Element>(
    tied: bool,
    recompute: Recompute,
    before: f32,
    stale: bool,
) -> Vec<f32> {
    let mut model = model(Cpu, T::ELEMENT, config(16, tied, Some(MOH)));
    let shape = PassShape { length: 20, recompute, document_mask: false, ..SHAPE };
    let mut activations = Activations::new(&model, shape).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    let mut gradients = FlatBuffers::zeros(&Cpu, G::ELEMENT, model.layout()).unwrap();
    let fill = |_: &_, values: &mut [f32]| -> Result<(), Error> {
        values.fill(before);
        Ok(())
    };
    gradients.fill(&Cpu, model.layout(), fill).unwrap();
    if stale {
        gradients.mark_stale();
    }
    for number in 0..2 {
        upload(&Cpu, &mut activations, number);
        model.forward_backward(&mut activations, &mut gradients, SCALE, &mut sums).unwrap();
    }
    let segments = model.layout().segments();
    segments.flat_map(|(flat, segment)| gradients.read(&Cpu, flat, segment).unwrap()).collect()
}

#[test]
fn stale_gradients_are_zeros_to_the_bit() {
    fn check<T: Element, G: Element>() {
        for tied in [false, true] {
            for recompute in RECOMPUTE {
                let expected = of_two_passes::<T, G>(tied, recompute, 0.0, false);
                let found = of_two_passes::<T, G>(tied, recompute, f32::NAN, true);
                // 0 and -0 are equal, also for the update.
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

const UPLOAD: usize = 1 << 20;

#[test]
fn a_tensor_of_several_uploads_is_loaded_in_order() {
    let embedding = UPLOAD / 48 + 5;
    let config =
        ModelConfig { vocab_size: embedding, num_hidden_layers: 0, ..config(6, true, None) };
    let value = |at: usize| (at % 1009) as f32;
    let source = |_: &Segment, values: &mut [f32]| {
        values.iter_mut().enumerate().for_each(|(at, place)| *place = value(at));
        Ok::<_, Error>(())
    };
    let model =
        Model::<Cpu>::new(Cpu::open().unwrap(), ElementType::F32, config, 64, source).unwrap();
    let segment = &model.layout().flats[ModelLayout::EMBEDDING].segments[0];
    let loaded = model.weights().read(model.backend(), ModelLayout::EMBEDDING, segment).unwrap();
    assert!(loaded.len() > UPLOAD && !loaded.len().is_multiple_of(UPLOAD));
    assert!(loaded.iter().enumerate().all(|(at, &found)| found == value(at)));
}
