//! AdamW and the squared norm against their references, step after step from the operator's own
//! state.

#![allow(clippy::unwrap_used)]

mod reference;

use half::bf16;
use moh_kernels::adamw::AdamW;
use moh_kernels::{Backend, Element};
use reference::{
    F32_TOLERANCE, Random, assert_close, cases, download, flat, operators, tensor, tolerance,
    upload, view, view_mut, wide,
};

/// A large learning rate, so that the change of a weight shows above the weight's rounding.
const STEP: AdamW = AdamW {
    learning_rate: 0.1,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.1,
    clip_norm: 1.0,
    step: 1,
};

fn differences(after: &[f64], before: &[f64]) -> Vec<f64> {
    after.iter().zip(before).map(|(a, b)| a - b).collect()
}

fn agrees<B: Backend, T: Element, G: Element, M: Element>(device: &B, len: usize, mastered: bool) {
    let mut random = Random(len as u64);
    let mut weights = upload(device, &random.numbers::<T>(len));
    let exact: Vec<f32> =
        download::<B, T>(device, &weights).iter().map(|weight| weight.to_f32()).collect();
    let mut master = upload(device, &exact);
    let mut first = upload(device, &vec![M::zeroed(); len]);
    let mut second = upload(device, &vec![M::zeroed(); len]);
    for number in 1..=4 {
        let gradients: Vec<G> = random.numbers(len);
        let squared_norm = wide(&gradients).iter().map(|x| x * x).sum::<f64>() + 2.0;
        // Every second step clips.
        let clip_norm = if number % 2 == 0 { 0.5 * squared_norm.sqrt() } else { f64::MAX };
        let step = AdamW { step: number, clip_norm, ..STEP };
        let before = if mastered {
            download::<B, f32>(device, &master)
        } else {
            download::<B, T>(device, &weights).iter().map(|weight| weight.to_f32()).collect()
        };
        let state = [
            tensor(&before, len),
            tensor(&download::<B, M>(device, &first), len),
            tensor(&download::<B, M>(device, &second), len),
        ];
        let (norm, gradient) = (upload(device, &[squared_norm]), upload(device, &gradients));
        device
            .adamw(
                &step,
                view::<B, f64>(&norm),
                view::<B, G>(&gradient),
                view_mut::<B, T>(&mut weights),
                mastered.then(|| view_mut::<B, f32>(&mut master)),
                view_mut::<B, M>(&mut first),
                view_mut::<B, M>(&mut second),
            )
            .unwrap();
        let [parameter, m, v] =
            operators::adamw(&step, squared_norm, &tensor(&gradients, len), state.each_ref())
                .unwrap();
        assert_close("m", &download::<B, M>(device, &first), &flat(&m), tolerance::<M>());
        assert_close("v", &download::<B, M>(device, &second), &flat(&v), tolerance::<M>());
        let after = download::<B, T>(device, &weights);
        assert_close("weights", &after, &flat(&parameter), tolerance::<T>());
        if mastered {
            let master = wide(&download::<B, f32>(device, &master));
            let change: Vec<f32> =
                differences(&master, &wide(&before)).iter().map(|&x| x as f32).collect();
            let expected = differences(&flat(&parameter), &wide(&before));
            assert_close("change of the master copy", &change, &expected, F32_TOLERANCE);
        }
    }
}

#[test]
fn weights_and_moments_agree_over_more_than_one_task() {
    // A task updates 16384 numbers.
    on_each_device!(device => agrees::<_, f32, f32, f32>(device, 20_000, false));
    on_each_device!(device => agrees::<_, f32, f32, f32>(device, 20_000, true));
    on_each_device!(device => agrees::<_, bf16, f32, f32>(device, 20_000, true));
    on_each_device!(device => agrees::<_, bf16, bf16, bf16>(device, 20_000, true));
    on_each_device!(device => agrees::<_, bf16, bf16, bf16>(device, 20_000, false));
}

#[test]
fn decay_alone_shrinks_a_weight_without_gradient() {
    let (mut weights, mut first, mut second) = ([2f32], [0f32], [0f32]);
    moh_kernels::Cpu
        .adamw(&STEP, &[0.0], &[0f32], &mut weights, None, &mut first, &mut second)
        .unwrap();
    assert_eq!((weights, first, second), ([1.98], [0.0], [0.0]));
}

#[test]
fn the_squared_norm_is_added_to_what_is_there() {
    fn check<B: Backend, G: Element>(device: &B) {
        let x: Vec<G> = Random(3).numbers(40_000);
        let mut out = upload(device, &[5.0f64]);
        let buffer = upload(device, &x);
        device.squared_norm(view::<B, G>(&buffer), view_mut::<B, f64>(&mut out)).unwrap();
        let expected = 5.0 + wide(&x).iter().map(|x| x * x).sum::<f64>();
        let norm = download::<B, f64>(device, &out)[0];
        assert!((norm / expected - 1.0).abs() < 1e-14, "{norm} is not {expected}");
    }
    on_each_device!(device => check::<_, f32>(device));
    on_each_device!(device => check::<_, bf16>(device));
}

proptest::proptest! {
    #![proptest_config(cases(32))]
    #[test]
    fn any_length_agrees(len in 1usize..200, mastered: bool) {
        on_each_device!(device => agrees::<_, f32, f32, f32>(device, len, mastered));
    }
}
