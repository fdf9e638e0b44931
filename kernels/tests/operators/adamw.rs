//! AdamW and the squared norm against their references, step after step from the operator's own
//! state.

use crate::reference::{
    F32_TOLERANCE, Random, STEP, assert_close, cases, download, flat, operators, tensor, tolerance,
    upload, wide,
};
use half::bf16;
use moh_kernels::adamw::remainder::join;
use moh_kernels::adamw::{AdamW, AdamWUpdate, Optimizer};
use moh_kernels::{Backend, Cpu, Element};
#[cfg(feature = "cuda-emulator")]
use moh_kernels::{Cuda, Memory as _};

fn differences(after: &[f64], before: &[f64]) -> Vec<f64> {
    after.iter().zip(before).map(|(a, b)| a - b).collect()
}

/// Returns the exact values that an update reads: the weights plus the remainders of their rounding, if
/// any.
fn exact<B: Backend, T: Element>(
    device: &B,
    weights: &B::Buffer<T>,
    remainder: Option<&B::Buffer<i16>>,
) -> Vec<f32> {
    let weights = download::<B, T>(device, weights);
    let Some(remainder) = remainder else {
        return weights.iter().map(|weight| weight.to_f32()).collect();
    };
    let bits = |weight: &T| bf16::from_f32(weight.to_f32());
    let remainder = download::<B, i16>(device, remainder);
    weights.iter().zip(remainder).map(|(weight, left)| join(bits(weight), left)).collect()
}

/// Compares updates with the reference. With a remainder the weights are bf16.
fn agrees<B: Backend, T: Element, G: Element, M: Element>(device: &B, len: usize, joined: bool) {
    let mut random = Random(len as u64);
    let mut weights = upload(device, &random.elements::<T>(len));
    let mut remainder = joined.then(|| upload(device, &vec![0i16; len]));
    let mut first = upload(device, &vec![M::zeroed(); len]);
    let mut second = upload(device, &vec![M::zeroed(); len]);
    for number in 1..=4 {
        let gradients: Vec<G> = random.elements(len);
        let squared_norm = wide(&gradients).iter().map(|x| x * x).sum::<f64>() + 2.0;
        let grad_norm = squared_norm.sqrt();
        // Every second step clips.
        let clip_norm = if number % 2 == 0 { 0.5 * grad_norm } else { f64::MAX };
        let step = AdamW { step: number, clip_norm, grad_norm, ..STEP };
        let before = exact::<B, T>(device, &weights, remainder.as_ref());
        let state = [
            tensor(&before, len),
            tensor(&download::<B, M>(device, &first), len),
            tensor(&download::<B, M>(device, &second), len),
        ];
        let gradient = upload(device, &gradients);
        device
            .adamw(AdamWUpdate {
                step: &step,
                gradients: B::whole(&gradient),
                weights: B::whole_mut(&mut weights),
                remainder: remainder.as_mut().map(|remainder| B::whole_mut(remainder)),
                first_moment: B::whole_mut(&mut first),
                second_moment: B::whole_mut(&mut second),
            })
            .unwrap();
        let [parameter, m, v] =
            operators::adamw(&step, &tensor(&gradients, len), state.each_ref()).unwrap();
        assert_close("m", &download::<B, M>(device, &first), &flat(&m), tolerance::<M>());
        assert_close("v", &download::<B, M>(device, &second), &flat(&v), tolerance::<M>());
        let after = download::<B, T>(device, &weights);
        assert_close("weights", &after, &flat(&parameter), tolerance::<T>());
        if joined {
            let exact = exact::<B, T>(device, &weights, remainder.as_ref());
            let change: Vec<f32> =
                differences(&wide(&exact), &wide(&before)).iter().map(|&x| x as f32).collect();
            let expected = differences(&flat(&parameter), &wide(&before));
            assert_close("change of the exact weights", &change, &expected, F32_TOLERANCE);
            let rounded = exact.iter().map(|&exact| T::from_f32(exact)).collect::<Vec<_>>();
            assert_eq!(after, rounded, "the weights are not the exact ones, rounded");
        }
    }
}

#[test]
fn weights_and_moments_agree_over_more_than_one_task() {
    // A task updates 16384 elements.
    on_each_device!(device => agrees::<_, f32, f32, f32>(device, 20_000, false));
    on_each_device!(device => agrees::<_, bf16, f32, f32>(device, 20_000, true));
    on_each_device!(device => agrees::<_, bf16, bf16, bf16>(device, 20_000, true));
    on_each_device!(device => agrees::<_, bf16, bf16, bf16>(device, 20_000, false));
}

#[test]
fn weights_in_f32_have_no_remainder() {
    fn check<B: Backend>(device: &B) {
        let zeros = |len| upload(device, &vec![0f32; len]);
        let (mut weights, gradients, mut m, mut v) = (zeros(2), zeros(2), zeros(2), zeros(2));
        let mut remainder = upload(device, &[0i16; 2]);
        let refused = device.adamw(AdamWUpdate {
            step: &STEP,
            gradients: B::whole::<f32>(&gradients),
            weights: B::whole_mut::<f32>(&mut weights),
            remainder: Some(B::whole_mut(&mut remainder)),
            first_moment: B::whole_mut::<f32>(&mut m),
            second_moment: B::whole_mut(&mut v),
        });
        let reason = refused.unwrap_err().to_string();
        assert_eq!(reason, "adamw: weights of F32 have no remainder, only BF16 weights do");
    }
    on_each_device!(device => check(device));
}

/// Ranges with any start, like ranges of parameters; and weights with a sharded state.
#[test]
fn parts_that_no_pack_begins_at_are_updated_alone() {
    fn check<B: Backend>(device: &B, state: std::ops::Range<usize>) {
        let gradients = upload(device, &[bf16::ONE; 40]);
        let mut weights = upload(device, &[bf16::ONE; 40]);
        let mut remainder = upload(device, &[0i16; 40]);
        let (mut m, mut v) = (upload(device, &[0f32; 40]), upload(device, &[0f32; 40]));
        let part = 3..37;
        device
            .adamw(AdamWUpdate {
                step: &STEP,
                gradients: B::view(&gradients, part.clone()),
                weights: B::view_mut(&mut weights, part.clone()),
                remainder: Some(B::view_mut(&mut remainder, state.clone())),
                first_moment: B::view_mut(&mut m, state.clone()),
                second_moment: B::view_mut(&mut v, state.clone()),
            })
            .unwrap();
        // The remainders of the same range as the weights.
        let mut placed = [0i16; 40];
        let remainder = download::<B, i16>(device, &remainder);
        placed[part.clone()].copy_from_slice(&remainder[state]);
        let exact = exact::<B, bf16>(device, &weights, Some(&upload(device, &placed)));
        // 1 - lr decay - lr: every first step has size lr.
        let changed = exact.iter().map(|x| (x - 0.89).abs() < 1e-6);
        assert!(changed.enumerate().all(|(at, changed)| changed == part.contains(&at)));
        let outside = |at: usize| exact[at] == 1.0;
        assert!((0..3).chain(37..40).all(outside));
    }
    on_each_device!(device => check(device, 3..37));
    on_each_device!(device => check(device, 0..34));
}

#[test]
fn decay_alone_shrinks_a_weight_without_gradient() {
    let (mut weights, mut first, mut second) = ([2f32], [0f32], [0f32]);
    let update = AdamWUpdate::<Cpu, f32, f32, f32> {
        step: &STEP,
        gradients: &[0f32],
        weights: &mut weights,
        remainder: None,
        first_moment: &mut first,
        second_moment: &mut second,
    };
    Cpu.adamw(update).unwrap();
    assert_eq!((weights, first, second), ([1.98], [0.0], [0.0]));
}

#[test]
fn the_squared_norm_accumulates() {
    fn check<B: Backend, G: Element>(device: &B) {
        let x: Vec<G> = Random(3).elements(40_000);
        let mut out = upload(device, &[5.0f64]);
        let buffer = upload(device, &x);
        device.squared_norms(&[B::whole(&buffer)], B::whole_mut(&mut out)).unwrap();
        let expected = 5.0 + wide(&x).iter().map(|x| x * x).sum::<f64>();
        let norm = download::<B, f64>(device, &out)[0];
        assert!((norm / expected - 1.0).abs() < 1e-14, "{norm} is not {expected}");
    }
    on_each_device!(device, T => check::<_, T>(device));
}

/// More segments than fit one launch, some of them empty, at different offsets from 16 bytes; and
/// no segments at all.
#[test]
fn many_segments_have_the_squared_norm_of_all_their_elements() {
    fn check<B: Backend, G: Element>(device: &B, count: usize) {
        let mut random = Random(count as u64);
        let (mut end, mut ranges) = (0, Vec::new());
        for at in 0..count {
            let (gap, len) = (random.below(9), [0, random.below(40), random.below(5000)][at % 3]);
            ranges.push(end + gap..end + gap + len);
            end += gap + len;
        }
        let x: Vec<G> = random.elements(end);
        let (buffer, mut out) = (upload(device, &x), upload(device, &[5.0f64]));
        let xs: Vec<_> = ranges.iter().map(|range| B::view(&buffer, range.clone())).collect();
        device.squared_norms(&xs, B::whole_mut(&mut out)).unwrap();
        let inside = ranges.iter().flat_map(|range| wide(&x[range.clone()]));
        let expected = 5.0 + inside.map(|x| x * x).sum::<f64>();
        let norm = download::<B, f64>(device, &out)[0];
        assert!((norm / expected - 1.0).abs() < 1e-14, "{norm} is not {expected}");
    }
    for count in [0, 1, 2, 128, 129, 300] {
        on_each_device!(device, T => check::<_, T>(device, count));
    }
}

/// The segments of LLaMA-3-8B, 291 tensors: a launch for every 128 segments and a launch for the sum. Clipping is
/// part of the update.
#[cfg(feature = "cuda-emulator")]
#[test]
fn the_norm_of_a_model_takes_four_launches_and_clipping_none() {
    let device = Cuda::emulated();
    let launches = || device.emulated_calls().unwrap().launches;
    let (gradients, mut out) = (upload(&device, &[bf16::ONE; 291]), upload(&device, &[0f64]));
    let xs: Vec<_> = (0..291).map(|at| Cuda::view(&gradients, at..at + 1)).collect();
    device.squared_norms(&xs, Cuda::whole_mut(&mut out)).unwrap();
    assert_eq!(launches(), 4);
    let before = launches();
    let clipping = AdamW { clip_norm: 0.5, ..STEP };
    let mut buffers = [(); 3].map(|()| upload(&device, &[0f32; 291]));
    let [weights, first, second] = &mut buffers;
    device
        .adamw(AdamWUpdate::<Cuda, f32, bf16, f32> {
            step: &clipping,
            gradients: Cuda::whole(&gradients),
            weights: Cuda::whole_mut(weights),
            remainder: None,
            first_moment: Cuda::whole_mut(first),
            second_moment: Cuda::whole_mut(second),
        })
        .unwrap();
    assert_eq!(launches() - before, 1);
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn any_length_agrees(len in 1usize..200, joined: bool) {
        on_each_device!(device => agrees::<_, f32, f32, f32>(device, len, false));
        on_each_device!(device => agrees::<_, bf16, f32, bf16>(device, len, joined));
    }
}
