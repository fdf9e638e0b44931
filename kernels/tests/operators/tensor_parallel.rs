//! Operators whose heads or vocabulary are divided among ranks, simulated by threads, against the
//! same operators on one rank.

use std::sync::{Barrier, Mutex};

use crate::reference::{
    Another, F32_TOLERANCE, Random, all_heads, assert_close, cases, download, first_shared,
    garbage, rope_tables, routers_of_sets, selection_and_gates, shared, table, tolerance, upload,
    wide,
};
use half::bf16;
use moh_kernels::attention::{AttentionArgs, AttentionForward, AttentionShape, KeyValues};
use moh_kernels::cross_entropy::{
    CrossEntropyArgs, HeadGradients, HeadRanks, HeadShape, HeadTeacher, IGNORED,
};
use moh_kernels::embedding::{EmbeddingBackward, EmbeddingForward};
use moh_kernels::ranks::{AllReduce, Heads, VocabularyRows};
use moh_kernels::rope::{QkvShape, RopeArgs, RopeTable};
use moh_kernels::router::query_norm::{
    QueryNorm, QueryNormForward, QueryNormRopeBackward, QueryNormRopeForward, QueryNormRouter,
    Selects,
};
use moh_kernels::router::{RouterGradient, RouterRanks, Routing};
use moh_kernels::{Accumulation, Backend, Cpu, DType, Element, ViewMut};
use proptest::prelude::*;

/// Runs `work` on `count` ranks, each on a device of its own, and returns their results; tables are
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

/// The elements of a rank's local heads in a row with `part` elements per head.
pub(crate) fn local_columns<S: Copy>(row: &[S], heads: Heads, part: usize) -> Vec<S> {
    let head = |local| row[heads.index(local) * part..][..part].iter().copied();
    (0..heads.local()).flat_map(head).collect()
}

/// The packed queries, keys and values that are local to a rank.
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

/// The inputs of a routed attention.
struct Attended<'a, T> {
    shape: QkvShape,
    router: QueryNormRouter,
    qkv: &'a [T],
    d_qkv: &'a [T],
    delta: &'a [f32],
}

/// The results of a rank.
struct Found<T> {
    mask: Vec<u8>,
    gates: Vec<f32>,
    balance_loss: f64,
    out: Vec<T>,
    d_qkv: Vec<T>,
}

fn attend<B: Backend, T: Element>(
    device: &B,
    case: &Attended<'_, T>,
    heads: Heads,
    all_reduce: Option<AllReduce<'_, B>>,
) -> Found<T> {
    let &Attended { shape, router, qkv, d_qkv, delta } = case;
    let tables = rope_tables(shape.length, shape.head_dim);
    let (cos, sin) = (upload(device, &tables.0), upload(device, &tables.1));
    let tokens = shape.tokens();
    let mut routing = Routing::new(device, router.routing_shape(tokens, heads).unwrap()).unwrap();
    let mut qkv = upload(device, qkv);
    let rope =
        RopeArgs { shape: &shape, table: table(&cos, &sin), qkv: B::whole_mut::<T>(&mut qkv) };
    let forward = QueryNormRopeForward { rope, routing: &mut routing, all_reduce };
    device.query_norm_rope_forward(router, forward).unwrap();

    let QkvShape { batch, length, heads: local, kv_heads, head_dim } = shape;
    let attention = AttentionShape {
        batch,
        query_length: length,
        key_length: length,
        heads: local,
        kv_heads,
        head_dim,
        query_stride: shape.row(),
    };
    let keys = local * head_dim;
    let key_values = KeyValues::Contiguous {
        keys: B::view::<T>(&qkv, keys..tokens * shape.row()),
        values: B::view::<T>(&qkv, keys + kv_heads * head_dim..tokens * shape.row()),
        row_stride: shape.row(),
    };
    let mut out = garbage::<B, T>(device, tokens * keys);
    let mut log_sum_exp = garbage::<B, f32>(device, tokens * local);
    device
        .attention_forward(AttentionForward {
            args: AttentionArgs {
                selection: Some(routing.selection()),
                ..AttentionArgs::causal(attention)
            },
            queries: B::whole(&qkv),
            key_values,
            out: B::whole_mut(&mut out),
            log_sum_exp: B::whole_mut(&mut log_sum_exp),
        })
        .unwrap();

    let (mut d_qkv, delta) = (upload(device, d_qkv), upload(device, delta));
    let mut deltas = upload(device, &vec![7f64; tokens * routing.columns()]);
    let gradient = RouterGradient {
        routing: &routing,
        delta: Some(B::whole(&delta)),
        balance_weight: 0.5,
        ranks: all_reduce
            .map(|all_reduce| RouterRanks { table: B::whole_mut(&mut deltas), all_reduce }),
    };
    let rope =
        RopeArgs { shape: &shape, table: table(&cos, &sin), qkv: B::whole_mut::<T>(&mut d_qkv) };
    let backward = QueryNormRopeBackward { qkv: B::whole(&qkv), rope, gradient };
    device.query_norm_rope_backward(router, backward).unwrap();
    let (mask, gates) = selection_and_gates(device, &routing);
    let mut loss = upload(device, &[0f64]);
    device.balance_loss(&routing, 1.0, B::whole_mut(&mut loss)).unwrap();
    Found {
        mask,
        gates,
        balance_loss: download::<B, f64>(device, &loss)[0],
        out: download::<B, T>(device, &out),
        d_qkv: download::<B, T>(device, &d_qkv),
    }
}

fn routing_agrees<B: Backend + Another, T: Element>(
    device: &B,
    shape: QkvShape,
    router: QueryNormRouter,
    ranks: usize,
    seed: u64,
) {
    let mut random = Random(seed);
    let qkv: Vec<T> = random.elements(shape.tokens() * shape.row());
    let d_qkv: Vec<T> = random.elements(qkv.len());
    let delta: Vec<f32> = random.elements(shape.tokens() * shape.heads);
    let case = Attended { shape, router, qkv: &qkv, d_qkv: &d_qkv, delta: &delta };
    let whole = attend(device, &case, all_heads(&shape), None);

    let heads =
        |rank| Heads { count: shape.heads, group_size: shape.heads / shape.kv_heads, rank, ranks };
    let local = QkvShape { heads: shape.heads / ranks, kv_heads: shape.kv_heads / ranks, ..shape };
    let found = on_ranks(device, ranks, |device, rank, all_reduce| {
        let deltas = delta.chunks_exact(shape.heads);
        let case = Attended {
            shape: local,
            router,
            qkv: &local_qkv(&qkv, &shape, rank, ranks),
            d_qkv: &local_qkv(&d_qkv, &shape, rank, ranks),
            delta: &deltas.flat_map(|row| local_columns(row, heads(rank), 1)).collect::<Vec<_>>(),
        };
        attend(device, &case, heads(rank), Some(all_reduce))
    });
    for (rank, found) in found.into_iter().enumerate() {
        let out = whole.out.chunks_exact(shape.heads * shape.head_dim);
        let expected = Found {
            mask: whole.mask.clone(),
            gates: whole.gates.clone(),
            balance_loss: whole.balance_loss,
            out: out.flat_map(|row| local_columns(row, heads(rank), shape.head_dim)).collect(),
            d_qkv: local_qkv(&whole.d_qkv, &shape, rank, ranks),
        };
        let same = |is: bool, what: &str| assert!(is, "rank {rank} of {ranks}: another {what}");
        same(found.mask == expected.mask, "selection");
        same(found.gates == expected.gates, "gate");
        same(found.balance_loss == expected.balance_loss, "balance loss");
        same(found.out == expected.out, "output");
        same(found.d_qkv == expected.d_qkv, "gradient");
    }
}

#[test]
fn ranks_select_the_same_heads_as_one_and_their_gradients_have_the_same_bits() {
    let shape = QkvShape { batch: 2, length: 70, heads: 12, kv_heads: 4, head_dim: 16 };
    // Equal and unequal shares of shared heads, no shared heads, and ranks without routed heads.
    for (shared_heads, top_k) in [(6, 3), (4, 5), (0, 3), (9, 2), (2, 10), (12, 0)] {
        let router = first_shared(shared_heads, top_k);
        for ranks in [2, 4] {
            on_each_device!(device => routing_agrees::<_, f32>(device, shape, router, ranks, 1));
            on_each_device!(device => routing_agrees::<_, bf16>(device, shape, router, ranks, 2));
        }
    }
}

/// Sets with heads of every rank, of one of them, and without heads before the first routed one.
#[test]
fn ranks_with_any_set_of_shared_heads_select_the_same_heads_as_one() {
    let shape = QkvShape { batch: 2, length: 70, heads: 12, kv_heads: 4, head_dim: 16 };
    for (set, top_k) in
        [(&[0, 1, 5, 8, 10][..], 3), (&[11], 5), (&[1, 3, 5, 7, 9, 11], 0), (&[0, 3, 4, 5], 8)]
    {
        let router = shared(set.iter().copied(), top_k);
        for ranks in [2, 4] {
            on_each_device!(device => routing_agrees::<_, f32>(device, shape, router, ranks, 3));
            on_each_device!(device => routing_agrees::<_, bf16>(device, shape, router, ranks, 4));
        }
    }
}

#[test]
fn ranks_route_groups_and_heads_within_them_like_one() {
    let shape = QkvShape { batch: 2, length: 70, heads: 12, kv_heads: 4, head_dim: 16 };
    for (selects, set, top_k) in [
        (Selects::Groups, &[3, 4, 5][..], 6),
        (Selects::Groups, &[], 3),
        (Selects::WithinGroups, &[0, 4, 8, 9], 4),
        (Selects::WithinGroups, &[], 8),
    ] {
        let router = QueryNormRouter { selects, ..shared(set.iter().copied(), top_k) };
        for ranks in [2, 4] {
            on_each_device!(device => routing_agrees::<_, f32>(device, shape, router, ranks, 5));
            on_each_device!(device => routing_agrees::<_, bf16>(device, shape, router, ranks, 6));
        }
    }
}

#[test]
fn divided_heads_that_exchange_nothing_are_refused() {
    let router = first_shared(2, 1);
    let shape = QkvShape { batch: 1, length: 1, heads: 2, kv_heads: 1, head_dim: 2 };
    let heads = Heads { count: 4, group_size: 2, rank: 0, ranks: 2 };
    let mut routing = Routing::new(&Cpu, router.routing_shape(1, heads).unwrap()).unwrap();
    let forward = QueryNormForward::<Cpu, f32> {
        shape: &shape,
        qkv: &[1f32; 8],
        routing: &mut routing,
        all_reduce: None,
    };
    let refused = Cpu.query_norm_forward(router, forward);
    assert!(refused.unwrap_err().to_string().contains("divided among 2 ranks"));
    let table = RopeTable::<Cpu> { cos: &[1.0], sin: &[0.0], first_position: 0 };
    let rope = RopeArgs::<Cpu, f32> { shape: &shape, table, qkv: &mut [1f32; 8] };
    let forward = QueryNormRopeForward { rope, routing: &mut routing, all_reduce: None };
    let refused = Cpu.query_norm_rope_forward(router, forward);
    assert!(refused.unwrap_err().to_string().contains("divided among 2 ranks"));
    let three = router.routing_shape(1, Heads { ranks: 3, ..heads }).unwrap();
    assert!(Routing::new(&Cpu, three).is_err());
}

fn embedding_agrees<B: Backend, T: Element>(device: &B, rows: usize, ranks: usize, seed: u64) {
    const WIDTH: usize = 5;
    let mut random = Random(seed);
    let table: Vec<T> = random.elements(rows * WIDTH);
    let ids: Vec<u32> = (0..40).map(|_| random.below(rows) as u32).collect();
    let d_out: Vec<T> = random.elements(ids.len() * WIDTH);
    let run = |local: VocabularyRows| {
        let part = &table[local.first * WIDTH..(local.first + local.count) * WIDTH];
        let (ids, part) = (upload(device, &ids), upload(device, part));
        let mut out = garbage::<B, T>(device, 40 * WIDTH);
        let forward = EmbeddingForward {
            width: WIDTH,
            rows: local,
            ids: B::whole(&ids),
            table: B::whole(&part),
            out: B::whole_mut(&mut out),
        };
        device.embedding_forward(forward).unwrap();
        let d_out = upload(device, &d_out);
        let mut d_table = upload(device, &vec![1f32; local.count * WIDTH]);
        let backward = EmbeddingBackward {
            width: WIDTH,
            rows: local,
            ids: B::whole(&ids),
            d_out: B::whole(&d_out),
            d_table: B::whole_mut(&mut d_table),
        };
        device.embedding_backward(backward).unwrap();
        (wide(&download::<B, T>(device, &out)), download::<B, f32>(device, &d_table))
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
        on_each_device!(device => embedding_agrees::<_, f32>(device, rows, ranks, 1));
        on_each_device!(device => embedding_agrees::<_, bf16>(device, rows, ranks, 2));
    }
}

fn losses_agree<B: Backend + Another, T: Element>(
    device: &B,
    shape: HeadShape,
    compared: Option<usize>,
    ranks: usize,
    seed: u64,
) {
    let HeadShape { tokens, width, vocab_size, .. } = shape;
    const TEACHERS_WIDTH: usize = 5;
    let mut random = Random(seed);
    let x: Vec<T> = random.elements(tokens * width);
    let weight: Vec<T> = random.elements(vocab_size * width);
    let teachers_x: Vec<T> = random.elements(tokens * TEACHERS_WIDTH);
    let teachers_weight: Vec<T> = random.elements(vocab_size * TEACHERS_WIDTH);
    let targets: Vec<u32> = (0..tokens)
        .map(|_| if random.below(4) == 0 { IGNORED } else { random.below(vocab_size) as u32 })
        .collect();
    let run = |device: &B, rank: usize, ranks: usize, all_reduce: Option<AllReduce<'_, B>>| {
        let rows = VocabularyRows::of_rank(vocab_size, rank, ranks);
        let shape = HeadShape::of_rows(tokens, width, rows, ranks);
        let shape = shape.with_teacher(compared.is_some());
        let local = |weight: &[T], width: usize| {
            weight[rows.first * width..(rows.first + rows.count) * width].to_vec()
        };
        let teachers_x = upload(device, &teachers_x);
        let teachers_part = upload(device, &local(&teachers_weight, TEACHERS_WIDTH));
        let part = &local(&weight, width);
        let (x, part, targets) =
            (upload(device, &x), upload(device, part), upload(device, &targets));
        let mut scratch = garbage::<B, f32>(device, device.cross_entropy_scratch(&shape));
        let mut sums = upload(device, &vec![7f64; device.cross_entropy_sums(&shape, ranks)]);
        let losses = if compared.is_some() { vec![2f64, 3.0] } else { vec![2f64] };
        let mut loss = upload(device, &losses);
        let mut d_x = garbage::<B, T>(device, tokens * width);
        let mut d_weight = upload(device, &vec![1f32; rows.count * width]);
        let mut evaluate = |gradients: bool| {
            let gradients = gradients.then(|| HeadGradients {
                scale: 0.25,
                d_x: B::whole_mut(&mut d_x),
                d_weight: B::whole_mut(&mut d_weight),
                accumulation: Accumulation::Add,
            });
            let ranks = all_reduce.map(|all_reduce| HeadRanks {
                rows,
                rank,
                ranks,
                sums: B::whole_mut(&mut sums),
                all_reduce,
            });
            let args = CrossEntropyArgs {
                shape,
                x: B::whole(&x),
                weight: B::whole(&part),
                targets: B::whole(&targets),
                scratch: B::whole_mut(&mut scratch),
                loss: B::whole_mut(&mut loss),
                teacher: compared.map(|rows| HeadTeacher {
                    width: TEACHERS_WIDTH,
                    x: B::whole(&teachers_x),
                    weight: B::whole(&teachers_part),
                    rows,
                    temperature: 1.5,
                    scale: 0.75,
                }),
                gradients,
                ranks,
            };
            device.cross_entropy(args).unwrap();
        };
        evaluate(false);
        evaluate(true);
        let found = download::<B, f64>(device, &loss);
        let loss: Vec<f64> =
            found.iter().zip(losses).map(|(found, before)| found - before).collect();
        (loss, wide(&download::<B, T>(device, &d_x)), download::<B, f32>(device, &d_weight))
    };
    let (loss, d_x, d_weight) = run(device, 0, 1, None);
    let found = on_ranks(device, ranks, |device, rank, all_reduce| {
        run(device, rank, ranks, Some(all_reduce))
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
fn rows_of_the_head_give_the_loss_and_its_gradients_in_parts() {
    // More than one chunk, with a partial last one; vocabularies that do not divide evenly, one of
    // them into shares that alone would have chunks of 512 and of 511 tokens.
    for (tokens, vocab_size, ranks) in [(2100, 40, 2), (600, 4097, 2), (30, 517, 3), (1, 4, 4)] {
        let shape = HeadShape::whole(tokens, 12, vocab_size);
        on_each_device!(device => losses_agree::<_, f32>(device, shape, None, ranks, 1));
        on_each_device!(device => losses_agree::<_, bf16>(device, shape, None, ranks, 2));
    }
}

#[test]
fn rows_of_two_heads_give_the_distillation_loss_and_its_gradients_in_parts() {
    // All rows, those of some ranks, and a part of the first rank's.
    for (tokens, vocab_size, compared, ranks) in
        [(2100, 40, 40, 2), (600, 4097, 3000, 2), (30, 517, 400, 3), (9, 517, 100, 3), (1, 4, 1, 4)]
    {
        let (shape, compared) = (HeadShape::whole(tokens, 12, vocab_size), Some(compared));
        on_each_device!(device => losses_agree::<_, f32>(device, shape, compared, ranks, 1));
        on_each_device!(device => losses_agree::<_, bf16>(device, shape, compared, ranks, 2));
    }
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn any_division_routes_alike(
        (length, group, half) in (1usize..40, 1usize..4, 1usize..20),
        (groups, ranks) in (1usize..3, 2usize..4),
        shared in 0usize..100,
        top_k in 0usize..100,
        seed: u64,
    ) {
        let (kv_heads, heads) = (groups * ranks, groups * ranks * group);
        let shape = QkvShape { batch: 1, length, heads, kv_heads, head_dim: 2 * half };
        // Any but one routed head.
        let routed = match shared % (heads + 1) { 1 => 2, routed => routed };
        let router = first_shared(heads - routed, top_k % (routed + 1));
        on_each_device!(device => routing_agrees::<_, f32>(device, shape, router, ranks, seed));
    }

    #[test]
    fn any_division_routes_alike_with_any_set_of_shared_heads(
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
