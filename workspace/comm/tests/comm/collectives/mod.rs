//! Compares every operation of a group with plain loops: the same body for every engine. Each rank calls
//! [`check`]. A rank's elements are a function of the rank, so that every rank knows the expected results.

use half::bf16;
use moh_comm::{Group, RankLayout, Reduce};
use moh_kernels::{AnyBuffer, Cpu, Element, Scalar, Stored};

trait Case: Scalar {
    fn element(rank: usize, at: usize) -> Self;
    fn sum(elements: impl Iterator<Item = Self>) -> Self;
    fn max(elements: impl Iterator<Item = Self>) -> Self;
}

/// Returns a different value for each rank and position, without a pattern.
fn scrambled(rank: usize, at: usize) -> u64 {
    let mut x = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (at as u64) << 7;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn fraction(rank: usize, at: usize) -> f64 {
    // The sums of such values depend on their order, in f32 and in f64.
    (scrambled(rank, at) as f64 / u64::MAX as f64 - 0.5) * 10f64.powi((at % 7) as i32 - 3)
}

macro_rules! case {
    ($($type:ty: $element:expr, $zero:expr, $add:expr, $back:expr, $max:expr;)*) => {
        $(impl Case for $type {
            fn element(rank: usize, at: usize) -> Self {
                $element(rank, at)
            }
            fn sum(mut elements: impl Iterator<Item = Self>) -> Self {
                let first = $zero(elements.next().unwrap());
                $back(elements.fold(first, $add))
            }
            fn max(elements: impl Iterator<Item = Self>) -> Self {
                elements.reduce($max).unwrap()
            }
        })*
    };
}

case! {
    f32: |r, i| fraction(r, i) as f32, |x: f32| x, |a, b| a + b, |x| x, f32::max;
    f64: fraction, |x: f64| x, |a, b| a + b, |x| x, f64::max;
    bf16: |r, i| bf16::from_f64(fraction(r, i)), Element::to_f32, |a: f32, b: bf16| a + b.to_f32(),
        bf16::from_f32, |a: bf16, b: bf16| if b > a { b } else { a };
    u32: |r, i| scrambled(r, i) as u32, |x: u32| x, u32::wrapping_add, |x| x, Ord::max;
    u8: |r, i| scrambled(r, i) as u8, |x: u8| x, u8::wrapping_add, |x| x, Ord::max;
}

fn elements<S: Case>(rank: usize, len: usize) -> Vec<S> {
    (0..len).map(|at| S::element(rank, at)).collect()
}

fn reduced<S: Case>(reduce: Reduce, size: usize, at: usize) -> S {
    let elements = (0..size).map(|rank| S::element(rank, at));
    match reduce {
        Reduce::Sum => S::sum(elements),
        Reduce::Max => S::max(elements),
    }
}

/// Checks every operation, with every element type.
pub fn check(group: &Group) {
    all_types(group);
    long_buffers(group);
    messages(group);
    splits(group);
    many_in_a_row(group);
    group.barrier().unwrap();
}

/// Compares operations that overlap with later work with the same operations that do not.
fn overlapped<S: Case + Stored>(group: &Group) {
    let (rank, size) = (group.rank(), group.size());
    for part in [0, 1, 5, 4099] {
        let buffer = || elements::<S>(rank, part * size);
        let any = || S::any_buffer::<Cpu>(buffer());
        let own = part * rank..part * (rank + 1);
        let wait =
            |pending: moh_comm::Pending<AnyBuffer<Cpu>>| pending.wait().unwrap().into_typed::<S>();
        for reduce in [Reduce::Sum, Reduce::Max] {
            let mut expected = buffer();
            group.reduce_scatter::<Cpu, S>(&mut expected, reduce).unwrap();
            let found = wait(group.start_reduce_scatter(any(), reduce).unwrap());
            assert_eq!(found[own.clone()], expected[own.clone()], "reduce_scatter of {part} each");
        }
        let mut expected = buffer();
        group.all_gather::<Cpu, S>(&mut expected).unwrap();
        let found = wait(group.start_all_gather(any()).unwrap());
        assert_eq!(found, expected, "all_gather of {part} each");
    }
}

fn all_types(group: &Group) {
    collectives::<f32>(group);
    collectives::<f64>(group);
    collectives::<bf16>(group);
    collectives::<u32>(group);
    collectives::<u8>(group);
    overlapped::<f32>(group);
    overlapped::<bf16>(group);
}

fn collectives<S: Case>(group: &Group) {
    let (rank, size) = (group.rank(), group.size());
    for reduce in [Reduce::Sum, Reduce::Max] {
        for len in [0, 1, 3, 7, 1001, 20_011] {
            let expected: Vec<S> = (0..len).map(|at| reduced(reduce, size, at)).collect();
            let mut all = elements::<S>(rank, len);
            group.all_reduce::<Cpu, S>(&mut all, reduce).unwrap();
            assert_eq!(all, expected, "all_reduce of {len}");
        }
        for part in [0, 1, 5, 4099] {
            let len = part * size;
            let own = part * rank..part * (rank + 1);
            let expected: Vec<S> = own.clone().map(|at| reduced(reduce, size, at)).collect();
            let mut whole = elements::<S>(rank, len);
            group.reduce_scatter::<Cpu, S>(&mut whole, reduce).unwrap();
            assert_eq!(whole[own.clone()], expected, "reduce_scatter of {len}");
        }
    }
    for part in [0, 1, 5, 4099] {
        let expected: Vec<S> = (0..part * size).map(|at| S::element(at / part, at)).collect();
        // All other ranks' chunks must be overwritten.
        let mut whole = elements::<S>(rank, part * size);
        group.all_gather::<Cpu, S>(&mut whole).unwrap();
        assert_eq!(whole, expected, "all_gather of {part} each");
    }
    for root in 0..size {
        let mut all = elements::<S>(rank, 333);
        group.broadcast::<Cpu, S>(&mut all, root).unwrap();
        assert_eq!(all, elements(root, 333), "broadcast from {root}");
    }
}

/// Checks buffers that are longer than a piece of an exchange.
fn long_buffers(group: &Group) {
    let (rank, size) = (group.rank(), group.size());
    if size > 3 {
        return;
    }
    let len = size * 1_200_007;
    let mut all = elements::<f32>(rank, len);
    group.all_reduce::<Cpu, f32>(&mut all, Reduce::Sum).unwrap();
    let differs = (0..len).find(|&at| all[at] != reduced::<f32>(Reduce::Sum, size, at));
    assert_eq!(differs, None, "all_reduce of {len}");
}

fn messages(group: &Group) {
    let (rank, size) = (group.rank(), group.size());
    if size == 1 {
        return;
    }
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    // All ranks send before any rank receives, and they send more than any transport buffers.
    for (tag, len) in [(0, 300_000), (1, 1), (2, 0), (7, 5000)] {
        group.send::<Cpu, f32>(&elements::<f32>(rank, len), next, tag).unwrap();
    }
    // Two messages with the same tag arrive in order.
    group.send::<Cpu, f32>(&elements::<f32>(rank + 100, 5000), next, 7).unwrap();
    for (tag, len, from) in
        [(7, 5000, previous), (2, 0, previous), (0, 300_000, previous), (7, 5000, previous + 100)]
    {
        let mut received = vec![0.0; len];
        group.recv::<Cpu, f32>(&mut received, previous, tag).unwrap();
        assert_eq!(received, elements::<f32>(from, len), "tag {tag}");
    }
    let mut received = vec![0.0; 1];
    group.recv::<Cpu, f32>(&mut received, previous, 1).unwrap();
    assert_eq!(received, elements::<f32>(previous, 1));
}

fn splits(group: &Group) {
    let (rank, size) = (group.rank(), group.size());
    // Even and odd ranks, in reverse order.
    let half = group.split("half", Some(rank % 2), size - rank).unwrap().unwrap();
    let members: Vec<usize> = (0..size).rev().filter(|other| other % 2 == rank % 2).collect();
    assert_eq!((half.size(), members[half.rank()]), (members.len(), rank));
    let mut sum = [rank as u32];
    half.all_reduce::<Cpu, u32>(&mut sum, Reduce::Sum).unwrap();
    assert_eq!(sum[0] as usize, members.iter().sum::<usize>());
    // Some ranks belong to no group.
    let first = group.split("first", (rank < 2).then_some(5), 0).unwrap();
    assert_eq!(first.is_some(), rank < 2);
    if let Some(first) = first {
        assert_eq!((first.rank(), first.size()), (rank, size.min(2)));
        first.barrier().unwrap();
    }
    for (tensor, pipeline) in [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)] {
        if !size.is_multiple_of(tensor * pipeline) {
            continue;
        }
        let layout = RankLayout::new(size, tensor, pipeline).unwrap();
        let groups = layout.groups(group).unwrap();
        let at = layout.coordinates(rank);
        for (group, coordinate, size) in [
            (&groups.tensor, at.tensor, tensor),
            (&groups.data, at.data, size / tensor / pipeline),
            (&groups.pipeline, at.pipeline, pipeline),
        ] {
            assert_eq!((group.rank(), group.size()), (coordinate, size), "{group:?}");
            let mut ranks = vec![0u32; size];
            ranks[coordinate] = rank as u32;
            group.all_gather::<Cpu, u32>(&mut ranks).unwrap();
            let expected = (0..size).map(|other| {
                let mut at = at;
                match group.name() {
                    "tensor" => at.tensor = other,
                    "data" => at.data = other,
                    _ => at.pipeline = other,
                }
                layout.rank(at) as u32
            });
            assert!(ranks.iter().copied().eq(expected), "{group:?} {ranks:?}");
        }
    }
}

fn many_in_a_row(group: &Group) {
    let (rank, size) = (group.rank(), group.size());
    let pair = group.split("pair", Some(rank / 2), rank).unwrap().unwrap();
    for round in 0..100u32 {
        let mut sum = [round + rank as u32, 1];
        group.all_reduce::<Cpu, u32>(&mut sum, Reduce::Sum).unwrap();
        let ranks = (size * (size - 1) / 2) as u32;
        assert_eq!(sum, [round * size as u32 + ranks, size as u32]);
        if pair.size() == 2 {
            pair.send::<Cpu, u32>(&sum, 1 - pair.rank(), round % 3).unwrap();
            let mut received = [0; 2];
            pair.recv::<Cpu, u32>(&mut received, 1 - pair.rank(), round % 3).unwrap();
            assert_eq!(received, sum);
        }
        pair.barrier().unwrap();
    }
}
