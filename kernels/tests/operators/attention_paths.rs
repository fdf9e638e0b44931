//! Every path of attention on a GPU against the reference, on problems that it supports, and the
//! choice of the next path for other problems.

#![cfg(any(feature = "cuda", feature = "cuda-emulator"))]

use crate::reference::Random;
use crate::reference::attention::{Case, Inputs, agrees, agrees_on, cached, documents, run};
use crate::reference::operators::SCORE_FACTOR;
use half::bf16;
use moh_kernels::attention::AttentionShape;
use moh_kernels::{AttentionPath, Cuda, QkvShape};

/// Returns the GPUs of this build, emulated and real.
fn devices() -> impl Iterator<Item = Cuda> {
    #[cfg(feature = "cuda-emulator")]
    let emulated = Some(Cuda::emulated());
    #[cfg(not(feature = "cuda-emulator"))]
    let emulated = None;
    #[cfg(feature = "cuda")]
    let gpu = crate::reference::gpu();
    #[cfg(not(feature = "cuda"))]
    let gpu = None;
    [emulated, gpu].into_iter().flatten()
}

/// Compares all paths of a device with the reference, each selected by name.
fn each_agrees(case: &Case, seed: u64) {
    each_agrees_on(case, &Inputs::new(case, seed));
}

/// Compares like [`each_agrees`], with the caller's inputs.
fn each_agrees_on(case: &Case, inputs: &Inputs<bf16>) {
    for device in devices() {
        for path in ALL.into_iter().filter(|&path| device.has_attention(path)) {
            // Only the Hopper path is different without a fixed order of sums.
            let orders = if path == AttentionPath::Hopper { &[true, false][..] } else { &[true] };
            for &deterministic in orders {
                let device = device.clone().with_attention(path).with_deterministic(deterministic);
                println!("{path:?}, {deterministic}, on {device:?}: {:?}", case.shape);
                agrees_on(&device, case, inputs);
                assert_eq!(device.attention_path(), Some(path));
            }
        }
    }
}

const ALL: [AttentionPath; 3] = [AttentionPath::Hopper, AttentionPath::Tiled, AttentionPath::Plain];

/// A missing wait shows only in some orders of a block's threads and copies.
#[cfg(feature = "cuda-emulator")]
#[test]
fn threads_in_any_order_have_the_same_bits() {
    for head_dim in [64, 128] {
        let shape = QkvShape { length: 200, kv_heads: 1, ..shape(1, head_dim) };
        let document_start = Some(documents(&shape, &mut Random(24), 160));
        let case = Case { weighted: true, document_start, ..Case::routed(shape, 1, 2) };
        let inputs = Inputs::<bf16>::new(&case, 24);
        for path in [AttentionPath::Hopper, AttentionPath::Tiled] {
            let results = |seed| {
                let device = Cuda::emulated_with_schedule(seed).with_attention(path);
                let results = run(&device, &case, &inputs);
                assert_eq!(device.attention_path(), Some(path));
                (results.out, results.d_qkv)
            };
            let in_order = results(0);
            for seed in 1..=12 {
                assert!(results(seed) == in_order, "{path:?}, head_dim {head_dim}, seed {seed}");
            }
        }
    }
}

/// Returns a shape with several tiles of rows and of keys, the last tiles partial.
fn shape(batch: usize, head_dim: usize) -> QkvShape {
    QkvShape { batch, length: 150, heads: 4, kv_heads: 2, head_dim }
}

#[test]
fn every_path_of_dense_attention_agrees() {
    for (head_dim, causal) in [(64, true), (64, false), (128, true)] {
        let case = Case { causal, ..Case::dense(shape(1, head_dim)) };
        each_agrees(&case, 11);
    }
    each_agrees(&Case { weighted: true, ..Case::dense(shape(1, 64)) }, 11);
}

#[test]
fn every_path_of_selected_heads_within_documents_agrees() {
    for (head_dim, causal) in [(64, true), (128, true), (128, false)] {
        let shape = shape(2, head_dim);
        let document_start = Some(documents(&shape, &mut Random(12), 60));
        let case = Case { weighted: true, causal, document_start, ..Case::routed(shape, 1, 1) };
        each_agrees(&case, 12);
    }
}

#[test]
fn every_path_of_a_whole_moh_attention_agrees() {
    let shape = QkvShape { length: 70, ..shape(2, 64) };
    each_agrees(&Case { whole: true, ..Case::routed(shape, 1, 2) }, 13);
}

/// The gradients of key/value heads that no token selected are zero.
#[test]
fn every_path_leaves_heads_without_rows_alone() {
    let shape = QkvShape { batch: 2, length: 40, heads: 2, kv_heads: 2, head_dim: 64 };
    each_agrees(&Case::routed(shape, 0, 0), 14);
}

/// The last tokens select no query head of the second key/value head. Therefore its rows do not see
/// its last keys, and their number is not a multiple of a tile's.
#[test]
fn every_path_of_keys_that_no_row_of_their_head_sees_agrees() {
    for head_dim in [64, 128] {
        let shape = QkvShape { batch: 1, length: 300, heads: 4, kv_heads: 2, head_dim };
        let case = Case::routed(shape, 0, 2);
        let mut inputs = Inputs::<bf16>::new(&case, 19);
        for (token, row) in inputs.qkv.chunks_exact_mut(shape.row()).enumerate() {
            // The heads with the larger norms are selected.
            let kept = if token < 101 { 2..4 } else { 0..2 };
            for query in &mut row[kept.start * head_dim..kept.end * head_dim] {
                *query *= bf16::from_f32(4.0 / SCORE_FACTOR);
            }
        }
        each_agrees_on(&case, &inputs);
    }
}

/// More tokens than one block packs.
#[test]
fn every_path_of_several_packed_blocks_agrees() {
    let shape = QkvShape { batch: 2, length: 530, heads: 2, kv_heads: 1, head_dim: 64 };
    each_agrees(&Case::routed(shape, 0, 1), 22);
}

#[test]
fn every_path_of_queries_over_a_cache_agrees() {
    for head_dim in [64, 128] {
        let shape = QkvShape { length: 40, ..shape(2, head_dim) };
        let query_stride = 4 * head_dim + 8;
        let shape = AttentionShape { query_stride, ..AttentionShape::of_qkv(&shape, 170) };
        for device in devices() {
            for path in ALL.into_iter().filter(|&path| device.has_attention(path)) {
                let device = device.clone().with_attention(path);
                cached::<_, bf16>(&device, &shape, 120, None, 17);
                assert_eq!(device.attention_path(), Some(path));
                cached::<_, bf16>(&device, &shape, 120, Some(16), 17);
                assert_eq!(device.attention_path(), Some(path.max(AttentionPath::Tiled)));
            }
        }
    }
}

/// Heads of 128 have smaller tiles if a block has 99 KiB of shared memory, as on desktop GPUs.
#[test]
fn gpus_of_little_shared_memory_keep_their_tensor_cores() {
    for head_dim in [80, 128] {
        let shape = shape(2, head_dim);
        let document_start = Some(documents(&shape, &mut Random(18), 60));
        let case = Case { weighted: true, document_start, ..Case::routed(shape, 1, 1) };
        for device in devices() {
            let small = device.with_shared_bytes(99 << 10);
            agrees::<_, bf16>(&small, &case, 18);
            assert_eq!(small.attention_path(), Some(AttentionPath::Tiled));
            let smaller = small.with_shared_bytes(48 << 10);
            agrees::<_, bf16>(&smaller, &case, 18);
            assert_eq!(smaller.attention_path(), Some(AttentionPath::Plain));
        }
    }
}

#[test]
fn what_a_path_does_not_take_falls_to_the_next() {
    let path = |head_dim, first| {
        let case = Case::dense(QkvShape { length: 3, ..shape(1, head_dim) });
        let inputs = Inputs::<bf16>::new(&case, 15);
        devices().map(move |device| {
            let device = device.with_attention(first);
            run(&device, &case, &inputs);
            device.attention_path().unwrap()
        })
    };
    let [hopper, tiled, plain] = ALL;
    assert!(path(96, hopper).all(|path| path == tiled));
    assert!(path(160, hopper).all(|path| path == plain));
    assert!(path(160, tiled).all(|path| path == plain));
}

#[test]
fn sums_have_the_same_bits_in_every_run() {
    let case = Case::routed(shape(2, 64), 1, 1);
    let inputs = Inputs::<bf16>::new(&case, 16);
    for device in devices() {
        let [first, second] = [(); 2].map(|()| run(&device, &case, &inputs));
        assert!(first.d_qkv == second.d_qkv && first.out == second.out);
    }
}
