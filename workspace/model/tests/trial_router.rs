//! A router that the library does not know trains through the public interface: heads chosen at
//! random, once and for all, each with a weight of its own.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use half::bf16;
use moh_kernels::adamw::AdamW;
use moh_kernels::ranks::Heads;
use moh_kernels::router::query_norm::{QueryNormBackward, QueryNormForward};
use moh_kernels::router::{RoutingShape, SharedHeads};
use moh_kernels::{Backend, Cpu, Element, Result};
use moh_model::parameters::FlatBuffers;
use moh_model::router::Router;
use moh_model::{Activations, Model, PassShape, Recompute, StepSums};
use support::{ADAMW, SCALE, SHAPE, config, model, update, upload};

/// Every token computes the shared heads and some of the others, by its place in the micro-batch,
/// with weights between 0.5 and 1.5.
struct Fixed {
    layer: usize,
    shared_heads: usize,
    percent_selected: usize,
}

impl Fixed {
    /// A number below 100 without a pattern that matters.
    fn draw(&self, token: usize, head: usize) -> usize {
        let mixed = (self.layer * 7919 + token * 104_729 + head + 1).wrapping_mul(2_654_435_761);
        (mixed >> 7) % 100
    }
}

impl<B: Backend, T: Element> Router<B, T> for Fixed {
    fn routing_shape(&self, tokens: usize, heads: Heads) -> Result<RoutingShape> {
        let columns = heads.count - self.shared_heads;
        Ok(RoutingShape { tokens, heads, columns, saved_per_token: 0, weighted: true })
    }

    fn forward(&self, backend: &B, args: QueryNormForward<'_, B, T>) -> Result<()> {
        let QueryNormForward { shape, routing, .. } = args;
        let (tokens, routed) = (shape.tokens(), shape.heads - self.shared_heads);
        routing.begin(tokens, SharedHeads::first(self.shared_heads))?;
        let pairs = |heads| (0..tokens).flat_map(move |t| (0..heads).map(move |head| (t, head)));
        let selected: Vec<u8> = pairs(routed)
            .map(|(token, head)| u8::from(self.draw(token, head) < self.percent_selected))
            .collect();
        let weights: Vec<f32> = pairs(shape.heads)
            .map(|(token, head)| 0.5 + self.draw(token, head + 17) as f32 / 100.0)
            .collect();
        backend.upload(&selected, routing.selected_mut())?;
        backend.upload(&weights, routing.weights_mut())?;
        backend.upload(&vec![1.0 / routed as f32; tokens * routed], routing.gates_mut())?;
        backend.complete_routing(routing)
    }

    /// What is fixed has no gradient.
    fn backward(&self, _: &B, _: QueryNormBackward<'_, B, T>) -> Result<()> {
        Ok(())
    }
}

/// A tiny model whose first layer computes all heads, the second one those of a trial router.
fn trial<B: Backend, T: Element>(backend: B, percent_selected: usize) -> Model<B, T> {
    let mut model = model::<B, T>(backend, config(16, true, None));
    let fixed = Fixed { layer: 1, shared_heads: 2, percent_selected };
    model.set_routers(vec![None, Some(Arc::new(fixed))]).unwrap();
    model
}

/// Losses of a few steps on one micro-batch.
fn train<B: Backend + Clone, T: Element>(backend: &B, recompute: Recompute) -> Vec<f64> {
    let mut model = trial::<B, T>(backend.clone(), 40);
    let mut activations = Activations::new(&model, PassShape { recompute, ..SHAPE }).unwrap();
    let zeros = || FlatBuffers::<B, f32>::zeros(backend, model.layout()).unwrap();
    let (mut gradients, mut moments) = (zeros(), [zeros(), zeros()]);
    let mut sums = StepSums::new(backend).unwrap();
    upload(backend, &mut activations, 0);
    let step = |step| {
        gradients.zero(backend).unwrap();
        sums.zero(backend).unwrap();
        model.forward_backward(&mut activations, &mut gradients, SCALE, &mut sums).unwrap();
        let constants = AdamW { step, learning_rate: 3e-3, ..ADAMW };
        update(&mut model, &constants, &gradients, &mut moments, &mut sums);
        sums.read(backend).unwrap().cross_entropy / 80.0
    };
    (1..=12).map(step).collect()
}

fn learns(losses: &[f64]) {
    assert!(losses[11] < 0.5 * losses[0], "{losses:?}");
}

#[test]
fn a_model_with_a_trial_router_learns() {
    let losses = train::<Cpu, f32>(&Cpu, Recompute::None);
    learns(&losses);
    for recompute in [Recompute::Cheap, Recompute::Block] {
        assert_eq!(train::<Cpu, f32>(&Cpu, recompute), losses, "{recompute:?}");
    }
    learns(&train::<Cpu, bf16>(&Cpu, Recompute::Cheap));
}

#[cfg(feature = "cuda-emulator")]
#[test]
fn a_model_with_a_trial_router_learns_alike_on_a_gpu() {
    let expected = train::<Cpu, f32>(&Cpu, Recompute::Cheap);
    let found = train::<_, f32>(&moh_kernels::Cuda::emulated(), Recompute::Cheap);
    for (a, b) in found.iter().zip(&expected) {
        assert!((a - b).abs() < 1e-3 * b, "{found:?}, expected {expected:?}");
    }
}

/// The loss of one micro-batch and all gradients.
fn pass(percent_selected: usize, nudge: Option<(&[f32], f32)>) -> (f64, Vec<f32>) {
    let mut model = trial::<Cpu, f32>(Cpu, percent_selected);
    if let Some((direction, size)) = nudge {
        let mut at = 0;
        for flat in 0..model.layout().flats.len() {
            for weight in model.weights_mut().flat_mut(flat) {
                *weight += size * direction[at];
                at += 1;
            }
        }
    }
    let mut activations =
        Activations::new(&model, PassShape { recompute: Recompute::Cheap, ..SHAPE }).unwrap();
    let mut gradients = FlatBuffers::<Cpu, f32>::zeros(&Cpu, model.layout()).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    upload(&Cpu, &mut activations, 0);
    model.forward_backward(&mut activations, &mut gradients, SCALE, &mut sums).unwrap();
    let flats = 0..model.layout().flats.len();
    let gradients = flats.flat_map(|flat| gradients.flat(flat).clone()).collect();
    (sums.read(&Cpu).unwrap().cross_entropy / 80.0, gradients)
}

#[test]
fn gradients_behind_a_trial_router_are_those_of_the_loss() {
    let (_, gradient) = pass(40, None);
    let square: f64 = gradient.iter().map(|&g| f64::from(g).powi(2)).sum();
    let size = (1e-3 / square.sqrt()) as f32;
    let [up, down] = [size, -size].map(|size| pass(40, Some((&gradient, size))).0);
    let slope = (up - down) / (2.0 * f64::from(size));
    // Central differences of an f32 loss: 1e-3 of the slope, and rounding.
    assert!((slope / square - 1.0).abs() < 1e-2, "{slope}, expected {square}");
}

#[test]
fn the_selection_reaches_attention() {
    let losses = [0, 40, 100].map(|percent| pass(percent, None).0);
    assert!(losses[0] != losses[1] && losses[1] != losses[2], "{losses:?}");
}

#[test]
fn a_router_for_each_layer_is_asked_for() {
    let mut model = model::<Cpu, f32>(Cpu, config(16, true, None));
    let refused = model.set_routers(vec![None]).unwrap_err().to_string();
    assert!(refused.contains("1 routers for 2 layers"), "{refused}");
}
