//! Attention against its reference: dense, routed, weighted, over documents, with a cache and by
//! block table; forward, all gradients, and a complete Mixture-of-Head attention.

use crate::reference::attention::{Case, Inputs, agrees, cached, documents, run};
use crate::reference::operators::{self, Packed};
use crate::reference::{
    F32_TOLERANCE, Random, assert_close, cases, first_shared, flat, qkv_shapes, routers_of_sets,
    shared, tensor, wide,
};
use candle_core::Tensor;
use moh_kernels::attention::{
    Attention, AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues,
    Selection,
};
use moh_kernels::{Backend, Cpu, Element, QkvShape};
use proptest::prelude::*;

/// Rows in several tiles of 64, all of them partial.
const SHAPE: QkvShape = QkvShape { batch: 2, length: 45, heads: 12, kv_heads: 3, head_dim: 16 };

#[test]
fn dense_attention_agrees() {
    for causal in [true, false] {
        for weighted in [false, true] {
            let case = Case { causal, weighted, ..Case::dense(SHAPE) };
            on_each_device!(device, T => agrees::<_, T>(device, &case, 1));
        }
    }
}

#[test]
fn attention_of_selected_heads_agrees() {
    for (shared_heads, top_k) in [(3, 5), (0, 2), (2, 0), (2, 10)] {
        for weighted in [false, true] {
            let case = Case { weighted, ..Case::routed(SHAPE, shared_heads, top_k) };
            on_each_device!(device, T => agrees::<_, T>(device, &case, 2));
        }
    }
}

#[test]
fn attention_within_documents_agrees() {
    let document_start = Some(documents(&SHAPE, &mut Random(3), 9));
    for causal in [true, false] {
        let case =
            Case { document_start: document_start.clone(), causal, ..Case::routed(SHAPE, 3, 5) };
        on_each_device!(device, T => agrees::<_, T>(device, &case, 3));
    }
}

/// Longer than a block of keys, and than several tiles of rows.
#[test]
fn attention_over_long_sequences_agrees() {
    let shape = QkvShape { batch: 1, length: 210, heads: 4, kv_heads: 2, head_dim: 24 };
    for mean_length in [20, 100, 1000] {
        let document_start = Some(documents(&shape, &mut Random(5), mean_length));
        for causal in [true, false] {
            let case = Case {
                document_start: document_start.clone(),
                causal,
                ..Case::routed(shape, 1, 2)
            };
            on_each_device!(device, T => agrees::<_, T>(device, &case, 5));
        }
    }
}

#[test]
fn a_whole_moh_attention_agrees_with_the_straight_through_gradient() {
    for (shared_heads, top_k) in [(3, 5), (0, 2), (4, 8)] {
        let case = Case { whole: true, ..Case::routed(SHAPE, shared_heads, top_k) };
        on_each_device!(device, T => agrees::<_, T>(device, &case, 4));
    }
}

/// Attention computes shared heads for every token, at any place.
#[test]
fn attention_of_any_set_of_shared_heads_agrees() {
    for (set, top_k) in [(&[0, 1, 4, 11][..], 3), (&[11], 2), (&[1, 3, 5, 7, 9, 11], 0)] {
        for (weighted, whole) in [(false, false), (true, false), (false, true)] {
            let router = Some(shared(set.iter().copied(), top_k));
            let case = Case { router, weighted, whole, ..Case::dense(SHAPE) };
            on_each_device!(device, T => agrees::<_, T>(device, &case, 6));
        }
    }
}

#[test]
fn backward_agrees_with_central_differences() {
    const NUDGE: f64 = 1e-5;
    let shape = QkvShape { batch: 1, length: 3, heads: 2, kv_heads: 1, head_dim: 4 };
    let case = Case::dense(shape);
    let inputs = Inputs::<f32>::new(&case, 5);
    let packed = Packed::new(&shape);
    let seen = operators::visibility((1, 3, 3), true, 0, None).unwrap();
    let d_out = tensor(&inputs.d_out, (1, 3, 2, 4));
    let nudged = |at: usize, by: f64| {
        let mut qkv = wide(&inputs.qkv);
        qkv[at] += by;
        let qkv = Tensor::from_vec(qkv, packed.dims(), &candle_core::Device::Cpu).unwrap();
        let [q, k, v] = packed.split(&qkv).unwrap();
        let (out, _) = operators::attention(&q, &k, &v, &seen).unwrap();
        (out * &d_out).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap()
    };
    let slope = |at| (nudged(at, NUDGE) - nudged(at, -NUDGE)) / (2.0 * NUDGE);
    let expected: Vec<f64> = (0..inputs.qkv.len()).map(slope).collect();
    on_each_device!(device => {
        let actual = run(device, &case, &inputs);
        assert_close("differences", &actual.d_qkv, &expected, F32_TOLERANCE)
    });
}

/// Compares new queries against cached keys and values with the reference, and the block table with contiguous keys.
fn cached_agrees<B: Backend, T: Element>(
    device: &B,
    shape: &AttentionShape,
    query_offset: usize,
    block_length: usize,
    seed: u64,
) {
    let contiguous = cached::<B, T>(device, shape, query_offset, None, seed);
    let by_table = cached::<B, T>(device, shape, query_offset, Some(block_length), seed);
    assert!(contiguous == by_table, "the block table changes the result");
}

#[test]
fn queries_at_an_offset_see_the_cache_contiguous_or_by_block_table() {
    let shape = QkvShape { batch: 3, length: 5, heads: 6, kv_heads: 2, head_dim: 8 };
    let shape = AttentionShape::of_qkv(&shape, 39);
    for block_length in [1, 7, 16, 64] {
        on_each_device!(device, T => cached_agrees::<_, T>(device, &shape, 31, block_length, 6));
    }
}

#[test]
fn one_query_sees_the_cache() {
    // Head dimensions of whole blocks of columns, of blocks and a remainder, and of less than a
    // block; all remainders of keys.
    for (head_dim, key_length) in [(8, 39), (48, 300), (22, 41), (6, 40), (2, 1)] {
        let shape = QkvShape { batch: 3, length: 1, heads: 6, kv_heads: 2, head_dim };
        let shape = AttentionShape::of_qkv(&shape, key_length);
        // With and without keys after the query.
        for offset in [key_length - 1, key_length / 2] {
            on_each_device!(device, T => cached_agrees::<_, T>(device, &shape, offset, 7, 8));
        }
    }
}

#[test]
fn the_last_token_alone_agrees_with_the_sequence() {
    let (length, heads, kv_heads, head_dim) = (70, 6, 2, 10);
    let shape = QkvShape { batch: 1, length, heads, kv_heads, head_dim };
    let (row, width) = (shape.row(), heads * head_dim);
    let shape = AttentionShape::of_qkv(&shape, length);
    let mut random = Random(3);
    let qkv = random.elements::<f32>(length * row);
    let weights = random.elements::<f32>(length * heads);
    let run = |tokens: usize| {
        let first = length - tokens;
        let shape = AttentionShape { query_length: tokens, ..shape };
        let document_start: Vec<u32> =
            (first..length).map(|token| token as u32 / 30 * 30).collect();
        let weights = Some(&weights[first * heads..]);
        let args = AttentionArgs::<Cpu> {
            query_offset: first,
            document_start: Some(&document_start),
            selection: Some(Selection::<Cpu> { shared_heads: heads, routed: &[], weights }),
            ..AttentionArgs::causal(shape)
        };
        let key_values = KeyValues::Contiguous {
            keys: &qkv[width..],
            values: &qkv[width + kv_heads * head_dim..],
            row_stride: row,
        };
        let (mut out, mut log_sum_exp) = (vec![0f32; tokens * width], vec![0f32; tokens * heads]);
        let forward = AttentionForward::<Cpu, f32> {
            args,
            queries: &qkv[first * row..],
            key_values,
            out: &mut out,
            log_sum_exp: &mut log_sum_exp,
        };
        Cpu.attention_forward(forward).unwrap();
        (out[(tokens - 1) * width..].to_vec(), log_sum_exp[(tokens - 1) * heads..].to_vec())
    };
    let ((out, sums), (all_out, all_sums)) = (run(1), run(length));
    assert_close("out", &out, &wide(&all_out), F32_TOLERANCE);
    assert_close("log_sum_exp", &sums, &wide(&all_sums), F32_TOLERANCE);
}

#[test]
fn a_sequence_of_no_token_is_no_work() {
    let attention = Case::dense(QkvShape { length: 0, ..SHAPE }).attention_shape();
    let backward = AttentionBackward::<Cpu, f32> {
        args: AttentionArgs::causal(attention),
        qkv: &[],
        out: &[],
        log_sum_exp: &[],
        d_out: &[],
        d_qkv: &mut [],
        delta: None,
    };
    assert_eq!(Cpu.attention_backward(backward), Ok(()));
}

#[test]
fn document_bounds_that_hide_every_key_or_decrease_are_refused() {
    let shape = QkvShape { batch: 1, length: 3, heads: 1, kv_heads: 1, head_dim: 2 };
    let attention = Case::dense(shape).attention_shape();
    let (qkv, mut out, mut log_sum_exp) = ([0f32; 18], [0f32; 6], [0f32; 3]);
    let mut forward = |document_start: &[u32]| {
        let document_start = Some(document_start);
        Cpu.attention_forward(AttentionForward::<Cpu, f32> {
            args: AttentionArgs { document_start, ..AttentionArgs::causal(attention) },
            queries: &qkv,
            key_values: KeyValues::Contiguous { keys: &qkv[2..], values: &qkv[4..], row_stride: 6 },
            out: &mut out,
            log_sum_exp: &mut log_sum_exp,
        })
    };
    assert_eq!(forward(&[0, 1, 1]), Ok(()));
    assert!(forward(&[0, 2, 2]).is_err());
    assert!(forward(&[0, 1, 0]).is_err());
    assert!(forward(&[0, 0, u32::MAX]).is_err());
}

/// Returns random shapes: one token, one head, one key/value head, any even head_dim, partial tiles.
fn shapes() -> impl Strategy<Value = QkvShape> {
    let length = prop_oneof![Just(1usize), 2usize..12, 12usize..80];
    let half = prop_oneof![Just(1usize), 1usize..=128, Just(128usize)];
    qkv_shapes(1usize..3, length, 1usize..5, half)
}

fn any_case() -> impl Strategy<Value = Case> {
    (shapes(), any::<[bool; 4]>(), 1usize..9, any::<[prop::sample::Index; 2]>()).prop_map(
        |(shape, [routed, weighted, causal, masked], mean_length, [first, second])| {
            let heads = shape.heads;
            let routed_heads = if routed && heads > 1 { 2 + first.index(heads - 1) } else { 0 };
            let router = (routed_heads > 0)
                .then(|| first_shared(heads - routed_heads, second.index(routed_heads + 1)));
            let mut random = Random(mean_length as u64);
            let document_start = masked.then(|| documents(&shape, &mut random, mean_length));
            Case { router, weighted, causal, document_start, ..Case::dense(shape) }
        },
    )
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn any_case_agrees(case in any_case(), seed: u64) {
        on_each_device!(device => agrees::<_, f32>(device, &case, seed));
    }

    #[test]
    fn any_set_of_shared_heads_agrees(
        (shape, router) in shapes()
            .prop_filter("heads to route", |shape| shape.heads > 1)
            .prop_flat_map(|shape| (Just(shape), routers_of_sets(shape.heads))),
        weighted: bool,
        seed: u64,
    ) {
        let case = Case { router: Some(router), weighted, ..Case::dense(shape) };
        on_each_device!(device => agrees::<_, f32>(device, &case, seed));
    }

    #[test]
    fn packed_rows_equal_a_mask_on_dense_attention(
        shape in shapes().prop_filter("heads to route", |shape| shape.heads > 1),
        choice: [prop::sample::Index; 2],
        seed: u64,
    ) {
        let shared_heads = choice[0].index(shape.heads - 1);
        let top_k = choice[1].index(shape.heads - shared_heads + 1);
        let (dense, routed) = (Case::dense(shape), Case::routed(shape, shared_heads, top_k));
        let inputs = Inputs::<f32>::new(&dense, seed);
        let packed = Packed::new(&shape);
        let queries = packed.queries(&tensor(&inputs.qkv, packed.dims())).unwrap();
        let mask = flat(&operators::selection(&queries, first_shared(shared_heads, top_k), 1).unwrap());
        on_each_device!(device => {
            let (dense, routed) = (run(device, &dense, &inputs), run(device, &routed, &inputs));
            let masked: Vec<f64> = (dense.out.iter().enumerate())
                .map(|(at, &x)| f64::from(x) * mask[at / shape.head_dim])
                .collect();
            assert_close("masked", &routed.out, &masked, F32_TOLERANCE);
        });
    }

    #[test]
    fn a_document_of_one_token_returns_its_value(shape in shapes(), seed: u64) {
        let positions = 0..shape.length as u32;
        let document_start = Some((0..shape.batch).flat_map(|_| positions.clone()).collect());
        let case = Case { document_start, ..Case::dense(shape) };
        let inputs = Inputs::<f32>::new(&case, seed);
        on_each_device!(device => {
            let out = run(device, &case, &inputs).out;
            let rows = inputs.qkv.chunks_exact(shape.row());
            for (out, row) in out.chunks_exact(shape.heads * shape.head_dim).zip(rows) {
                let values = &row[(shape.heads + shape.kv_heads) * shape.head_dim..];
                for (head, out) in out.chunks_exact(shape.head_dim).enumerate() {
                    let start = head / shape.group_size() * shape.head_dim;
                    prop_assert_eq!(out, &values[start..start + shape.head_dim]);
                }
            }
        });
    }

    #[test]
    fn any_cache_agrees(
        shape in shapes(),
        key_length in 1usize..60,
        block_length in 1usize..20,
        extra in 0usize..9,
        choice: prop::sample::Index,
        seed: u64,
    ) {
        let query_length = shape.length.min(key_length);
        let query_stride = shape.heads * shape.head_dim + extra;
        let query_offset = choice.index(key_length - query_length + 1);
        let shape = AttentionShape::of_qkv(&shape, key_length);
        let shape = AttentionShape { query_length, query_stride, ..shape };
        on_each_device!(device => {
            cached_agrees::<_, f32>(device, &shape, query_offset, block_length, seed)
        });
    }
}
