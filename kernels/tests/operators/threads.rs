//! Results have the same bits for any number of rayon's threads.

use crate::cross_entropy::{Head, Teacher};
use crate::embedding;
use crate::reference::attention::{Case, Inputs, run};
use crate::reference::{Random, STEP, cases, first_shared, qkv_shapes, shared, wide};
use half::bf16;
use moh_kernels::adamw::{AdamW, AdamWUpdate, Optimizer};
use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::linear::{Linear, LinearBackwardInput, LinearBackwardWeight, LinearForward};
use moh_kernels::qk_norm::{QkNorm, QkNormBackward, QkNormForward};
use moh_kernels::ranks::VocabularyRows;
use moh_kernels::rms_norm::{RmsNorm, RmsNormBackward, RmsNormForward};
use moh_kernels::router::query_norm::QueryNormRouter;
use moh_kernels::swiglu::Swiglu;
use moh_kernels::{Accumulation, Cpu, Element, QkvShape};
use proptest::prelude::*;

/// Runs `body` on pools of one, two and five threads and asserts equal results.
fn same_bits(body: impl Fn() -> Vec<f64> + Sync) {
    let [one, two, five] = [1, 2, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(&body)
    });
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&one) == bits(&two), "one and two threads differ");
    assert!(bits(&one) == bits(&five), "one and five threads differ");
}

/// Returns all elements of several buffers; f32 is exact in f64.
fn all(buffers: &[&[f32]]) -> Vec<f64> {
    buffers.iter().flat_map(|buffer| wide(buffer)).collect()
}

fn attention<T: Element>(shape: QkvShape, router: QueryNormRouter, seed: u64) -> Vec<f64> {
    let case = Case { router: Some(router), whole: true, ..Case::dense(shape) };
    let found = run(&Cpu, &case, &Inputs::<T>::new(&case, seed));
    let statistics = all(&[&found.log_sum_exp, &found.delta, &found.gates]);
    [wide(&found.out), wide(&found.d_qkv), statistics, vec![found.balance_loss]].concat()
}

fn qk_norm<T: Element>(shape: QkvShape, seed: u64) -> Vec<f64> {
    let (mut random, eps) = (Random(seed), 1e-6);
    let qkv: Vec<T> = random.elements(shape.tokens() * shape.row());
    let weight: Vec<T> = random.elements(2 * shape.head_dim);
    let (mut normed, mut d_weight) = (qkv.clone(), vec![0f32; weight.len()]);
    let (shape, qkv, weight) = (&shape, &qkv[..], &weight[..]);
    let args = QkNormForward::<Cpu, T> { shape, eps, qkv, weight, normed: &mut normed };
    Cpu.qk_norm_forward(args).unwrap();
    let mut d_qkv = normed.clone();
    {
        let (d_qkv, d_weight) = (&mut d_qkv[..], &mut d_weight[..]);
        let args = QkNormBackward::<Cpu, T, f32> { shape, eps, qkv, weight, d_qkv, d_weight };
        Cpu.qk_norm_backward(args).unwrap();
    }
    [wide(&normed), wide(&d_qkv), all(&[&d_weight])].concat()
}

/// Returns the results of the operators over rows of tokens, and of the optimiser.
fn rows<T: Element>(tokens: usize, width: usize, outputs: usize, seed: u64) -> Vec<f64> {
    let mut random = Random(seed);
    let x: Vec<T> = random.elements(tokens * width);
    let scale: Vec<T> = random.elements(width);
    let weight: Vec<T> = random.elements(outputs * width);
    let ids: Vec<u32> = (0..tokens).map(|_| random.below(outputs) as u32).collect();
    let (mut y, mut inv_rms) = (x.clone(), vec![0f32; tokens]);
    let forward = RmsNormForward::<Cpu, T> {
        eps: 1e-5,
        x: &x,
        weight: &scale,
        y: &mut y,
        inv_rms: &mut inv_rms,
    };
    Cpu.rms_norm_forward(forward).unwrap();
    let (mut d_x, mut d_scale) = (y.clone(), vec![0f32; width]);
    let backward = RmsNormBackward::<Cpu, T, f32> {
        x: &x,
        weight: &scale,
        inv_rms: &inv_rms,
        d_y: &y,
        d_x: &mut d_x,
        d_weight: &mut d_scale,
    };
    Cpu.rms_norm_backward(backward).unwrap();

    let mut product = vec![T::zeroed(); tokens * outputs];
    let inputs = width;
    let forward = LinearForward::<Cpu, T>::new(inputs, &y, &weight, &mut product);
    Cpu.linear_forward(forward).unwrap();
    let mut d_weight = vec![0f32; weight.len()];
    let backward = LinearBackwardWeight::<Cpu, T, f32> {
        inputs,
        x: &y,
        d_y: &product,
        d_weight: &mut d_weight,
        accumulation: Accumulation::Add,
    };
    Cpu.linear_backward_weight(backward).unwrap();
    let mut d_y = y.clone();
    let backward = LinearBackwardInput::<Cpu, T> {
        inputs,
        d_y: &product,
        weight: &weight,
        d_x: &mut d_y,
        accumulation: Accumulation::Overwrite,
    };
    Cpu.linear_backward_input(backward).unwrap();

    let gate_up: Vec<T> = x.iter().chain(&y).copied().collect();
    let (mut silu, mut d_gate_up) = (y.clone(), gate_up.clone());
    Cpu.swiglu_forward(width, &gate_up, &mut silu).unwrap();
    Cpu.swiglu_backward(width, &mut d_gate_up, &mut silu.clone()).unwrap();

    let (shape, mut losses) = (HeadShape::whole(tokens, width, outputs), Vec::new());
    let teacher = Teacher { width, rows: outputs, temperature: 2.0 };
    for teacher in [None, Some(teacher)] {
        let head = Head::<T>::new(shape, teacher, &mut random);
        let gradients = Some((&d_weight[..], Accumulation::Add));
        let (found, d_hidden, added) = head.run(&Cpu, None, gradients).unwrap();
        losses.extend([found, wide(&d_hidden)].concat());
        d_weight = added;
    }
    let all_rows = VocabularyRows::all(outputs);
    let (embedded, d_table) = embedding::run(&Cpu, all_rows, &ids, &weight, &d_x, &d_weight);
    let (norm, updated, [m, v]) = update(&weight, &d_table);
    let stored = [&y, &d_x, &product, &d_y, &silu, &d_gate_up, &embedded, &updated];
    let stored = stored.iter().flat_map(|elements| wide(elements)).collect();
    [stored, all(&[&inv_rms, &d_scale, &d_table, &m, &v]), losses, vec![norm]].concat()
}

/// Returns the squared norm of the gradients, and a step of AdamW: weights and both moments.
fn update<T: Element>(weights: &[T], gradients: &[f32]) -> (f64, Vec<T>, [Vec<f32>; 2]) {
    let mut norm = [0f64];
    Cpu.squared_norms(&[gradients], &mut norm).unwrap();
    let step = AdamW { grad_norm: norm[0].sqrt(), step: 3, ..STEP };
    let (mut updated, zeros) = (weights.to_vec(), vec![0f32; weights.len()]);
    let [mut m, mut v] = [zeros.clone(), zeros];
    let args = AdamWUpdate::<Cpu, T, f32, f32> {
        step: &step,
        gradients,
        weights: &mut updated,
        remainder: None,
        first_moment: &mut m,
        second_moment: &mut v,
    };
    Cpu.adamw(args).unwrap();
    (norm[0], updated, [m, v])
}

#[test]
fn large_shapes_have_the_same_bits_with_any_number_of_threads() {
    same_bits(|| rows::<f32>(1100, 64, 300, 1));
    same_bits(|| rows::<bf16>(1100, 64, 300, 1));
    // One token, a few, and a number that does not divide evenly into tasks.
    for (tokens, outputs) in [(1, 1500), (7, 1500), (50, 1500), (50, 100)] {
        same_bits(|| rows::<f32>(tokens, 300, outputs, 1));
        same_bits(|| rows::<bf16>(tokens, 300, outputs, 1));
    }
    let shape = QkvShape { batch: 2, length: 100, heads: 8, kv_heads: 4, head_dim: 64 };
    let router = first_shared(2, 3);
    same_bits(|| attention::<f32>(shape, router, 1));
    same_bits(|| attention::<bf16>(shape, router, 1));
    same_bits(|| attention::<f32>(shape, shared([0, 3, 6], 2), 1));
    same_bits(|| qk_norm::<f32>(shape, 1));
    same_bits(|| qk_norm::<bf16>(shape, 1));
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn rows_have_the_same_bits_with_any_number_of_threads(
        tokens in 1usize..150,
        width in 1usize..40,
        outputs in 1usize..90,
        seed: u64,
    ) {
        same_bits(|| rows::<f32>(tokens, width, outputs, seed));
    }

    #[test]
    fn attention_has_the_same_bits_with_one_and_two_threads(
        shape in qkv_shapes(1usize..3, 1usize..80, 2usize..4, 1usize..40),
        seed: u64,
    ) {
        let router = first_shared(shape.heads - 2, 1);
        same_bits(|| attention::<f32>(shape, router, seed));
    }
}
