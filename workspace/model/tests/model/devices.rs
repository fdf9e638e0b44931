//! The CUDA kernels in a whole model, against the CPU's operators.

#![cfg(any(feature = "cuda", feature = "cuda-emulator"))]

use half::bf16;
#[cfg(feature = "cuda-emulator")]
use moh_kernels::adamw::AdamW;
use moh_kernels::{Backend, Cpu, Cuda, DType, Element};
#[cfg(feature = "cuda-emulator")]
use moh_model::parameters::FlatBuffers;
#[cfg(feature = "cuda-emulator")]
use moh_model::{Activations, StepSums};
use moh_model::{
    Architecture, AuxiliaryLoss, ModelConfig, MohConfig, PassShape, Recompute, RouterKind, Sums,
};
#[cfg(feature = "cuda-emulator")]
use moh_testkit::models::{ADAMW, RECOMPUTE, SCALE, update, upload};
use moh_testkit::models::{MOH, SHAPE, config, model, moh};

/// Losses, selected heads and all gradients of one micro-batch.
struct Pass {
    losses: Sums,
    mask: Vec<u8>,
    gradients: Vec<f32>,
}

fn pass<B: Backend + Clone, T: Element>(
    backend: B,
    config: ModelConfig,
    recompute: Recompute,
    length: usize,
) -> Pass {
    let mut model = model(backend, T::ELEMENT, config);
    let shape = PassShape { recompute, length, ..SHAPE };
    let (activations, gradients, losses) = moh_testkit::models::pass(&mut model, shape);
    let mask = match recompute {
        Recompute::Block => Vec::new(),
        _ => model.routed_mask(&activations).unwrap().concat(),
    };
    let backend = model.backend();
    let mut found = Vec::new();
    for (flat, segment) in model.layout().segments() {
        found.extend(gradients.read(backend, flat, segment).unwrap());
    }
    Pass { losses, mask, gradients: found }
}

fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let difference: f64 = found.iter().zip(expected).map(|(&a, &b)| square(a - b)).sum();
    (difference / expected.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
}

fn agree<T: Element>(moh: Option<MohConfig>, recompute: Recompute, tolerance: f64) {
    for architecture in Architecture::ALL {
        let config = || ModelConfig { architecture, ..config(16, true, moh.clone()) };
        // In bf16 the queries of later blocks differ by rounding, which may decide near ties. Then sequences of fewer
        // tokens are compared.
        let lengths = [SHAPE.length, 24, 16, 12, 8, 6];
        let tries = if T::DTYPE == DType::F32 { 1 } else { lengths.len() };
        for device in devices() {
            let both = |&length: &usize| {
                let found = pass::<Cuda, T>(device.clone(), config(), recompute, length);
                (found, pass::<Cpu, T>(Cpu, config(), recompute, length))
            };
            let mut passes = lengths[..tries].iter().map(both);
            let alike = passes.find(|(found, expected)| found.mask == expected.mask);
            let (found, expected) = alike.expect("tokens select the same heads");
            agrees(&found, &expected, tolerance);
        }
    }
}

/// Returns the emulated GPU, and the first real GPU where the variable MOH_TEST_GPU is set.
fn devices() -> Vec<Cuda> {
    let devices: Vec<Cuda> = [emulated(), gpu()].into_iter().flatten().collect();
    assert!(!devices.is_empty(), "MOH_TEST_GPU is not set");
    devices
}

fn emulated() -> Option<Cuda> {
    #[cfg(feature = "cuda-emulator")]
    return Some(Cuda::emulated());
    #[cfg(not(feature = "cuda-emulator"))]
    None
}

fn gpu() -> Option<Cuda> {
    #[cfg(feature = "cuda")]
    return std::env::var_os("MOH_TEST_GPU").map(|_| Cuda::new(0).unwrap());
    #[cfg(not(feature = "cuda"))]
    None
}

fn agrees(found: &Pass, expected: &Pass, tolerance: f64) {
    let balance = |pass: &Pass| pass.losses.auxiliary[AuxiliaryLoss::Balance];
    let cross_entropy = |pass: &Pass| pass.losses.cross_entropy;
    for (a, b) in
        [(cross_entropy(found), cross_entropy(expected)), (balance(found), balance(expected))]
    {
        assert!((a - b).abs() <= tolerance * b.abs(), "loss {a}, expected {b}");
    }
    let error = relative_error(&found.gradients, &expected.gradients);
    assert!(error < tolerance, "gradients: relative error {error}");
}

/// Returns a routing with different heads in the two layers.
fn mixed(shared: [usize; 2], top_k: [usize; 2]) -> MohConfig {
    moh(RouterKind::QueryNorm, &shared, &top_k)
}

#[test]
#[cfg_attr(not(feature = "cuda-emulator"), ignore = "needs a GPU and MOH_TEST_GPU")]
fn a_dense_pass_is_the_cpus() {
    agree::<f32>(None, Recompute::Norms, 1e-5);
    agree::<bf16>(None, Recompute::None, 2e-2);
}

#[test]
#[cfg_attr(not(feature = "cuda-emulator"), ignore = "needs a GPU and MOH_TEST_GPU")]
fn a_mixture_of_head_pass_is_the_cpus() {
    agree::<f32>(Some(MOH), Recompute::None, 1e-5);
    agree::<f32>(Some(MOH), Recompute::Block, 1e-5);
    agree::<bf16>(Some(MOH), Recompute::Norms, 2e-2);
}

#[test]
#[cfg_attr(not(feature = "cuda-emulator"), ignore = "needs a GPU and MOH_TEST_GPU")]
fn a_pass_with_other_heads_in_each_layer_is_the_cpus() {
    for mixed in [mixed([8, 3], [0, 2]), mixed([6, 1], [1, 4])] {
        agree::<f32>(Some(mixed.clone()), Recompute::Norms, 1e-5);
        agree::<f32>(Some(mixed.clone()), Recompute::Block, 1e-5);
        agree::<bf16>(Some(mixed), Recompute::None, 2e-2);
    }
}

/// Returns each router with heads that it can route: 8 heads that read 2 key/value heads.
fn routers() -> [MohConfig; 5] {
    [
        moh(RouterKind::Group, &[0], &[4]),
        moh(RouterKind::Static, &[5], &[0]),
        moh(RouterKind::Linear, &[3], &[2]),
        moh(RouterKind::OneStage, &[3], &[2]),
        moh(RouterKind::TwoStage, &[3], &[2]),
    ]
}

#[test]
#[cfg_attr(not(feature = "cuda-emulator"), ignore = "needs a GPU and MOH_TEST_GPU")]
fn a_pass_with_another_router_is_the_cpus() {
    for moh in routers() {
        agree::<f32>(Some(moh.clone()), Recompute::Norms, 1e-5);
        agree::<f32>(Some(moh.clone()), Recompute::Block, 1e-5);
        agree::<bf16>(Some(moh), Recompute::None, 3e-2);
    }
}

/// Takes steps of two micro-batches with an evaluation after each step, on memory that was planned before.
#[cfg(feature = "cuda-emulator")]
fn take_steps<T: Element>(config: ModelConfig, recompute: Recompute) {
    let cuda = Cuda::emulated();
    let mut model = model(cuda.clone(), T::ELEMENT, config);
    let shape = PassShape { recompute, ..SHAPE };
    let mut training = Activations::new(&model, shape).unwrap();
    let evaluated = PassShape { training: false, ..shape };
    let mut evaluation = Activations::new(&model, evaluated).unwrap();
    let zeros = || FlatBuffers::zeros(&cuda, T::ELEMENT, model.layout()).unwrap();
    let (mut gradients, mut moments) = (zeros(), [zeros(), zeros()]);
    let mut sums = StepSums::new(&cuda).unwrap();
    let memory_calls = || {
        let calls = cuda.emulated_calls().unwrap();
        (calls.allocations, calls.frees)
    };
    let planned = memory_calls();
    for step in 1..=2 {
        gradients.mark_stale();
        sums.zero(&cuda).unwrap();
        for _micro_batch in 0..2 {
            upload(&cuda, &mut training, 0);
            model.forward_backward(&mut training, &mut gradients, SCALE, &mut sums).unwrap();
        }
        let constants = AdamW { step, ..ADAMW };
        update(&mut model, &constants, &gradients, &mut moments, &mut sums);
        upload(&cuda, &mut evaluation, 0);
        model.evaluate(&mut evaluation, &mut sums, None).unwrap();
        sums.read(&cuda).unwrap();
        assert_eq!(memory_calls(), planned, "step {step}");
    }
}

#[cfg(feature = "cuda-emulator")]
#[test]
fn steps_take_and_give_back_no_memory() {
    for moh in routers() {
        take_steps::<bf16>(config(16, true, Some(moh)), Recompute::Norms);
    }
    for moh in [None, Some(MOH), Some(mixed([8, 3], [0, 2]))] {
        // Each path of attention: plain, tiled and Hopper's.
        take_steps::<f32>(config(16, true, moh.clone()), Recompute::Norms);
        take_steps::<bf16>(config(16, true, moh.clone()), Recompute::Block);
        take_steps::<bf16>(config(64, true, moh.clone()), Recompute::None);
        let architecture = Architecture::Qwen3;
        let normed = ModelConfig { architecture, ..config(64, true, moh) };
        take_steps::<f32>(normed, Recompute::Norms);
    }
}

/// Two commits compute the same on the emulated GPU if they print the same.
#[cfg(feature = "cuda-emulator")]
#[test]
#[ignore = "prints digests of passes, to compare two commits by"]
fn digests_of_passes() {
    fn print<T: Element>(config: ModelConfig, recompute: Recompute) {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let name = format!("{:?}, {:?}, {:?}", T::DTYPE, config.architecture, config.moh);
        let Pass { losses, gradients, .. } =
            pass::<Cuda, T>(Cuda::emulated(), config, recompute, SHAPE.length);
        let mut hasher = DefaultHasher::new();
        losses.cross_entropy.to_bits().hash(&mut hasher);
        gradients.iter().for_each(|gradient| gradient.to_bits().hash(&mut hasher));
        println!("{name}, {recompute:?}: {:016x}", hasher.finish());
    }
    for moh in [None, Some(MOH), Some(mixed([8, 3], [0, 2]))] {
        for architecture in Architecture::ALL {
            for recompute in RECOMPUTE {
                let config =
                    |head_dim| ModelConfig { architecture, ..config(head_dim, true, moh.clone()) };
                print::<f32>(config(16), recompute);
                print::<bf16>(config(16), recompute);
                print::<bf16>(config(64), recompute);
            }
        }
    }
}
