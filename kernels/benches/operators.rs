//! Throughput of every operator, forward and backward: `cargo bench -p moh-kernels`, or with
//! `-- attention` after it for some operators. One item is one floating-point operation (so Gitem/s
//! is GFLOP/s); for operators limited by memory bandwidth, bytes are counted. The cases and their
//! shapes come from `moh_kernels::cases`, which `moh-bench operators` also runs.

// A bench stops if an operator rejects its arguments.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use half::bf16;
use moh_kernels::cases::{self, Sizes, Work};
use moh_kernels::{Cpu, Element, Memory};

fn main() {
    divan::Divan::default().max_time(Duration::from_millis(400)).config_with_args().main();
}

fn names() -> impl Iterator<Item = String> {
    cases::all::<Cpu, f32>(Sizes::SMALL).into_iter().map(|case| case.name)
}

#[divan::bench(types = [f32, bf16], args = names())]
fn operators<T: Element>(bencher: Bencher, name: &str) {
    let case =
        cases::all::<Cpu, T>(Sizes::SMALL).into_iter().find(|case| case.name == name).unwrap();
    let mut run = case.prepare(&Cpu).unwrap();
    // As in a training step: on one of the threads that share the work.
    let bencher = match case.work {
        Work::Operations(operations) => bencher.counter(ItemsCount::new(operations)),
        Work::Bytes(bytes) => bencher.counter(BytesCount::new(bytes)),
    };
    bencher.bench_local(|| Cpu.install(|| run(&Cpu)).unwrap());
}
