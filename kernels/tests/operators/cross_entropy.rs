//! The fused output head and cross-entropy against its reference: loss and both gradients, with
//! ignored targets and over more than one chunk of tokens.

use crate::reference::{
    F32_TOLERANCE, Random, added, assert_close, cases, download, flat, garbage, gradient,
    operators, tolerance, upload, var,
};
use half::bf16;
use moh_kernels::cross_entropy::{
    CrossEntropy, CrossEntropyArgs, HeadGradients, HeadShape, IGNORED,
};
use moh_kernels::{Accumulation, Backend, Cpu, DType, Element, Workspace};

/// Exact in f32, so that the reference scales by the same value.
const SCALE: f32 = 0.25;

fn agrees<B: Backend, T: Element, G: Element>(device: &B, shape: HeadShape, seed: u64) {
    let HeadShape { tokens, width, vocab_size, .. } = shape;
    let mut random = Random(seed);
    let x: Vec<T> = random.elements(tokens * width);
    let weight: Vec<T> = random.elements(vocab_size * width);
    let d_weight: Vec<G> = random.elements(weight.len());
    let targets: Vec<u32> = (0..tokens)
        .map(|_| if random.below(4) == 0 { IGNORED } else { random.below(vocab_size) as u32 })
        .collect();

    let (x_buffer, weight_buffer) = (upload(device, &x), upload(device, &weight));
    let target_buffer = upload(device, &targets);
    let mut scratch = garbage::<B, f32>(device, device.cross_entropy_scratch(&shape));
    let mut d_x = garbage::<B, T>(device, x.len());
    let mut d_weight_out = upload(device, &d_weight);
    let mut run = |d_weight: Option<(&mut B::Buffer<G>, Accumulation)>| {
        let mut loss = upload(device, &[2.0f64]);
        let gradients = d_weight.map(|(d_weight, accumulation)| HeadGradients {
            scale: SCALE,
            d_x: B::whole_mut(&mut d_x),
            d_weight: B::whole_mut(d_weight),
            accumulation,
        });
        device
            .cross_entropy(CrossEntropyArgs {
                shape,
                x: B::whole(&x_buffer),
                weight: B::whole(&weight_buffer),
                targets: B::whole(&target_buffer),
                scratch: B::whole_mut(&mut scratch),
                loss: B::whole_mut(&mut loss),
                teacher: None,
                gradients,
                ranks: None,
            })
            .unwrap();
        download::<B, f64>(device, &loss)[0] - 2.0
    };
    let loss_alone = run(None);
    let loss = run(Some((&mut d_weight_out, Accumulation::Add)));
    let mut alone = garbage::<B, G>(device, weight.len());
    run(Some((&mut alone, Accumulation::Overwrite)));

    let (x, weight) = (var(&x, (tokens, width)), var(&weight, (vocab_size, width)));
    let expected = operators::cross_entropy(&x, &weight, &targets).unwrap();
    let gradients = (&expected * f64::from(SCALE)).unwrap().backward().unwrap();
    assert_eq!(loss, loss_alone, "the loss does not depend on whether gradients are wanted");
    // A device may round the logits to the type of x; most of the errors cancel in the sum over
    // tokens.
    let loss_tolerance = if T::DTYPE == DType::BF16 { 1e-4 } else { F32_TOLERANCE };
    assert_close("loss", &[loss as f32], &flat(&expected.unsqueeze(0).unwrap()), loss_tolerance);
    let expected = gradient(&gradients, &x);
    let d_x = download::<B, T>(device, &d_x);
    let rows = d_x.chunks(width).zip(&targets);
    let mut ignored = rows.filter(|(_, target)| **target == IGNORED);
    let is_zero = ignored.all(|(row, _)| row.iter().all(|value| value.to_f32() == 0.0));
    assert!(is_zero, "the gradient of a token without a target is exactly 0");
    assert_close("d_x", &d_x, &expected, tolerance::<T>());
    let expected = gradient(&gradients, &weight);
    // A machine that multiplies bf16 rounds the logits' gradients to the type of x, once.
    let rounded = tolerance::<T>().max(tolerance::<G>());
    assert_close("d_weight alone", &download::<B, G>(device, &alone), &expected, rounded);
    let expected = added(&d_weight, &expected);
    assert_close("d_weight", &download::<B, G>(device, &d_weight_out), &expected, rounded);
}

#[test]
fn loss_and_gradients_agree_over_more_than_one_chunk() {
    // A chunk has at most 2048 tokens.
    let shape = HeadShape::whole(2100, 24, 40);
    on_each_device!(device => agrees::<_, f32, f32>(device, shape, 1));
    on_each_device!(device => agrees::<_, bf16, f32>(device, shape, 1));
    on_each_device!(device => agrees::<_, bf16, bf16>(device, shape, 1));
}

#[test]
fn rows_that_a_block_reads_in_several_rounds_agree() {
    // A block of a GPU reads 2048 bf16 elements per iteration with aligned reads of 16 bytes.
    for vocab_size in [2600, 2603] {
        let shape = HeadShape::whole(3, 8, vocab_size);
        on_each_device!(device => agrees::<_, f32, f32>(device, shape, 2));
        on_each_device!(device => agrees::<_, bf16, f32>(device, shape, 2));
    }
}

#[test]
fn a_vocabulary_that_fills_the_scratch_makes_chunks_of_fewer_tokens() {
    let shape = HeadShape::whole(23, 2, 3 << 20);
    let mut scratch = vec![0f32; Cpu.cross_entropy_scratch(&shape)];
    assert_eq!(scratch.len() / shape.vocab_size, 21);
    // All logits are 0, so every token's loss is the logarithm of the vocabulary.
    let (x, weight) = (vec![0f32; 46], vec![0f32; 2 * shape.vocab_size]);
    let targets: Vec<u32> = (0..23).map(|i| if i == 1 { IGNORED } else { i }).collect();
    let mut loss = [0f64];
    let args = CrossEntropyArgs::<Cpu, f32, f32> {
        shape,
        x: &x,
        weight: &weight,
        targets: &targets,
        scratch: &mut scratch,
        loss: &mut loss,
        teacher: None,
        gradients: None,
        ranks: None,
    };
    Cpu.cross_entropy(args).unwrap();
    let expected = 22.0 * (shape.vocab_size as f64).ln();
    assert!((loss[0] / expected - 1.0).abs() < F32_TOLERANCE, "{} is not {expected}", loss[0]);
}

#[test]
fn a_head_that_caches_hold_has_smaller_chunks() {
    let tokens_at_once = |width, vocab_size| {
        let shape = HeadShape::whole(1000, width, vocab_size);
        // Of a token: logits, the gradient of its input, and three numbers for the first 1024 logits,
        // two for the next ones.
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
    let shape = HeadShape::whole(3, 2, 5);
    let mut scratch = vec![0f32; Cpu.cross_entropy_scratch(&shape)];
    let (mut loss, mut d_x, mut d_weight) = ([0f64], [9f32; 6], [1f32; 10]);
    let gradients = HeadGradients::<Cpu, f32, f32> {
        scale: 1.0,
        d_x: &mut d_x,
        d_weight: &mut d_weight,
        accumulation: Accumulation::Add,
    };
    let (x, weight, targets) = ([1f32; 6], [0.5f32; 10], [IGNORED; 3]);
    let args = CrossEntropyArgs::<Cpu, f32, f32> {
        shape,
        x: &x,
        weight: &weight,
        targets: &targets,
        scratch: &mut scratch,
        loss: &mut loss,
        teacher: None,
        gradients: Some(gradients),
        ranks: None,
    };
    Cpu.cross_entropy(args).unwrap();
    assert_eq!((loss, d_x, d_weight), ([0.0], [0.0; 6], [1.0; 10]));
}

#[test]
fn a_target_without_a_row_is_refused() {
    let shape = HeadShape::whole(1, 1, 5);
    let (mut scratch, mut loss) = (vec![0f32; Cpu.cross_entropy_scratch(&shape)], [0f64]);
    let args = CrossEntropyArgs::<Cpu, f32, f32> {
        shape,
        x: &[0.0],
        weight: &[0.0; 5],
        targets: &[5],
        scratch: &mut scratch,
        loss: &mut loss,
        teacher: None,
        gradients: None,
        ranks: None,
    };
    let refused = Cpu.cross_entropy(args);
    assert_eq!(refused.unwrap_err().to_string(), "token id 5 is outside the vocabulary of 5");
}

proptest::proptest! {
    #![proptest_config(cases(48))]
    #[test]
    fn any_shape_agrees(
        tokens in 1usize..50,
        width in 1usize..40,
        vocab_size in 1usize..70,
        seed: u64,
    ) {
        let shape = HeadShape::whole(tokens, width, vocab_size);
        on_each_device!(device => agrees::<_, f32, f32>(device, shape, seed));
    }
}
