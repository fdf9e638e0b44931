//! The fused output head and cross-entropy, and the distillation loss, against their reference: losses and both
//! gradients. The cases have ignored targets, several blocks of the vocabulary, several chunks of tokens, and a
//! vocabulary that has grown.

use crate::reference::{
    F32_TOLERANCE, Random, added, assert_close, assert_sums_close, cases, download, flat, garbage,
    gradient, operators, tensor, tolerance, upload, var,
};
use half::bf16;
use moh_kernels::cross_entropy::{
    CrossEntropyArgs, HeadGradients, HeadRanks, HeadShape, HeadTeacher, IGNORED,
};
use moh_kernels::ranks::{AllReduce, VocabularyRows};
use moh_kernels::{Accumulation, Backend, Cpu, DType, Element, Result, Workspace};
use proptest::prelude::*;

/// Exact in f32, so that the reference scales by the same values.
const SCALE: f32 = 0.25;
const TEACHER_SCALE: f32 = 0.75;

/// Relative error of gradients if a device rounds the logits of both heads to bf16: 2^-9 of logits of some units.
/// The gradient is the difference of three softmaxes of such logits.
const BF16_LOGITS: f64 = 1e-2;

/// Relative error of the cross-entropy in that case: 2^-9 of a target's logit of up to four, of a loss of eight nats.
/// A divergence has the logits of two heads.
const BF16_LOSS: f64 = 1e-3;

/// A teacher's head: its width, the number of compared rows, and the temperature.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Teacher {
    pub width: usize,
    pub rows: usize,
    pub temperature: f32,
}

/// An output head with its inputs.
pub(crate) struct Head<T> {
    shape: HeadShape,
    x: Vec<T>,
    pub weight: Vec<T>,
    targets: Vec<u32>,
    teacher: Option<Teacher>,
    teachers_x: Vec<T>,
    teachers_weight: Vec<T>,
    /// Factors of the gradients of both losses.
    scales: [f32; 2],
    /// Initial values of the sums of losses, which are subtracted from the results.
    before: [f64; 2],
}

/// A rank, the number of ranks, and the sum over the ranks.
pub(crate) type Divided<'a, B> = (usize, usize, AllReduce<'a, B>);

/// The losses, and the gradients of x and of the weight.
type Found<T, G> = (Vec<f64>, Vec<T>, Vec<G>);

impl<T: Element> Head<T> {
    pub fn new(shape: HeadShape, teacher: Option<Teacher>, random: &mut Random) -> Self {
        let head = Self::without_targets(shape, teacher, random);
        head.with_targets(random)
    }

    fn with_targets(self, random: &mut Random) -> Self {
        let HeadShape { tokens, vocab_size, .. } = self.shape;
        let mut target = || match random.below(4) {
            0 => IGNORED,
            _ => random.below(vocab_size) as u32,
        };
        let targets = (0..tokens).map(|_| target()).collect();
        Head { targets, ..self }
    }

    fn without_targets(shape: HeadShape, teacher: Option<Teacher>, random: &mut Random) -> Self {
        let HeadShape { tokens, width, vocab_size, .. } = shape;
        let teachers_width = teacher.map_or(0, |teacher| teacher.width);
        Head {
            shape: shape.with_teacher(teacher.is_some()),
            x: random.elements(tokens * width),
            weight: random.elements(vocab_size * width),
            teacher,
            teachers_x: random.elements(tokens * teachers_width),
            teachers_weight: random.elements(vocab_size * teachers_width),
            targets: Vec::new(),
            scales: [SCALE, TEACHER_SCALE],
            before: [2.0, 3.0],
        }
    }

    pub fn rows<B: Backend>(&self, divided: &Option<Divided<'_, B>>) -> VocabularyRows {
        let (rank, ranks) = divided.map_or((0, 1), |(rank, ranks, _)| (rank, ranks));
        VocabularyRows::of_rank(self.shape.vocab_size, rank, ranks)
    }

    /// Returns the losses. With a weight gradient to add to or to overwrite, also returns the gradients. A weight without
    /// elements of its gradient is frozen.
    pub fn run<B: Backend, G: Element>(
        &self,
        device: &B,
        divided: Option<Divided<'_, B>>,
        gradients: Option<(&[G], Accumulation)>,
    ) -> Result<Found<T, G>> {
        let HeadShape { tokens, width, has_teacher, .. } = self.shape;
        let (rows, ranks) = (self.rows(&divided), divided.map_or(1, |(_, ranks, _)| ranks));
        let shape = HeadShape::of_rows(tokens, width, rows, ranks).with_teacher(has_teacher);
        let part = |weight: &[T], width: usize| {
            upload(device, &weight[rows.first * width..(rows.first + rows.count) * width])
        };
        let teachers_width = self.teacher.map_or(0, |teacher| teacher.width);
        let [x, teachers_x] = [&self.x, &self.teachers_x].map(|elements| upload(device, elements));
        let weight = part(&self.weight, width);
        let teachers_weight = part(&self.teachers_weight, teachers_width);
        let targets = upload(device, &self.targets);
        let mut scratch = garbage::<B, f32>(device, device.cross_entropy_scratch(&shape));
        let mut sums = upload(device, &vec![7f64; device.cross_entropy_sums(&shape, ranks)]);
        let before = &self.before[..if has_teacher { 2 } else { 1 }];
        let mut loss = upload(device, before);
        let mut d_x = garbage::<B, T>(device, self.x.len());
        let mut d_weight = upload(device, gradients.map_or(&[][..], |(before, _)| before));
        device.cross_entropy(CrossEntropyArgs {
            shape,
            x: B::whole(&x),
            weight: B::whole(&weight),
            targets: B::whole(&targets),
            scratch: B::whole_mut(&mut scratch),
            loss: B::whole_mut(&mut loss),
            teacher: self.teacher.map(|Teacher { width, rows, temperature }| HeadTeacher {
                width,
                x: B::whole(&teachers_x),
                weight: B::whole(&teachers_weight),
                rows,
                temperature,
                scale: self.scales[1],
            }),
            gradients: gradients.map(|(before, accumulation)| HeadGradients {
                scale: self.scales[0],
                d_x: B::whole_mut(&mut d_x),
                d_weight: (!before.is_empty()).then(|| B::whole_mut::<G>(&mut d_weight)),
                accumulation,
            }),
            ranks: divided.map(|(rank, ranks, all_reduce)| HeadRanks {
                rows,
                rank,
                ranks,
                sums: B::whole_mut(&mut sums),
                all_reduce,
            }),
        })?;
        let found = download::<B, f64>(device, &loss);
        let losses = found.iter().zip(before).map(|(found, before)| found - before).collect();
        Ok((losses, download::<B, T>(device, &d_x), download::<B, G>(device, &d_weight)))
    }
}

fn agrees<B: Backend, T: Element, G: Element>(
    device: &B,
    shape: HeadShape,
    teacher: Option<Teacher>,
    seed: u64,
) {
    let HeadShape { tokens, width, vocab_size, .. } = shape;
    let mut random = Random(seed);
    let head = Head::<T>::without_targets(shape, teacher, &mut random);
    let before: Vec<G> = random.elements(head.weight.len());
    let head = head.with_targets(&mut random);
    let run = |gradients| head.run::<_, G>(device, None, gradients).unwrap();
    let (loss_alone, ..) = run(None);
    let (losses, d_x, d_weight) = run(Some((&before, Accumulation::Add)));
    let garbage = vec![G::from_f32(777.0); before.len()];
    let (_, _, alone) = run(Some((&garbage, Accumulation::Overwrite)));
    assert_eq!(losses, loss_alone, "the losses do not depend on whether gradients are wanted");

    let (x, weight) = (var(&head.x, (tokens, width)), var(&head.weight, (vocab_size, width)));
    let cross_entropy = operators::cross_entropy(&x, &weight, &head.targets).unwrap();
    let scaled = |loss: &candle_core::Tensor, scale: f32| (loss * f64::from(scale)).unwrap();
    let mut total = scaled(&cross_entropy, SCALE);
    // A device may round the logits to the type of x; most of the errors cancel in the sum over
    // tokens. A divergence sums positive and negative terms of order 1. A cross-entropy does not.
    let is_bf16 = T::DTYPE == DType::BF16;
    let mut expected = vec![("cross-entropy", cross_entropy, 0.0, 1e-4)];
    // A machine that multiplies bf16 also rounds the logits' gradients to the type of x once.
    let mut gradient_tolerance = tolerance::<T>();
    if let Some(Teacher { width, rows, temperature }) = teacher {
        let teachers_x = tensor(&head.teachers_x, (tokens, width));
        let teachers_weight = tensor(&head.teachers_weight, (vocab_size, width));
        let teachers = operators::linear(&teachers_x, &teachers_weight).unwrap();
        let students = operators::linear(&x, &weight).unwrap();
        let temperature = f64::from(temperature);
        let distillation =
            operators::distillation(&students, &teachers, &head.targets, rows, temperature)
                .unwrap();
        total = (total + scaled(&distillation, TEACHER_SCALE)).unwrap();
        expected[0].3 = BF16_LOSS;
        expected.push(("distillation", distillation, 1.0, 2.0 * BF16_LOSS));
        gradient_tolerance = if is_bf16 { BF16_LOGITS } else { F32_TOLERANCE };
    }
    let gradients = total.backward().unwrap();
    for ((what, expected, terms, tolerance), loss) in expected.into_iter().zip(losses) {
        let tolerance = if is_bf16 { tolerance } else { F32_TOLERANCE };
        let expected = flat(&expected.unsqueeze(0).unwrap());
        assert_sums_close(what, &[loss as f32], &expected, terms, tolerance);
    }
    let rows = d_x.chunks(width).zip(&head.targets);
    let mut ignored = rows.filter(|(_, target)| **target == IGNORED);
    let is_zero = ignored.all(|(row, _)| row.iter().all(|value| value.to_f32() == 0.0));
    assert!(is_zero, "the gradient of a token without a target is exactly 0");
    assert_close("d_x", &d_x, &gradient(&gradients, &x), gradient_tolerance);
    let expected = gradient(&gradients, &weight);
    let rounded = gradient_tolerance.max(tolerance::<G>());
    assert_close("d_weight alone", &alone, &expected, rounded);
    assert_close("d_weight", &d_weight, &added(&before, &expected), rounded);
}

#[test]
fn a_frozen_weight_changes_neither_the_losses_nor_the_gradient_of_x() {
    fn check<B: Backend, T: Element>(device: &B) {
        let shape = HeadShape::whole(45, 24, 70);
        let head = Head::<T>::new(shape, None, &mut Random(8));
        let d_weight = vec![0f32; head.weight.len()];
        let run = |gradient: &[f32]| {
            head.run(device, None, Some((gradient, Accumulation::Overwrite))).unwrap()
        };
        let ((losses, d_x, _), (frozen_losses, frozen_d_x, none)) = (run(&d_weight), run(&[]));
        assert!(losses == frozen_losses && d_x == frozen_d_x && none.is_empty());
    }
    on_each_device!(device, T => check::<_, T>(device));
}

#[test]
fn losses_and_gradients_agree_over_more_than_one_chunk() {
    // A chunk has at most 2048 tokens.
    let shape = HeadShape::whole(2100, 24, 40);
    for teacher in [None, Some(Teacher { width: 24, rows: 40, temperature: 1.0 })] {
        on_each_device!(device, T => agrees::<_, T, f32>(device, shape, teacher, 1));
        on_each_device!(device => agrees::<_, bf16, bf16>(device, shape, teacher, 1));
    }
}

#[test]
fn rows_that_a_block_reads_in_several_rounds_agree() {
    // A block of a GPU reads 2048 bf16 elements per iteration with aligned reads of 16 bytes.
    for vocab_size in [2600, 2603] {
        let shape = HeadShape::whole(3, 8, vocab_size);
        on_each_device!(device, T => agrees::<_, T, f32>(device, shape, None, 2));
    }
}

#[test]
fn distributions_over_a_part_of_the_rows_agree() {
    // Blocks of 1024 rows: no row, a part, or all rows of the last block are compared.
    for (vocab_size, rows) in [(2600, 2048), (2603, 2100), (2600, 7), (2603, 2603), (1030, 1)] {
        let shape = HeadShape::whole(5, 8, vocab_size);
        let teacher = Some(Teacher { width: 11, rows, temperature: 2.0 });
        on_each_device!(device, T => agrees::<_, T, f32>(device, shape, teacher, 2));
    }
}

/// Returns a head with this weight and inputs of ones, without a teacher.
fn of_ones(tokens: usize, width: usize, weight: Vec<f32>) -> Head<f32> {
    Head {
        shape: HeadShape::whole(tokens, width, weight.len() / width),
        x: vec![1.0; tokens * width],
        weight,
        targets: vec![0; tokens],
        teacher: None,
        teachers_x: Vec::new(),
        teachers_weight: Vec::new(),
        scales: [1.0; 2],
        before: [0.0; 2],
    }
}

#[test]
fn a_vocabulary_that_fills_the_scratch_makes_chunks_of_fewer_tokens() {
    let mut head = of_ones(23, 2, vec![0.0; 6 << 20]);
    let vocab_size = head.shape.vocab_size;
    assert_eq!(Cpu.cross_entropy_scratch(&head.shape) / vocab_size, 21);
    // All logits are 0, so every token's loss is the logarithm of the vocabulary.
    head.targets = (0..23).map(|i| if i == 1 { IGNORED } else { i }).collect();
    let (loss, ..) = head.run::<_, f32>(&Cpu, None, None).unwrap();
    let expected = 22.0 * (vocab_size as f64).ln();
    assert!((loss[0] / expected - 1.0).abs() < F32_TOLERANCE, "{} is not {expected}", loss[0]);
}

#[test]
fn a_head_that_caches_hold_has_smaller_chunks() {
    let tokens_at_once = |width, vocab_size| {
        let shape = HeadShape::whole(1000, width, vocab_size);
        // For each token: logits, the gradient of its input, three numbers for the first 1024 logits, and
        // two for each following 1024.
        let of_a_token = vocab_size + width + 2 * vocab_size.div_ceil(1024) + 1;
        assert_eq!(Cpu.cross_entropy_scratch(&shape) % of_a_token, 0);
        Cpu.cross_entropy_scratch(&shape) / of_a_token
    };
    assert_eq!(tokens_at_once(512, 4096), 256);
    assert_eq!(tokens_at_once(512, 3000), 349);
    assert_eq!(tokens_at_once(64, 512), 512);
    assert_eq!(tokens_at_once(2048, 4096), 512);
}

#[test]
fn ignored_targets_have_neither_loss_nor_gradient() {
    let mut head = of_ones(3, 2, vec![0.5; 10]);
    head.targets = vec![IGNORED; 3];
    let found = head.run(&Cpu, None, Some((&[1f32; 10], Accumulation::Add))).unwrap();
    assert_eq!(found, (vec![0.0], vec![0.0; 6], vec![1.0; 10]));
}

#[test]
fn a_target_without_a_row_is_refused() {
    let mut head = of_ones(1, 1, vec![0.0; 5]);
    head.targets = vec![5];
    let refused = head.run::<_, f32>(&Cpu, None, None).unwrap_err().to_string();
    assert_eq!(refused, "token id 5 is outside the vocabulary of 5");
}

/// Returns a head of one token and width 1, with a teacher. Only the teacher's loss has a gradient.
fn with_teacher(weight: &[f32], teachers: &[f32], temperature: f32) -> Head<f32> {
    let head = of_ones(1, 1, weight.to_vec());
    Head {
        shape: head.shape.with_teacher(true),
        teacher: Some(Teacher { width: 1, rows: weight.len(), temperature }),
        teachers_x: vec![1.0],
        teachers_weight: teachers.to_vec(),
        scales: [0.0, 1.0],
        ..head
    }
}

fn losses(head: &Head<f32>) -> (Vec<f64>, f32) {
    let before = vec![777f32; head.weight.len()];
    let found = head.run(&Cpu, None, Some((&before, Accumulation::Overwrite))).unwrap();
    (found.0, found.1[0])
}

#[test]
fn a_student_that_is_its_teacher_has_no_loss_and_no_gradient() {
    let weight: Vec<f32> = (0..1500).map(|row| (row % 97) as f32 / 7.0).collect();
    let (loss, d_x) = losses(&with_teacher(&weight, &weight, 3.0));
    assert_eq!((loss[1], d_x), (0.0, 0.0));
}

#[test]
fn logits_far_apart_have_the_loss_of_their_differences() {
    // Logits that differ by a constant are the same distribution: the loss is only the rounding error.
    let weight: Vec<f32> = (0..1500).map(|row| (row % 97) as f32 / 8.0).collect();
    let moved: Vec<f32> = weight.iter().map(|logit| logit + 512.0).collect();
    let (loss, _) = losses(&with_teacher(&weight, &moved, 1.0));
    assert!(loss[1].abs() < 1e-6, "{loss:?}");
    // The teacher is certain of a token with probability exp(-40) in the student's distribution: its loss is 40.
    let (loss, _) = losses(&with_teacher(&[0.0, 40.0], &[60.0, 0.0], 1.0));
    assert!((loss[1] - 40.0).abs() < 1e-5, "{loss:?}");
}

#[test]
fn a_teacher_that_does_not_fit_the_head_is_refused() {
    let refusal = |has_teacher: bool, rows: usize, temperature: f32| {
        let head = with_teacher(&[1.0; 3], &[1.0; 3], temperature);
        let (shape, teacher) = (head.shape.with_teacher(has_teacher), head.teacher);
        let teacher = teacher.map(|teacher| Teacher { rows, ..teacher });
        let head = Head { shape, teacher, ..head };
        head.run::<_, f32>(&Cpu, None, None).unwrap_err().to_string()
    };
    assert!(refusal(false, 3, 1.0).contains("a shape with a teacher needs one"));
    assert!(refusal(true, 0, 1.0).contains("the teacher's head is empty"));
    for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let refusal = refusal(true, 3, temperature);
        assert!(refusal.contains("expected a positive number"), "{refusal}");
    }
}

proptest! {
    #![proptest_config(cases(96))]
    #[test]
    fn any_shape_agrees(
        tokens in 1usize..50,
        width in 1usize..40,
        teachers_width in 1usize..40,
        (vocab_size, rows) in (1usize..70).prop_flat_map(|vocab_size| (Just(vocab_size), 1..=vocab_size)),
        temperature in prop_oneof![Just(1f32), Just(2.0), Just(0.5)],
        has_teacher: bool,
        seed: u64,
    ) {
        let shape = HeadShape::whole(tokens, width, vocab_size);
        let teacher =
            has_teacher.then_some(Teacher { width: teachers_width, rows, temperature });
        on_each_device!(device => agrees::<_, f32, f32>(device, shape, teacher, seed));
    }
}
