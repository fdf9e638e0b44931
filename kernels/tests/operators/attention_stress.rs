//! Repeated runs of Hopper's attention at the size of LLaMA-3-8B against the path for any GPU. With
//! small shapes a block has at most one tile of rows, and races do not appear.

#![cfg(feature = "cuda")]

use half::bf16;
use moh_kernels::{AttentionPath, Cuda, QkvShape};

use crate::reference::attention::{Case, Inputs, Prepared, Results, documents};
use crate::reference::{BF16_TOLERANCE, F32_TOLERANCE, Random, assert_close, columns, gpu, wide};

const SHAPE: QkvShape = QkvShape { batch: 1, length: 8192, heads: 32, kv_heads: 8, head_dim: 128 };
/// Runs with identical bits.
const REPEATS: usize = 50;
/// Runs with sums in any order.
const UNORDERED: usize = 5;

#[test]
fn dense() {
    stress(&Case::dense(SHAPE), |_, _| ());
}

#[test]
fn three_quarters_of_the_heads() {
    stress(&Case::routed(SHAPE, 16, 8), |_, _| ());
}

#[test]
fn half_of_the_heads() {
    stress(&Case::routed(SHAPE, 8, 8), |_, _| ());
}

/// The last third of the tokens selects only the heads of two key/value heads; earlier tokens also
/// select heads of other key/value heads.
#[test]
fn skewed_routing() {
    stress(&Case::routed(SHAPE, 16, 8), |token, row| {
        let large = if token > 5431 { 16..24 } else { 16 + token % 3..25 };
        for query in &mut row[large.start * SHAPE.head_dim..large.end * SHAPE.head_dim] {
            *query *= bf16::from_f32(4.0);
        }
    });
}

#[test]
fn within_documents() {
    let document_start = Some(documents(&SHAPE, &mut Random(21), 700));
    stress(&Case { document_start, ..Case::routed(SHAPE, 16, 8) }, |_, _| ());
}

/// Several sequences, more than fit one launch of the backward pass.
#[test]
fn several_sequences() {
    let shape = QkvShape { batch: 5, length: 2048, ..SHAPE };
    stress(&Case { weighted: true, ..Case::routed(shape, 16, 8) }, |_, _| ());
}

#[test]
fn heads_of_64() {
    stress(&Case::routed(QkvShape { head_dim: 64, ..SHAPE }, 16, 8), |_, _| ());
}

/// Compares the paths on random elements; `change` may alter each row.
fn stress(case: &Case, change: impl Fn(usize, &mut [bf16])) {
    let Some(gpu) = gpu().filter(|gpu| gpu.has_attention(AttentionPath::Hopper)) else {
        return println!("skipped: no Hopper GPU");
    };
    let mut inputs = Inputs::<bf16>::new(case, 20);
    inputs.qkv.chunks_exact_mut(case.shape.row()).enumerate().for_each(|(at, row)| change(at, row));

    let tiled = gpu.clone().with_attention(AttentionPath::Tiled);
    let expected = pass(&mut Prepared::new(&tiled, case, &inputs, None));
    assert_eq!(tiled.attention_path(), Some(AttentionPath::Tiled));

    let hopper = gpu.with_attention(AttentionPath::Hopper);
    let ordered = hopper.clone().with_deterministic(true);
    let mut prepared = Prepared::new(&ordered, case, &inputs, None);
    let first = pass(&mut prepared);
    agree(case, &first, &expected);
    for repeat in 1..REPEATS {
        assert!(same_bits(&pass(&mut prepared), &first), "repeat {repeat} has other bits");
    }
    assert_eq!(ordered.attention_path(), Some(AttentionPath::Hopper));

    let unordered = hopper.with_deterministic(false);
    let mut prepared = Prepared::new(&unordered, case, &inputs, None);
    for _ in 0..UNORDERED {
        agree(case, &pass(&mut prepared), &expected);
    }
}

fn pass(prepared: &mut Prepared<'_, Cuda, bf16>) -> Results<bf16> {
    prepared.forward();
    prepared.backward();
    prepared.results()
}

/// Compares two paths. Both round their results. Other tests compare each path with the reference.
fn agree(case: &Case, actual: &Results<bf16>, expected: &Results<bf16>) {
    let stored = 2.0 * BF16_TOLERANCE;
    assert_close("out", &actual.out, &wide(&expected.out), stored);
    let sums = wide(&expected.log_sum_exp);
    assert_close("log_sum_exp", &actual.log_sum_exp, &sums, F32_TOLERANCE);
    assert_close("delta", &actual.delta, &wide(&expected.delta), stored);
    let QkvShape { heads, kv_heads, head_dim, .. } = case.shape;
    let (row, k) = (case.shape.row(), heads * head_dim);
    let v = k + kv_heads * head_dim;
    for (what, part) in [("d_q", 0..k), ("d_k", k..v), ("d_v", v..row)] {
        let [actual, expected] =
            [actual, expected].map(|results| columns(&results.d_qkv, row, part.clone()));
        assert_close(what, &actual, &wide(&expected), stored);
    }
}

fn same_bits(a: &Results<bf16>, b: &Results<bf16>) -> bool {
    fn same<S: bytemuck::NoUninit>(a: &[S], b: &[S]) -> bool {
        bytemuck::cast_slice::<S, u8>(a) == bytemuck::cast_slice::<S, u8>(b)
    }
    same(&a.out, &b.out)
        && same(&a.log_sum_exp, &b.log_sum_exp)
        && same(&a.delta, &b.delta)
        && same(&a.d_qkv, &b.d_qkv)
}
