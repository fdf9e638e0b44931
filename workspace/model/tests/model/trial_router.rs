//! A router that the configuration does not have trains through the public interface, beside a dense layer and one
//! with the configuration's router: losses and gradients are those of an f64 model, on one rank and on several.

use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::softmax;
use half::bf16;
use moh_comm::World;
use moh_kernels::adamw::AdamW;
use moh_kernels::linear::{LinearBackwardInput, LinearForward};
use moh_kernels::router::logits::{HeadWeights, LogitRouter, LogitsBackward, LogitsForward};
use moh_kernels::router::{RouterGradient, RouterRanks, RoutingShape, SharedHeads};
use moh_kernels::{Accumulation, Backend, Cpu, Element, Heads};
use moh_model::parameters::OnBuffer;
use moh_model::router::{Router, RouterBackward, RouterForward, RouterParameter};
use moh_model::{
    Activations, Architecture, Error, FlatBuffers, Model, ModelConfig, ModelParallel, PassShape,
    PassSlot, Recompute, RouterKind, StepSums, Sums,
};
use moh_testkit::models::{ADAMW, RECOMPUTE, SCALE, SHAPE, fill, moh, update, upload};
use moh_testkit::reference::{Reference, Routed, RouterInput, configured, micro_batch, select};

/// Shared and selected heads of the layers with a trial router: few of eight, and most of them.
const TRIALS: [Option<[usize; 2]>; 4] = [None, Some([2, 3]), None, Some([5, 1])];

const WIDTH: usize = 48;
const HEADS: usize = 8;
const LOGITS: usize = HEADS + 2;

/// The logits of heads and stages by one matrix of the block's normed input.
struct TwoStage(LogitRouter);

fn trial(layer: usize) -> Option<TwoStage> {
    let [shared_heads, top_k] = TRIALS[layer]?;
    let (shared, weights) = (SharedHeads::first(shared_heads), HeadWeights::TwoStage);
    Some(TwoStage(LogitRouter { shared, top_k, weights }))
}

impl<B: Backend, T: Element> Router<B, T> for TwoStage {
    fn routing_shape(&self, tokens: usize, heads: Heads) -> moh_kernels::Result<RoutingShape> {
        self.0.routing_shape(tokens, heads)
    }

    fn shared_heads(&self) -> SharedHeads {
        self.0.shared
    }

    fn parameters(&self, hidden_size: usize) -> Vec<RouterParameter> {
        vec![RouterParameter { name: "router.weight".to_owned(), shape: [LOGITS, hidden_size] }]
    }

    fn forward(&self, backend: &B, args: RouterForward<'_, B, T>) -> moh_kernels::Result<()> {
        let RouterForward { shape, x, parameters, routing, all_reduce, .. } = args;
        let (tokens, x, weight) = (shape.tokens(), B::reborrow(x), B::reborrow(parameters.get(0)?));
        let mut logits = backend.allocate::<T>(tokens * LOGITS)?;
        let y = B::whole_mut(&mut logits);
        backend.linear_forward(LinearForward::new(WIDTH, x, weight, y))?;
        let (router, logits) = (self.0, B::whole(&logits));
        backend.logits_forward(LogitsForward { router, logits, tokens, routing, all_reduce })
    }

    fn backward(&self, backend: &B, args: RouterBackward<'_, B, T>) -> moh_kernels::Result<()> {
        let RouterBackward { tokens, x, parameters, gradient, mut d_x, d_parameters, .. } = args;
        let mut d_logits = backend.allocate::<T>(tokens.len() * LOGITS)?;
        let RouterGradient { routing, delta, balance_weight, mut ranks } = gradient;
        let ranks = ranks.as_mut().map(|RouterRanks { table, all_reduce }| RouterRanks {
            table: B::reborrow_mut(table),
            all_reduce: *all_reduce,
        });
        let delta = delta.map(|delta| B::reborrow(delta));
        let gradient = RouterGradient { routing, delta, balance_weight, ranks };
        let (router, written) = (self.0, B::whole_mut(&mut d_logits));
        backend.logits_backward(LogitsBackward { router, tokens, d_logits: written, gradient })?;
        d_parameters.add_linear(0, WIDTH, x, B::whole(&d_logits))?;
        backend.linear_backward_input(LinearBackwardInput {
            inputs: WIDTH,
            d_y: B::whole(&d_logits),
            weight: B::reborrow(parameters.get(0)?),
            d_x: B::reborrow_mut(&mut d_x),
            accumulation: Accumulation::Add,
        })
    }
}

/// Layers 0 and 1 would be dense, layers 2 and 3 have the query-norm router.
fn config(architecture: Architecture) -> ModelConfig {
    let moh = moh(RouterKind::QueryNorm, &[8, 8, 3, 3], &[0, 0, 2, 2]);
    let config = moh_testkit::models::config(10, false, Some(moh));
    ModelConfig { architecture, num_hidden_layers: 4, ..config }
}

fn model<B: Backend, T: Element>(
    backend: B,
    architecture: Architecture,
    parallel: ModelParallel,
) -> Model<B, T> {
    let router = |layer| Some(Arc::new(trial(layer)?) as Arc<dyn Router<B, T>>);
    let routers = (0..4).map(router).collect();
    let config = config(architecture);
    Model::with_routers::<Error>(backend, config, 64, parallel, routers, fill).unwrap()
}

fn whole<B: Backend, T: Element>(backend: B, architecture: Architecture) -> Model<B, T> {
    model(backend, architecture, ModelParallel::whole(&config(architecture)))
}

fn pass<B: Backend + Clone>(
    model: &mut Model<B, f32>,
    recompute: Recompute,
) -> (FlatBuffers<B, f32>, Sums, Activations<B, f32>) {
    let backend = model.backend().clone();
    let shape = PassShape { recompute, document_mask: false, ..SHAPE };
    let mut activations = Activations::new(model, shape).unwrap();
    upload(&backend, &mut activations, 0);
    let mut gradients = FlatBuffers::<B, f32>::zeros(&backend, model.layout()).unwrap();
    gradients.mark_stale();
    let mut sums = StepSums::new(&backend).unwrap();
    model.forward(&mut activations, &mut sums).unwrap();
    // Ranks add up the gradients of tensors that all of them have when a buffer is complete.
    let mut complete = |_: &mut FlatBuffers<_, _>, _| Ok(());
    let (slot, complete) = (PassSlot::default(), Some(&mut complete as OnBuffer<'_, _, _>));
    model
        .backward_chunk(&mut activations, slot, &mut gradients, SCALE, &mut sums, complete)
        .unwrap();
    (gradients, sums.take(&backend).unwrap(), activations)
}

/// The router of [`TwoStage`], or the configuration's.
fn route(reference: &Reference, input: &RouterInput<'_>) -> Result<Option<Routed>> {
    let Some([shared_heads, top_k]) = TRIALS[input.layer] else {
        return configured(reference, input);
    };
    let all = reference.linear(input.x, &format!("model.layers.{}.router", input.layer))?;
    let softmax_of = |first, count| softmax(&all.narrow(1, first, count)?, D::Minus1);
    let p = softmax_of(shared_heads, HEADS - shared_heads)?;
    let mask: Vec<u8> = p.to_vec2::<f64>()?.iter().flat_map(|p| select(p, top_k)).collect();
    let selected = Tensor::from_slice(&mask, p.shape(), &Device::Cpu)?.to_dtype(DType::F64)?;
    let kept = (&p * &selected)?;
    let r = (kept.broadcast_div(&kept.sum_keepdim(1)?)? * top_k as f64)?;
    let s = (softmax_of(0, shared_heads)? * shared_heads as f64)?;
    let stages = (softmax_of(HEADS, 2)? * 2.0)?;
    let (a, b) = (stages.narrow(1, 0, 1)?, stages.narrow(1, 1, 1)?);
    let weights = Tensor::cat(&[s.broadcast_mul(&a)?, r.broadcast_mul(&b)?], 1)?;
    let balance = (selected.mean(0)? * p.mean(0)?)?.sum_all()?;
    Ok(Some(Routed { weights, balance, mask }))
}

#[test]
fn losses_and_gradients_are_those_of_an_f64_model() {
    for architecture in Architecture::ALL {
        let mut model = whole::<Cpu, f32>(Cpu, architecture);
        let reference = Reference::of(&model, route);
        let (ids, targets) = micro_batch();
        let expected = reference.forward(&ids, &targets, 2).unwrap();
        for recompute in RECOMPUTE {
            let (gradients, sums, activations) = pass(&mut model, recompute);
            if recompute != Recompute::Block {
                assert!(model.routed_mask(&activations).unwrap() == expected.masks);
            }
            reference.check(&model, &gradients, sums, &expected);
        }
    }
}

#[test]
fn ranks_that_share_the_heads_have_the_gradients_of_the_whole() {
    for architecture in Architecture::ALL {
        ranks_agree(&config(architecture), &|parallel| model(Cpu, architecture, parallel));
    }
}

/// The routers of configurations, of 8 heads that read 2 key/value heads.
#[test]
fn ranks_that_share_the_heads_of_a_configurations_router_have_the_gradients_of_the_whole() {
    for (router, shared, top_k) in [
        (RouterKind::Group, [0, 4, 8, 0], [4, 4, 0, 8]),
        (RouterKind::WithinGroup, [0, 0, 8, 0], [4, 6, 0, 2]),
        (RouterKind::Static, [5, 1, 8, 7], [0; 4]),
        (RouterKind::Linear, [5, 1, 8, 0], [2, 4, 0, 3]),
        (RouterKind::TwoStage, [5, 1, 8, 2], [2, 4, 0, 6]),
    ] {
        let moh = Some(moh(router, &shared, &top_k));
        let config =
            ModelConfig { num_hidden_layers: 4, ..moh_testkit::models::config(10, false, moh) };
        ranks_agree(&config, &|parallel| {
            Model::of_part::<Error>(Cpu, config.clone(), 64, parallel, 1, fill).unwrap()
        });
    }
}

/// The local slice of every tensor's gradient is that of the whole model's, within rounding; every
/// rank has all gradients of the routers' parameters.
fn ranks_agree(config: &ModelConfig, model: &(dyn Fn(ModelParallel) -> Model<Cpu, f32> + Sync)) {
    let mut whole = model(ModelParallel::whole(config));
    let (expected, sums, _) = pass(&mut whole, Recompute::Norms);
    let on_rank = |world: World| {
        let (alone, tensor) = (World::single().group().clone(), world.group().clone());
        let parallel = ModelParallel::new(config, alone, 1, tensor).unwrap();
        let mut model = model(parallel);
        let (gradients, found, _) = pass(&mut model, Recompute::Norms);
        if world.group().rank() == 0 {
            let difference = found.auxiliary.iter().zip(sums.auxiliary.iter());
            assert!(difference.into_iter().all(|((_, a), (_, b))| (a - b).abs() <= 1e-6 * b));
        }
        for (flat, segment) in model.layout().segments() {
            let Some((_, other)) =
                (whole.layout().segments()).find(|(_, other)| other.name == segment.name)
            else {
                panic!("{} is not a tensor of the whole model", segment.name)
            };
            let all = expected.read(&Cpu, flat, other).unwrap();
            let found = gradients.read(&Cpu, flat, segment).unwrap();
            let norm = all.iter().map(|g| g * g).sum::<f32>().sqrt();
            for run in segment.slice.runs(0..found.len()) {
                let parts = found[run.local..][..run.len].iter().zip(&all[run.whole..]);
                let error = parts.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                assert!(error < 1e-4 * norm, "{}: {error} of {norm}", segment.name);
            }
        }
        world.close().unwrap();
    };
    std::thread::scope(|scope| {
        for world in World::threads(2) {
            scope.spawn(|| on_rank(world));
        }
    });
}

/// Losses of a few steps on one micro-batch.
fn train<B: Backend + Clone, T: Element>(backend: &B, recompute: Recompute) -> Vec<f64> {
    let mut model = whole::<B, T>(backend.clone(), Architecture::Llama);
    let mut activations = Activations::new(&model, PassShape { recompute, ..SHAPE }).unwrap();
    let zeros = || FlatBuffers::<B, f32>::zeros(backend, model.layout()).unwrap();
    let (mut gradients, mut moments) = (zeros(), [zeros(), zeros()]);
    let mut sums = StepSums::new(backend).unwrap();
    upload(backend, &mut activations, 0);
    let step = |step| {
        gradients.mark_stale();
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
    for recompute in [Recompute::Norms, Recompute::Block] {
        assert_eq!(train::<Cpu, f32>(&Cpu, recompute), losses, "{recompute:?}");
    }
    learns(&train::<Cpu, bf16>(&Cpu, Recompute::Norms));
}

/// Over several steps a learned selection turns differences of rounding into other heads, so that only one
/// pass is compared.
#[cfg(feature = "cuda-emulator")]
#[test]
fn a_pass_on_a_gpu_is_that_on_the_cpu_and_the_model_learns() {
    let cuda = moh_kernels::Cuda::emulated();
    for architecture in Architecture::ALL {
        let mut on_cpu = whole::<Cpu, f32>(Cpu, architecture);
        let (expected, expected_sums, _) = pass(&mut on_cpu, Recompute::Norms);
        let mut on_gpu = whole::<_, f32>(cuda.clone(), architecture);
        let (found, found_sums, _) = pass(&mut on_gpu, Recompute::Norms);
        let (a, b) = (found_sums.cross_entropy, expected_sums.cross_entropy);
        assert!((a - b).abs() < 1e-6 * b, "loss {a}, expected {b}");
        let (mut difference, mut square) = (0f64, 0f64);
        for (flat, segment) in on_cpu.layout().segments() {
            let found = found.read(&cuda, flat, segment).unwrap();
            for (a, b) in found.iter().zip(expected.read(&Cpu, flat, segment).unwrap()) {
                difference += f64::from(a - b).powi(2);
                square += f64::from(b).powi(2);
            }
        }
        let error = (difference / square).sqrt();
        assert!(error < 1e-5, "gradients: relative error {error}");
    }
    learns(&train::<_, f32>(&cuda, Recompute::Norms));
}

#[test]
fn a_router_for_each_layer_is_asked_for() {
    let config = config(Architecture::Llama);
    let parallel = ModelParallel::whole(&config);
    let routers = vec![None];
    let model = Model::<Cpu, f32>::with_routers::<Error>(Cpu, config, 64, parallel, routers, fill);
    let Err(refused) = model.map(|_| ()) else { panic!("one router serves four layers") };
    assert!(refused.to_string().contains("1 routers for 4 layers"), "{refused}");
}
