//! The distillation loss beside the cross-entropy against its reference: both losses and both gradients, over several
//! blocks of the vocabulary and chunks of tokens, with ignored targets and a vocabulary that has grown.

use crate::reference::{
    F32_TOLERANCE, Random, added, assert_close, assert_sums_close, cases, download, flat, garbage,
    gradient, operators, tensor, tolerance, upload, var,
};
use half::bf16;
use moh_kernels::cross_entropy::{
    CrossEntropy, CrossEntropyArgs, HeadGradients, HeadShape, HeadTeacher, IGNORED,
};
use moh_kernels::{Accumulation, Backend, Cpu, DType, Element, Workspace};
use proptest::prelude::*;

/// Exact in f32, so that the reference scales by the same values.
const SCALE: f32 = 0.25;
const TEACHER_SCALE: f32 = 0.75;

/// Relative error of gradients where a device rounds the logits of both heads to bf16, 2^-9 of logits of some units:
/// the gradient is the difference of three softmaxes of such logits.
const BF16_LOGITS: f64 = 1e-2;

/// Relative error of the cross-entropy there: 2^-9 of a target's logit of up to four, of a loss of eight nats; a
/// divergence has the logits of two heads.
const BF16_LOSS: f64 = 1e-3;

/// A teacher's head: its width, the rows that are compared, and the temperature.
#[derive(Debug, Clone, Copy)]
struct Teacher {
    width: usize,
    rows: usize,
    temperature: f32,
}

fn agrees<B: Backend, T: Element, G: Element>(
    device: &B,
    shape: HeadShape,
    teacher: Teacher,
    seed: u64,
) {
    let HeadShape { tokens, width, vocab_size, .. } = shape;
    let shape = shape.with_teacher(true);
    let Teacher { width: teachers_width, rows, temperature } = teacher;
    let mut random = Random(seed);
    let x: Vec<T> = random.elements(tokens * width);
    let weight: Vec<T> = random.elements(vocab_size * width);
    let teachers_x: Vec<T> = random.elements(tokens * teachers_width);
    let teachers_weight: Vec<T> = random.elements(vocab_size * teachers_width);
    let d_weight: Vec<G> = random.elements(weight.len());
    let targets: Vec<u32> = (0..tokens)
        .map(|_| if random.below(4) == 0 { IGNORED } else { random.below(vocab_size) as u32 })
        .collect();

    let [x_buffer, weight_buffer] = [&x, &weight].map(|elements| upload(device, elements));
    let [other_x, other_weight] =
        [&teachers_x, &teachers_weight].map(|elements| upload(device, elements));
    let target_buffer = upload(device, &targets);
    let mut scratch = garbage::<B, f32>(device, device.cross_entropy_scratch(&shape));
    let mut d_x = garbage::<B, T>(device, x.len());
    let mut d_weight_out = upload(device, &d_weight);
    let mut run = |d_weight: Option<&mut B::Buffer<G>>| {
        let mut loss = upload(device, &[2f64, 3.0]);
        let gradients = d_weight.map(|d_weight| HeadGradients {
            scale: SCALE,
            d_x: B::whole_mut(&mut d_x),
            d_weight: B::whole_mut(d_weight),
            accumulation: Accumulation::Add,
        });
        device
            .cross_entropy(CrossEntropyArgs {
                shape,
                x: B::whole(&x_buffer),
                weight: B::whole(&weight_buffer),
                targets: B::whole(&target_buffer),
                scratch: B::whole_mut(&mut scratch),
                loss: B::whole_mut(&mut loss),
                teacher: Some(HeadTeacher {
                    width: teachers_width,
                    x: B::whole(&other_x),
                    weight: B::whole(&other_weight),
                    rows,
                    temperature,
                    scale: TEACHER_SCALE,
                }),
                gradients,
                ranks: None,
            })
            .unwrap();
        let loss = download::<B, f64>(device, &loss);
        [loss[0] - 2.0, loss[1] - 3.0]
    };
    let alone = run(None);
    let losses = run(Some(&mut d_weight_out));
    assert_eq!(losses, alone, "the losses do not depend on whether gradients are wanted");

    let (x, weight) = (var(&x, (tokens, width)), var(&weight, (vocab_size, width)));
    let teachers_x = tensor(&teachers_x, (tokens, teachers_width));
    let teachers_weight = tensor(&teachers_weight, (vocab_size, teachers_width));
    let cross_entropy = operators::cross_entropy(&x, &weight, &targets).unwrap();
    let teachers = operators::linear(&teachers_x, &teachers_weight).unwrap();
    let students = operators::linear(&x, &weight).unwrap();
    let distillation =
        operators::distillation(&students, &teachers, &targets, rows, f64::from(temperature))
            .unwrap();
    let scaled = |loss: &candle_core::Tensor, scale: f32| (loss * f64::from(scale)).unwrap();
    let total = (scaled(&cross_entropy, SCALE) + scaled(&distillation, TEACHER_SCALE)).unwrap();
    let gradients = total.backward().unwrap();
    // A device may round the logits to the type of x.
    let bf16 = T::DTYPE == DType::BF16;
    let tolerances = if bf16 { [BF16_LOSS, 2.0 * BF16_LOSS] } else { [F32_TOLERANCE; 2] };
    // A divergence is a sum of positive and negative terms of order 1, a cross-entropy is not.
    let expected = [("cross-entropy", &cross_entropy, 0.0), ("distillation", &distillation, 1.0)];
    for (((what, expected, terms), loss), tolerance) in
        expected.into_iter().zip(losses).zip(tolerances)
    {
        let expected = flat(&expected.unsqueeze(0).unwrap());
        assert_sums_close(what, &[loss as f32], &expected, terms, tolerance);
    }
    let d_x = download::<B, T>(device, &d_x);
    let rows = d_x.chunks(width).zip(&targets);
    let mut ignored = rows.filter(|(_, target)| **target == IGNORED);
    let is_zero = ignored.all(|(row, _)| row.iter().all(|value| value.to_f32() == 0.0));
    assert!(is_zero, "the gradient of a token without a target is exactly 0");
    let gradients_tolerance = if bf16 { BF16_LOGITS } else { F32_TOLERANCE };
    assert_close("d_x", &d_x, &gradient(&gradients, &x), gradients_tolerance);
    let expected = added(&d_weight, &gradient(&gradients, &weight));
    let found = download::<B, G>(device, &d_weight_out);
    assert_close("d_weight", &found, &expected, gradients_tolerance.max(tolerance::<G>()));
}

#[test]
fn losses_and_gradients_agree_over_more_than_one_chunk() {
    // A chunk has at most 2048 tokens.
    let shape = HeadShape::whole(2100, 24, 40);
    let teacher = Teacher { width: 24, rows: 40, temperature: 1.0 };
    on_each_device!(device => agrees::<_, f32, f32>(device, shape, teacher, 1));
    on_each_device!(device => agrees::<_, bf16, f32>(device, shape, teacher, 1));
    on_each_device!(device => agrees::<_, bf16, bf16>(device, shape, teacher, 1));
}

#[test]
fn distributions_over_a_part_of_the_rows_agree() {
    // Blocks of 1024 rows: none, a part, and all of the last one are compared.
    for (vocab_size, rows) in [(2600, 2048), (2603, 2100), (2600, 7), (2603, 2603), (1030, 1)] {
        let shape = HeadShape::whole(5, 8, vocab_size);
        let teacher = Teacher { width: 11, rows, temperature: 2.0 };
        on_each_device!(device => agrees::<_, f32, f32>(device, shape, teacher, 2));
        on_each_device!(device => agrees::<_, bf16, f32>(device, shape, teacher, 2));
    }
}

/// The CPU's losses of one token, and the gradient of its input, with these heads of width 1.
fn of_one_token(weight: &[f32], teachers: &[f32], temperature: f32) -> ([f64; 2], f32) {
    let shape = HeadShape::whole(1, 1, weight.len()).with_teacher(true);
    let mut scratch = vec![0f32; Cpu.cross_entropy_scratch(&shape)];
    let (mut loss, mut d_x, mut d_weight) = ([0f64; 2], [0f32], vec![0f32; weight.len()]);
    let args = CrossEntropyArgs::<Cpu, f32, f32> {
        shape,
        x: &[1.0],
        weight,
        targets: &[0],
        scratch: &mut scratch,
        loss: &mut loss,
        teacher: Some(HeadTeacher {
            width: 1,
            x: &[1.0],
            weight: teachers,
            rows: weight.len(),
            temperature,
            scale: 1.0,
        }),
        gradients: Some(HeadGradients {
            scale: 0.0,
            d_x: &mut d_x,
            d_weight: &mut d_weight,
            accumulation: Accumulation::Overwrite,
        }),
        ranks: None,
    };
    Cpu.cross_entropy(args).unwrap();
    (loss, d_x[0])
}

#[test]
fn a_student_that_is_its_teacher_has_no_loss_and_no_gradient() {
    let weight: Vec<f32> = (0..1500).map(|row| (row % 97) as f32 / 7.0).collect();
    let (loss, d_x) = of_one_token(&weight, &weight, 3.0);
    assert_eq!((loss[1], d_x), (0.0, 0.0));
}

#[test]
fn logits_far_apart_have_the_loss_of_their_differences() {
    // Logits that differ by a constant are the same distribution: the loss is what rounding leaves of it.
    let weight: Vec<f32> = (0..1500).map(|row| (row % 97) as f32 / 8.0).collect();
    let moved: Vec<f32> = weight.iter().map(|logit| logit + 512.0).collect();
    let (loss, _) = of_one_token(&weight, &moved, 1.0);
    assert!(loss[1].abs() < 1e-6, "{loss:?}");
    // The teacher is certain of a token that the student gives exp(-40): its loss is 40.
    let (loss, _) = of_one_token(&[0.0, 40.0], &[60.0, 0.0], 1.0);
    assert!((loss[1] - 40.0).abs() < 1e-5, "{loss:?}");
}

#[test]
fn what_does_not_fit_the_head_is_refused() {
    let refusal = |has_teacher: bool, rows: usize, temperature: f32| {
        let shape = HeadShape::whole(1, 1, 3).with_teacher(has_teacher);
        let (mut scratch, mut loss) = (vec![0f32; 100], [0f64; 2]);
        let args = CrossEntropyArgs::<Cpu, f32, f32> {
            shape,
            x: &[1.0],
            weight: &[1.0; 3],
            targets: &[0],
            scratch: &mut scratch,
            loss: &mut loss,
            teacher: Some(HeadTeacher {
                width: 1,
                x: &[1.0],
                weight: &[1.0; 3],
                rows,
                temperature,
                scale: 1.0,
            }),
            gradients: None,
            ranks: None,
        };
        Cpu.cross_entropy(args).unwrap_err().to_string()
    };
    assert!(refusal(false, 3, 1.0).contains("a shape with a teacher needs one"));
    assert!(refusal(true, 0, 1.0).contains("the teacher's head is empty"));
    for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let refusal = refusal(true, 3, temperature);
        assert!(refusal.contains("expected a positive number"), "{refusal}");
    }
}

proptest::proptest! {
    #![proptest_config(cases(48))]
    #[test]
    fn any_shape_agrees(
        tokens in 1usize..50,
        width in 1usize..40,
        teachers_width in 1usize..40,
        (vocab_size, rows) in (1usize..70).prop_flat_map(|vocab_size| (Just(vocab_size), 1..=vocab_size)),
        temperature in prop_oneof![Just(1f32), Just(2.0), Just(0.5)],
        seed: u64,
    ) {
        let shape = HeadShape::whole(tokens, width, vocab_size);
        let teacher = Teacher { width: teachers_width, rows, temperature };
        on_each_device!(device => agrees::<_, f32, f32>(device, shape, teacher, seed));
    }
}
