//! Operators with heads or vocabulary divided among ranks, simulated by threads, against the
//! same operators on one rank.

use std::sync::{Barrier, Mutex};

use crate::cross_entropy::{Divided, Head, Teacher};
use crate::embedding;
use crate::reference::attention::{Case, Inputs, run, run_of_rank};
use crate::reference::{
    Another, F32_TOLERANCE, Random, assert_close, cases, download, first_shared, garbage,
    routers_of_sets, shared, tolerance, upload, wide,
};
use half::bf16;
use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::ranks::{AllReduce, Heads, VocabularyRows};
use moh_kernels::rope::{QkvShape, RopeTable};
use moh_kernels::router::Routing;
use moh_kernels::router::query_norm::{QueryNorm, QueryNormForward, QueryNormRouter, Selects};
use moh_kernels::{Accumulation, Backend, Cpu, DType, Element, ViewMut};
use proptest::prelude::*;

/// Runs `work` on `count` ranks, each on its own device, and returns their results; tables are
/// summed on the host.
pub(crate) fn on_ranks<B: Backend + Another, R: Send>(
    device: &B,
    count: usize,
    work: impl Fn(&B, usize, AllReduce<'_, B>) -> R + Sync,
) -> Vec<R> {
    let (barrier, tables) = (&Barrier::new(count), &Mutex::new(vec![Vec::new(); count]));
    let rank = |rank| {
        let device = &device.another();
        let all_reduce = move |table: ViewMut<'_, B, f64>| {
            device.on_host::<f64>(table, |table| {
                tables.lock().unwrap()[rank] = table.to_vec();
                barrier.wait();
                for (at, sum) in table.iter_mut().enumerate() {
                    *sum = tables.lock().unwrap().iter().map(|table| table[at]).sum();
                }
                barrier.wait();
                Ok(())
            })
        };
        work(device, rank, &all_reduce)
    };
    std::thread::scope(|scope| {
        let start = |index| scope.spawn(move || rank(index));
        let threads: Vec<_> = (0..count).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns the elements of a rank's local heads in a row with `part` elements per head.
pub(crate) fn local_columns<S: Copy>(row: &[S], heads: Heads, part: usize) -> Vec<S> {
    let head = |local| row[heads.index(local) * part..][..part].iter().copied();
    (0..heads.local()).flat_map(head).collect()
}

/// Returns the packed queries, keys and values that are local to a rank.
fn local_qkv<T: Copy>(qkv: &[T], shape: &QkvShape, rank: usize, ranks: usize) -> Vec<T> {
    let &QkvShape { heads, kv_heads, head_dim, .. } = shape;
    let queries = Heads { count: heads, group_size: heads / kv_heads, rank, ranks };
    let keys = Heads { count: kv_heads, group_size: 1, rank, ranks };
    let rows = qkv.chunks_exact(shape.row()).flat_map(|row| {
        let (query, rest) = row.split_at(heads * head_dim);
        let (key, value) = rest.split_at(kv_heads * head_dim);
        let key_values = [key, value].map(|part| local_columns(part, keys, head_dim)).concat();
        [local_columns(query, queries, head_dim), key_values].concat()
    });
    rows.collect()
}

/// Checks that the attention of selected heads, forward and backward, has the same bits on `ranks` ranks as on one.
fn routing_agrees<B: Backend + Another, T: Element>(
    device: &B,
    shape: QkvShape,
    router: QueryNormRouter,
    ranks: usize,
    seed: u64,
) {
    let case = Case { router: Some(router), whole: true, ..Case::dense(shape) };
    let inputs = Inputs::<T>::new(&case, seed);
    let whole = run(device, &case, &inputs);

    let heads = |rank| Heads { rank, ranks, ..case.heads };
    let local = QkvShape { heads: shape.heads / ranks, kv_heads: shape.kv_heads / ranks, ..shape };
    let outputs = |elements: &[T], rank| -> Vec<T> {
        let rows = elements.chunks_exact(shape.heads * shape.head_dim);
        rows.flat_map(|row| local_columns(row, heads(rank), shape.head_dim)).collect()
    };
    let found = on_ranks(device, ranks, |device, rank, all_reduce| {
        let case = Case { shape: local, heads: heads(rank), ..case.clone() };
        let qkv = local_qkv(&inputs.qkv, &shape, rank, ranks);
        let inputs = Inputs { qkv, d_out: outputs(&inputs.d_out, rank), weights: Vec::new() };
        run_of_rank(device, &case, &inputs, Some(all_reduce))
    });
    for (rank, found) in found.into_iter().enumerate() {
        let same = |is: bool, what: &str| assert!(is, "rank {rank} of {ranks}: another {what}");
        same(found.mask == whole.mask, "selection");
        same(found.gates == whole.gates, "gate");
        same(found.balance_loss == whole.balance_loss, "balance loss");
        same(found.out == outputs(&whole.out, rank), "output");
        same(found.d_qkv == local_qkv(&whole.d_qkv, &shape, rank, ranks), "gradient");
    }
}

#[test]
fn ranks_select_the_same_heads_as_one_and_their_gradients_have_the_same_bits() {
    let shape = QkvShape { batch: 2, length: 70, heads: 12, kv_heads: 4, head_dim: 16 };
    for (selects, set, top_k) in [
        // Equal and unequal shares of shared heads, no shared heads, and ranks without routed heads.
        (Selects::Heads, &[0, 1, 2, 3, 4, 5][..], 3),
        (Selects::Heads, &[0, 1, 2, 3], 5),
        (Selects::Heads, &[], 3),
        (Selects::Heads, &[0, 1, 2, 3, 4, 5, 6, 7, 8], 2),
        (Selects::Heads, &[0, 1], 10),
        (Selects::Heads, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 0),
        // Shared heads of every rank, of one rank, and no shared heads before the first routed head.
        (Selects::Heads, &[0, 1, 5, 8, 10], 3),
        (Selects::Heads, &[11], 5),
        (Selects::Heads, &[1, 3, 5, 7, 9, 11], 0),
        (Selects::Heads, &[0, 3, 4, 5], 8),
        (Selects::Groups, &[3, 4, 5], 6),
        (Selects::Groups, &[], 3),
    ] {
        let router = QueryNormRouter { selects, ..shared(set.iter().copied(), top_k) };
        for ranks in [2, 4] {
            on_each_device!(device, T => routing_agrees::<_, T>(device, shape, router, ranks, 1));
        }
    }
}

#[test]
fn divided_heads_that_exchange_nothing_are_refused() {
    let router = first_shared(2, 1);
    let shape = QkvShape { batch: 1, length: 1, heads: 2, kv_heads: 1, head_dim: 2 };
    let heads = Heads { count: 4, group_size: 2, rank: 0, ranks: 2 };
    let mut routing = Routing::new(&Cpu, router.routing_shape(1, heads).unwrap()).unwrap();
    for rotates in [false, true] {
        let table = || RopeTable { cos: &[1.0][..], sin: &[0.0][..], first_position: 0 };
        let forward = QueryNormForward::<Cpu, f32> {
            router,
            shape: &shape,
            qkv: &mut [1f32; 8],
            rope: rotates.then(table),
            routing: &mut routing,
            all_reduce: None,
        };
        let refused = Cpu.query_norm_forward(forward);
        assert!(refused.unwrap_err().to_string().contains("divided among 2 ranks"));
    }
    let three = router.routing_shape(1, Heads { ranks: 3, ..heads }).unwrap();
    assert!(Routing::new(&Cpu, three).is_err());
}

fn embedding_agrees<B: Backend, T: Element>(device: &B, rows: usize, ranks: usize, seed: u64) {
    const WIDTH: usize = 5;
    let mut random = Random(seed);
    let table: Vec<T> = random.elements(rows * WIDTH);
    let ids: Vec<u32> = (0..40).map(|_| random.below(rows) as u32).collect();
    let d_out: Vec<T> = random.elements(ids.len() * WIDTH);
    let ones = vec![1f32; rows * WIDTH];
    let run = |local: VocabularyRows| {
        let (out, d_table) = embedding::run(device, local, &ids, &table, &d_out, &ones);
        (wide(&out), d_table)
    };
    let (out, d_table) = run(VocabularyRows::all(rows));
    let parts = (0..ranks).map(|rank| run(VocabularyRows::of_rank(rows, rank, ranks)));
    let (outs, d_tables): (Vec<_>, Vec<_>) = parts.unzip();
    let sum = |at| outs.iter().map(|out: &Vec<f64>| out[at]).sum::<f64>();
    assert_eq!((0..out.len()).map(sum).collect::<Vec<_>>(), out);
    assert_eq!(d_tables.concat(), d_table);
}

#[test]
fn rows_of_the_vocabulary_give_the_embedding_in_parts() {
    for (rows, ranks) in [(8, 2), (37, 3), (37, 4)] {
        on_each_device!(device, T => embedding_agrees::<_, T>(device, rows, ranks, 1));
    }
}

fn losses_agree<B: Backend + Another, T: Element>(
    device: &B,
    shape: HeadShape,
    compared: Option<usize>,
    ranks: usize,
    seed: u64,
) {
    let teacher = compared.map(|rows| Teacher { width: 5, rows, temperature: 1.5 });
    let head = Head::<T>::new(shape, teacher, &mut Random(seed));
    let before = vec![1f32; head.weight.len()];
    let run = |device: &B, divided: Option<Divided<'_, B>>| {
        let before = &before[..head.rows(&divided).count * shape.width];
        let (loss, ..) = head.run::<_, f32>(device, divided, None).unwrap();
        let gradients = Some((before, Accumulation::Add));
        let (again, d_x, d_weight) = head.run(device, divided, gradients).unwrap();
        assert_eq!(loss, again, "the losses do not depend on whether gradients are wanted");
        (loss, wide(&d_x), d_weight)
    };
    let (loss, d_x, d_weight) = run(device, None);
    let found = on_ranks(device, ranks, |device, rank, all_reduce| {
        run(device, Some((rank, ranks, all_reduce)))
    });
    let adds_none = |loss: &Vec<f64>| loss.iter().all(|loss| *loss == 0.0);
    assert!(found[1..].iter().all(|(loss, ..)| adds_none(loss)), "rank 0 alone adds the losses");
    let tolerance = tolerance::<T>();
    let loss_tolerance = if T::DTYPE == DType::BF16 { 1e-4 } else { F32_TOLERANCE };
    for (found, loss) in found[0].0.iter().zip(&loss) {
        assert_close("loss", &[*found as f32], &[*loss], loss_tolerance);
    }
    let sum = |at| found.iter().map(|(_, d_x, _)| d_x[at]).sum::<f64>() as f32;
    assert_close("d_x", &(0..d_x.len()).map(sum).collect::<Vec<_>>(), &d_x, 2.0 * tolerance);
    let parts: Vec<f32> = found.iter().flat_map(|(.., d_weight)| d_weight.clone()).collect();
    assert_close("d_weight", &parts, &wide(&d_weight), tolerance);
}

#[test]
fn rows_of_the_heads_give_the_losses_and_their_gradients_in_parts() {
    // More than one chunk, with a partial last chunk. Vocabularies that do not divide evenly; one
    // divides into shares that alone would have chunks of 512 and of 511 tokens.
    // A teacher is compared in all rows, in the rows of some ranks, or in a part of the first rank's rows.
    for (tokens, vocab_size, compared, ranks) in [
        (2100, 40, None, 2),
        (600, 4097, None, 2),
        (30, 517, None, 3),
        (1, 4, None, 4),
        (2100, 40, Some(40), 2),
        (600, 4097, Some(3000), 2),
        (30, 517, Some(400), 3),
        (9, 517, Some(100), 3),
        (1, 4, Some(1), 4),
    ] {
        let shape = HeadShape::whole(tokens, 12, vocab_size);
        on_each_device!(device, T => losses_agree::<_, T>(device, shape, compared, ranks, 1));
    }
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn any_division_routes_alike(
        (length, half) in (1usize..40, 1usize..20),
        (group, ranks, kv_heads, router) in (1usize..4, 1usize..3, 2usize..4).prop_flat_map(
            |(group, groups, ranks)| {
                let kv_heads = groups * ranks;
                (Just(group), Just(ranks), Just(kv_heads), routers_of_sets(kv_heads * group))
            },
        ),
        seed: u64,
    ) {
        let heads = kv_heads * group;
        let shape = QkvShape { batch: 1, length, heads, kv_heads, head_dim: 2 * half };
        on_each_device!(device => routing_agrees::<_, f32>(device, shape, router, ranks, seed));
    }

    #[test]
    fn any_division_has_the_same_losses(
        (tokens, width) in (1usize..30, 1usize..20),
        (vocab_size, ranks) in (4usize..80, 2usize..5),
        seed: u64,
    ) {
        let (shape, compared) = (HeadShape::whole(tokens, width, vocab_size), 1 + seed as usize % vocab_size);
        on_each_device!(device => losses_agree::<_, f32>(device, shape, None, ranks, seed));
        on_each_device!(device => losses_agree::<_, f32>(device, shape, Some(compared), ranks, seed));
    }

    #[test]
    fn sums_are_rounded_once(pairs in prop::collection::vec((-9f32..9.0, -9f32..9.0), 0..300)) {
        let [x, y] = [0, 1].map(|side| -> Vec<bf16> {
            let of = |&(x, y): &(f32, f32)| bf16::from_f32([x, y][side]);
            pairs.iter().map(of).collect()
        });
        let sum = |(x, y): (&bf16, &bf16)| bf16::from_f32(x.to_f32() + y.to_f32());
        let expected: Vec<bf16> = x.iter().zip(&y).map(sum).collect();
        fn added<B: Backend>(device: &B, x: &[bf16], y: &[bf16]) -> Vec<bf16> {
            let (x, y) = (upload(device, x), upload(device, y));
            let mut out = garbage::<B, bf16>(device, B::len(&x));
            device.add::<bf16>(B::whole(&x), B::whole(&y), B::whole_mut(&mut out)).unwrap();
            download::<B, bf16>(device, &out)
        }
        on_each_device!(device => assert_eq!(added(device, &x, &y), expected));
    }
}
